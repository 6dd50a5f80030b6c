// Dense MLA decode for Hopper (sm_90a): one block of threads takes 64 rows (heads of query tokens) of a sequence and a
// span of its keys.
//
// A warp copies tiles of 64 keys from pages to shared memory (TMA). Warpgroup 0 takes scores, keeps the softmax and
// accumulates output channels 0..127; warpgroup 1 accumulates the other 384 with the weights that warpgroup 0 leaves in
// shared memory. That is two thirds and a third of the products. The registers that warpgroup 0 has left hold nearly
// half of the queries: shared memory is read less, and has room for more tiles. Scores of the next tile begin before
// the exponentials of this one. Two blocks of a sequence share tiles: each copies half of them to both. Sums of several
// spans go to memory and `combine` sums them.
// Compiled with CLUSTER: 2 where blocks share tiles, or 1.

#include "hopper.cuh"
#include "outputs.cuh"
#include "softmax.cuh"
#include "spans.cuh"
#include "paged.cuh"
#include "dense_decode_tiles.cuh"

// Chunks of the next tile's scores that begin before the exponentials: those that come early, or more where memory is
// the limit.
constexpr int EARLY = CLUSTER > 1 ? 5 : 7;

// The chunks of queries that scores take first, as operands.
struct Queries {
    u32 held[HELD][16];

    __device__ __forceinline__ void load(const u16 *from, int rows) {
#pragma unroll
        for (int turn = 0; turn < HELD; turn++)
#pragma unroll
            for (int i = 0; i < 16; i++) {
                int row = own_row() + i % 2 * 8;
                int channel = chunk_at(turn) * 64 + i / 4 * 16 + i / 2 % 2 * 8 + threadIdx.x % 4 * 2;
                held[turn][i] = row < rows ? *(const u32 *)(from + row * WIDTH + channel) : 0;
            }
    }
};

// The other chunks to shared memory, zeros behind the rows there are; by both warpgroups.
__device__ __forceinline__ void share_queries(const u16 *from, int rows) {
    constexpr int units = (CHUNKS - HELD) * 8, turns = ROWS * units / 256;
    uint4 found[turns];  // all in flight at once
#pragma unroll
    for (int i = 0; i < turns; i++) {
        int at = i * 256 + threadIdx.x, row = at / units, unit = at % units;
        found[i] = make_uint4(0, 0, 0, 0);
        if (row < rows) found[i] = *(const uint4 *)(from + row * WIDTH + chunk_at(HELD + unit / 8) * 64 + unit % 8 * 8);
    }
#pragma unroll
    for (int i = 0; i < turns; i++) {
        int at = i * 256 + threadIdx.x, row = at / units, unit = at % units;
        store16(here() + unit / 8 * CHUNK + swizzled(row, unit % 8), found[i].x, found[i].y, found[i].z, found[i].w);
    }
    show_to_tensor_cores();
    meet<1, 256>();
}

// Scores by the chunks FROM up to TO of a tile.
template <int FROM, int TO>
__device__ __forceinline__ void issue_scores(float (&scores)[32], const Queries &queries, const Copies &copies) {
    if (FROM == 0) hold(scores);
#pragma unroll
    for (int turn = FROM; turn < TO; turn++) {
        int part = part_at(turn);
        if (turn == 0 || turn % 2) {
            copies.await(part);
            begin_products();
        }
        // Descriptors count in 16 bytes.
        u64 keys = operand(shared + place_of(part) + (chunk_at(turn) - chunk_of(part)) * CHUNK, 16) +
                   copies.of(part) * (part_bytes(part) / 16);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (turn < HELD) multiply_keys(scores, queries.held[turn] + 4 * k, keys + 2 * k, turn + k > 0);
            else multiply_keys(scores, operand(shared + (turn - HELD) * CHUNK + k * 32, 16), keys + 2 * k, 1);
    }
    commit_products();
}

// The 128 channels of values that a part is.
__device__ __forceinline__ void issue_values(float *output, const u32 (&weights)[16], int part, const Copies &copies) {
    u64 values = operand(shared + place_of(part), CHUNK) + copies.of(part) * (part_bytes(part) / 16);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_values(output, weights + 4 * k, values + k * (2048 / 16));
    commit_products();
}

// Weights, the registers of a bf16 operand, to shared memory: a thread's for the same thread of warpgroup 1.
__device__ __forceinline__ void pass_weights(const u32 (&weights)[16], const Softmax &softmax, bool later) {
    if (later) meet<3, 256>();  // the other warpgroup has read the weights of the tile before
#pragma unroll
    for (int k = 0; k < 4; k++)
        store16(here() + WEIGHTS + k * 2048 + threadIdx.x * 16, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                weights[4 * k + 3]);
    write_rows_of(here() + STATE + FACTOR, softmax.factor);
    signal<2, 256>();
}

// From the scores of `tile`, which have come, to those of the next one, if there are MORE.
template <bool MORE>
__device__ __forceinline__ void advance(float (&scores)[32], float (&next)[32], float (&output)[64],
                                        const Queries &queries, Softmax &softmax, const Task &task, int tile, int seen,
                                        Copies &copies) {
    float scale[2] = {task.p.scale, task.p.scale};
    int keys = task.end - task.first - tile * TILE;
    u32 weights[16];
    Copies own = copies;
    copies.next();
    own.release(0);
    if (task.first + tile * TILE + TILE > seen) task.hide(scores, tile);
    softmax.glance(scores, scale);
    rescale(output, softmax.factor[0], softmax.factor[1]);
    if (keys < TILE) {
        own.clear(OWN, keys);
        show_to_tensor_cores();
        meet<5, 128>();
    }
    hold(output);
    if (MORE) issue_scores<0, EARLY>(next, queries, copies);
    softmax.weigh(scores, scale);
#pragma unroll
    for (int j = 0; j < 16; j++) weights[j] = pair(scores[2 * j], scores[2 * j + 1]);
    pass_weights(weights, softmax, tile > 0);
    issue_values(output, weights, OWN, own);
    if (MORE) issue_scores<EARLY, CHUNKS>(next, queries, copies);
    await_products<MORE>();
    own.release(OWN);
    await_products<0>();
    hold(output);
    if (MORE) hold(next);
    if (!KEPT) return;
    if (tile & 1) signal<8, 256>();
    else signal<7, 256>();
}

__device__ __forceinline__ void attend(const Task &task) {
    float even[32], odd[32], output[64], factor[2], scale[2] = {task.p.scale, task.p.scale};
    int tile = 0, last = task.tiles - 1, seen = task.seen();
    Queries queries;
    Softmax softmax;
    Copies copies;
    queries.load(task.query(), task.p.rows - task.row);
    share_queries(task.query(), task.p.rows - task.row);
#pragma unroll
    for (int i = 0; i < 32; i++) even[i] = odd[i] = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) output[i] = 0;
    if (task.tiles) {
        issue_scores<0, CHUNKS>(even, queries, copies);
        await_products<0>();
        hold(even);
#pragma unroll 1
        for (; tile + 1 < last; tile += 2) {
            advance<true>(even, odd, output, queries, softmax, task, tile, seen, copies);
            advance<true>(odd, even, output, queries, softmax, task, tile + 1, seen, copies);
        }
        if (tile < last) {
            advance<true>(even, odd, output, queries, softmax, task, tile, seen, copies);
            advance<false>(odd, even, output, queries, softmax, task, last, seen, copies);
        } else {
            advance<false>(even, odd, output, queries, softmax, task, last, seen, copies);
        }
    }
    task.close(softmax, scale, factor, 1.0f);
    write_rows_of(here() + STATE + TOTAL, factor);
    meet<4, 256>();
    write_channels(task.output(0), task.p.rows - task.row, output, factor[0], factor[1]);
}

__device__ __forceinline__ void accumulate(float (&output)[192], const Task &task, int tile, const Copies &copies) {
    u32 weights[16], factor = here() + STATE + FACTOR + 4 * own_row();
    int keys = task.end - task.first - tile * TILE;
    copies.await(3), copies.await(OTHER), copies.await(2);
    meet<2, 256>();
    float first = read_float(factor), second = read_float(factor + 32);
#pragma unroll
    for (int k = 0; k < 4; k++) read16(here() + WEIGHTS + k * 2048 + threadIdx.x % 128 * 16, weights + 4 * k);
    if (tile + 1 < task.tiles) signal<3, 256>();
    rescale(output, first, second);
    if (keys < TILE) {
        copies.clear(3, keys), copies.clear(OTHER, keys), copies.clear(2, keys);
        show_to_tensor_cores();
        meet<6, 128>();
    }
    hold(output);
    issue_values(output, weights, 3, copies);
    if (KEPT) {  // two thirds of the values wait until the next scores are done, which would take longer beside them
        await_products<0>();
        copies.release(3);
        if (tile & 1) meet<8, 256>();
        else meet<7, 256>();
    }
    issue_values(output + 64, weights, OTHER, copies);
    issue_values(output + 128, weights, 2, copies);
    if (!KEPT) {
        await_products<2>();
        copies.release(3);
    }
    await_products<1>();
    copies.release(OTHER);
    await_products<0>();
    hold(output);
    copies.release(2);
}

__device__ __forceinline__ void follow(const Task &task) {
    float output[192];
    Copies copies;
    share_queries(task.query(), task.p.rows - task.row);
#pragma unroll
    for (int i = 0; i < 192; i++) output[i] = 0;
#pragma unroll 1
    for (int tile = 0; tile < task.tiles; tile++, copies.next()) accumulate(output, task, tile, copies);
    meet<4, 256>();
    u32 total = here() + STATE + TOTAL + 4 * own_row();
    float first = read_float(total), second = read_float(total + 32);
#pragma unroll
    for (int i = 0; i < 3; i++)
        write_channels(task.output(0) + 128 * (i + 1), task.p.rows - task.row, output + 64 * i, first, second);
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(384, 1)
    dense_decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != here()) __trap();
    let_next_launch_start();
    int group = threadIdx.x / 128;
    if (threadIdx.x == 256) prepare_barriers();
    __syncthreads();
    if (CLUSTER > 1) meet_cluster();
    if (group == 2) {  // registers of all three: three times what a thread begins with, 168
        fewer_registers<40>();
        if (threadIdx.x < 288) produce(p, Task(p));
    } else if (group == 0) {
        more_registers<224>();
        Task task(p);
        if (!task.idle()) attend(task);
    } else {
        more_registers<240>();
        Task task(p);
        if (!task.idle()) follow(task);
    }
    if (CLUSTER > 1) meet_cluster();  // the other block may still copy to this one
}

extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Parameters p) { combine_spans(p); }
