// Dense MLA decode over FP8 records for Hopper (sm_90a): one block of threads takes 64 rows (heads of query tokens) of
// a sequence and a span of its keys.
//
// A warp copies tiles of 64 records to shared memory, four tiles deep, two others their scales. Warpgroup 0 takes
// scores, in FP8: a product for every 128 channels, times the keys' scales, and bf16 for the 64 rotated ones; queries
// are E4M3 times a scale for each row. Its weights, in bf16, go to warpgroups 1 and 2, which accumulate 256 output
// channels each, transposed: a thread reads E4M3 codes across keys, makes bf16 of them in registers and multiplies.
// Scores run a tile or two ahead. (Products of values in FP8 are faster, but their sums, in the tensor cores, lose a
// seventh of 8,192 equal values.) Two blocks of a sequence share tiles: each copies half of them to both.
// Compiled with CLUSTER: 2 where blocks share tiles, or 1.

#include "hopper.cuh"
#include "softmax.cuh"
#include "spans.cuh"
#include "paged.cuh"
#include "dense_decode_fp8_records.cuh"
#include "dense_decode_fp8_products.cuh"
#include "dense_decode_fp8_tiles.cuh"

constexpr int SUMS = 128, FOR_SCORES = 136, FOR_VALUES = 176;  // registers

__device__ __forceinline__ void issue_group(float (&part)[32], u64 keys, int group) {
    hold(part);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 at = group * CHUNK + k * 32;
        multiply_codes(part, operand(shared + at, 16), keys + at / 16, k > 0);
    }
    commit_products();
}

// Of a group: those of the keys that a thread shares. Read before products are awaited, or their way is lost time.
__device__ __forceinline__ void read_scales(float (&scale)[16], int stage, int group) {
#pragma unroll
    for (int i = 0; i < 4; i++) read16(own_scales(stage, group, i), (u32 *)scale + 4 * i);
}

// scores += part times the keys' scales of its group.
__device__ __forceinline__ void add_group(float (&scores)[32], float (&part)[32], const float (&scale)[16]) {
    hold(part);
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] += part[i] * scale[i / 4 * 2 + i % 2];
}

// In a cluster, blocks copy to each other.
__device__ __forceinline__ void free_tile(int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(state(FREED + 8 * stage));
    if (CLUSTER > 1 && threadIdx.x % 32 == 1) barrier_arrive_at_peer(state(FREED + 8 * stage));
}

// Rotated channels into `scores`, the first group into `part`; not awaited.
__device__ __forceinline__ void begin_scores(float (&scores)[32], float (&part)[32], int stage) {
    u64 keys = operand(shared + KEYS, 16) + stage * (TILE_BYTES / 16);
    hold(scores);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 at = GROUPS * CHUNK + k * 32;
        multiply_keys(scores, operand(shared + at, 16), keys + at / 16, k > 0);
    }
    issue_group(part, keys, 0);
}

// The other groups, in turns with `other`, where the second one is being made, and all of them times their scales.
__device__ __forceinline__ void end_scores(float (&scores)[32], float (&part)[32], float (&other)[32], int stage) {
    u64 keys = operand(shared + KEYS, 16) + stage * (TILE_BYTES / 16);
    float scale[16];
    read_scales(scale, stage, 0);
    await_products<1>();
    hold(scores);
    add_group(scores, part, scale);
    read_scales(scale, stage, 1);
    issue_group(part, keys, 2);
    await_products<1>();
    add_group(scores, other, scale);
    read_scales(scale, stage, 2);
    issue_group(other, keys, 3);
    await_products<1>();
    add_group(scores, part, scale);
    read_scales(scale, stage, 3);
    await_products<0>();
    add_group(scores, other, scale);
    free_tile(stage);
}

// Weights [rows x keys] to shared memory, and what sums of earlier tiles are to be multiplied by.
__device__ __forceinline__ void pass_weights(const u32 (&weights)[16], const Softmax &softmax, int buffer) {
    int lane = threadIdx.x % 32;
    u32 to = here() + WEIGHTS + buffer * ROWS * TILE * 2;
#pragma unroll
    for (int i = 0; i < 4; i++)  // sixteen keys
        store_matrices(to + swizzled(threadIdx.x / 32 * 16 + lane % 16, 2 * i + lane / 16), weights[4 * i],
                       weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3]);
    write_rows_of(state(FACTOR + buffer * 4 * ROWS), softmax.factor);
    bool behind = __any_sync(~0u, softmax.factor[0] != 1.0f || softmax.factor[1] != 1.0f);
    if (threadIdx.x % 32 == 0) store4(state(BEHIND + 16 * buffer + threadIdx.x / 32 * 4), behind);
    show_to_tensor_cores();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(state(READY + 8 * buffer));
}

// The numbers of a thread's two rows; `at` is that of row 0.
__device__ __forceinline__ void read_rows_of(u32 at, float (&x)[2]) {
    x[0] = read_float(at + 4 * own_row()), x[1] = read_float(at + 4 * own_row() + 32);
}

// Scores that have come become weights.
__device__ __forceinline__ void weigh(float (&scores)[32], u32 (&weights)[16], Softmax &softmax, int seen,
                                      const Task &task, int tile) {
    float scale[2];
    read_rows_of(state(QUERY), scale);
    if (tile >= seen) task.hide(scores, tile);
    softmax.look(scores, scale);
    softmax.weigh(scores, scale);
#pragma unroll
    for (int i = 0; i < 16; i++) weights[i] = pair(scores[2 * i], scores[2 * i + 1]);
}

__device__ __forceinline__ void await_room(int tile) {
    if (tile >= 2) barrier_wait(state(TAKEN + 8 * (tile % 2)), (tile / 2 - 1) & 1);
}

// The same, while those of the next tile come.
__device__ __forceinline__ void advance(float (&scores)[32], float (&next)[32], float (&part)[32], Softmax &softmax,
                                        int seen, const Task &task, int tile) {
    int stage = (tile + 1) % STAGES;
    u32 weights[16];
    barrier_wait(state(FULL + 8 * stage), (tile + 1) / STAGES & 1);
    begin_scores(next, part, stage);
    weigh(scores, weights, softmax, seen, task, tile);
    issue_group(scores, operand(shared + KEYS, 16) + stage * (TILE_BYTES / 16), 1);
    await_room(tile);
    pass_weights(weights, softmax, tile % 2);
    end_scores(next, part, scores, stage);
}

__device__ __forceinline__ void attend(const Task &task) {
    float even[32], odd[32], part[32], scale[2], factor[2];
    int tile = 0, last = task.tiles - 1, seen = (task.seen() - task.first) / TILE;
    u32 weights[16];
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < 32; i++) even[i] = odd[i] = part[i] = 0;
    if (task.tiles) {
        barrier_wait(state(FULL), 0);
        begin_scores(even, part, 0);
        issue_group(odd, operand(shared + KEYS, 16), 1);
        end_scores(even, part, odd, 0);
#pragma unroll 1
        for (; tile + 1 < last; tile += 2) {
            advance(even, odd, part, softmax, seen, task, tile);
            advance(odd, even, part, softmax, seen, task, tile + 1);
        }
        if (tile < last) {
            advance(even, odd, part, softmax, seen, task, tile);
            weigh(odd, weights, softmax, seen, task, last);
        } else {
            weigh(even, weights, softmax, seen, task, last);
        }
        await_room(last);
        pass_weights(weights, softmax, last % 2);
    }
    read_rows_of(state(QUERY), scale);
    task.close(softmax, scale, factor, 4294967296.0f);
    write_rows_of(state(TOTAL), factor);
    meet<4, 384>();
}

// Codes of 16 channels and 32 keys: each word has two channels beside each other of two keys beside each other.
__device__ __forceinline__ void read_codes(u32 (&word)[4], u32 tile, int half, int step) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    u32 at = tile + (half * 2 + step / 4) * CHUNK + swizzled(step % 2 * 32 + lane, step / 2 % 2 * 4 + warp);
    read_across(word, at);
}

// As operands of two products: even channels are rows 0 to 7 of a warp's sixteen, odd ones the others.
__device__ __forceinline__ void decode(const u32 (&word)[4], const u32 (&scales)[4], u32 (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 even = (word[i] << 8 & 0x80008000) | (word[i] << 4 & 0x07f007f0);
        u32 odd = (word[i] & 0x80008000) | (word[i] >> 4 & 0x07f007f0);
        values[2 * i] = times(even, scales[i]), values[2 * i + 1] = times(odd, scales[i]);
    }
}

// Sums of four times 64 channels; a thread has, of every eight rows, two, and two channels of them.
__device__ __forceinline__ void rescale(float (&sums)[SUMS], int buffer) {
    u32 behind[4];
    read16(state(BEHIND + 16 * buffer), behind);
    if (!(behind[0] | behind[1] | behind[2] | behind[3])) return;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 factor = read_floats(state(FACTOR + buffer * 4 * ROWS + j * 32 + threadIdx.x % 4 * 8));
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float *s = sums + m * 32 + 4 * j;
            s[0] *= factor.x, s[1] *= factor.y, s[2] *= factor.x, s[3] *= factor.y;
        }
    }
}

template <int HALF> __device__ __forceinline__ void accumulate(float (&sums)[SUMS], int tile) {
    constexpr int held = 2;  // operands that products may be reading
    int stage = tile % STAGES, buffer = tile % 2;
    u32 keys = here() + KEYS + stage * TILE_BYTES, folded = here() + FOLDED + stage * 512 + threadIdx.x % 4 * 32;
    u64 weights = operand(shared + WEIGHTS, 16) + buffer * (ROWS * TILE * 2 / 16);
    u32 word[2][4], scales[4], values[held][8];
    barrier_wait(state(FULL + 8 * stage), tile / STAGES & 1);
    read_codes(word[0], keys, HALF, 0);
    barrier_wait(state(READY + 8 * buffer), tile / 2 & 1);
    if (tile) rescale(sums, buffer);
    hold(sums);
#pragma unroll
    for (int step = 0; step < 8; step++) {  // 64 channels by 32 keys
        read16(folded + (HALF * 2 + step / 4) * 128 + step % 2 * 16, scales);
        if (step < 7) read_codes(word[(step + 1) % 2], keys, HALF, step + 1);
        if (step >= held) await_products<held - 1>();
        decode(word[step % 2], scales, values[step % held]);
        begin_products();
#pragma unroll
        for (int k = 0; k < 2; k++)
            multiply_keys(sums + step / 2 * 32, values[step % held] + 4 * k, weights + step % 2 * 4 + k * 2, 1);
        commit_products();
    }
    __syncwarp();
    free_tile(stage);
    await_products<0>();
    hold(sums);
    if (threadIdx.x % 32 == 0) barrier_arrive(state(TAKEN + 8 * buffer));
}

template <int HALF> __device__ __forceinline__ void write(const Task &task, const float (&sums)[SUMS]) {
    u16 *to = task.output(0) + HALF * 256 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int of = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (task.row + of >= task.p.rows) continue;
        float factor = read_float(state(TOTAL + 4 * of));
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const float *s = sums + m * 32 + i / 2 * 4 + i % 2;
            *(u32 *)(to + of * VALUE + 64 * m) = pair(s[0] * factor, s[2] * factor);
        }
    }
}

template <int HALF> __device__ __forceinline__ void follow(const Parameters &p, int tiles) {
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) accumulate<HALF>(sums, tile);
    meet<4, 384>();
    write<HALF>(Task(p), sums);
}

// Thirty-two bytes a lane of a row of queries, and as many of its rotated channels for each of eight lanes.
struct QueryRow {
    uint4 found[3];
    __device__ __forceinline__ void load(const Task &task, int row) {
        int lane = threadIdx.x % 32;
        found[0] = found[1] = found[2] = make_uint4(0, 0, 0, 0);
        if (row >= ROWS || task.row + row >= task.p.rows) return;
        const uint4 *from = (const uint4 *)(task.query() + row * WIDTH);
        found[0] = from[2 * lane], found[1] = from[2 * lane + 1];
        if (lane < 8) found[2] = from[64 + lane];
    }
};

// Queries become E4M3 times a scale of their row, which the rotated channels, in bf16, are divided by; a warp a row.
// Code that runs once a block comes from memory: the less the better.
__device__ __forceinline__ void load_queries(const Task &task) {
    int lane = threadIdx.x % 32;
    QueryRow next[2];
    int first = threadIdx.x / 32 - 4;
    next[0].load(task, first), next[1].load(task, first + 8);
#pragma unroll 1
    for (int row = first; row < ROWS; row += 8) {
        QueryRow own = next[0];
        next[0] = next[1];
        next[1].load(task, row + 16);
        const u32 *words = (const u32 *)own.found;
        float x[24], most = 0;
#pragma unroll
        for (int i = 0; i < 12; i++) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) most = fmaxf(most, fabsf(x[i]));
        most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
        bool some = most > 1e-30f;
        float scale = some ? most * (1.0f / 448.0f) : 1.0f, inverse = some ? __fdividef(1.0f, scale) : 1.0f;
#pragma unroll
        for (int i = 0; i < 24; i++) x[i] *= inverse;
        store16(here() + lane / 8 * CHUNK + swizzled(row, lane % 8), codes(x[0], x[1], x[2], x[3]),
                codes(x[4], x[5], x[6], x[7]), codes(x[8], x[9], x[10], x[11]), codes(x[12], x[13], x[14], x[15]));
        if (lane < 8)
            store16(here() + GROUPS * CHUNK + swizzled(row, lane), pair(x[16], x[17]), pair(x[18], x[19]),
                    pair(x[20], x[21]), pair(x[22], x[23]));
        if (lane == 0) write_float(state(QUERY + 4 * row), scale * task.p.scale);
    }
    show_to_tensor_cores();
    meet<1, 384>();
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(512, 1)
    dense_decode_fp8(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != here()) __trap();
    let_next_launch_start();
    int group = threadIdx.x / 128;
    if (threadIdx.x == 384) {
        for (int stage = 0; stage < STAGES; stage++)
            barrier_init(state(FULL + 8 * stage), 3), barrier_init(state(FREED + 8 * stage), 12 * CLUSTER);
        for (int buffer = 0; buffer < 2; buffer++)
            barrier_init(state(READY + 8 * buffer), 4), barrier_init(state(TAKEN + 8 * buffer), 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        show_to_tensor_cores();
    }
    __syncthreads();
    if (CLUSTER > 1) meet_cluster();
    if (group == 3) {  // registers of all four: four times what a thread begins with, 128
        fewer_registers<24>();
        if (threadIdx.x < 416) produce(p, Task(p));
        else if (threadIdx.x >= 448) produce_scales(p, Task(p));
    } else if (group == 0) {
        more_registers<FOR_SCORES>();
        Task task(p);
        if (!task.idle()) {
            meet<1, 384>();
            attend(task);
        }
    } else if (group == 1) {
        more_registers<FOR_VALUES>();
        Task task(p);
        if (!task.idle()) {
            load_queries(task);
            follow<0>(p, task.tiles);
        }
    } else {
        more_registers<FOR_VALUES>();
        Task task(p);
        if (!task.idle()) {
            load_queries(task);
            follow<1>(p, task.tiles);
        }
    }
    if (CLUSTER > 1) meet_cluster();  // the other block may still copy to this one
}

extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Parameters p) { combine_spans(p); }
