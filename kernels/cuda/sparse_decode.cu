// Sparse MLA decode for Hopper (sm_90a): one block of threads takes one query token and 64 heads.
//
// Two warpgroups read records by index, turn FP8 or FP4 into bf16 and lay them in shared memory, two tiles of 64 keys
// deep. Warpgroup 0 multiplies queries by keys, keeps the running softmax and accumulates output channels 0..255;
// warpgroup 1 accumulates channels 256..511 with the weights that warpgroup 0 leaves in shared memory. The value of a
// key is its first 512 channels, so that one copy of a tile serves both products (K-major, then MN-major).
//
// Small batches split a query's tiles into spans, one for each block; `combine` then sums them.
//
// Compiled with MAIN and EXTRA (record kinds below; EXTRA 0: no second cache), WIDTH (512 or 576 channels) and SPLIT.

#include "hopper.cuh"
#include "outputs.cuh"
#include "softmax.cuh"
#include "spans.cuh"
#include "sparse_decode_tiles.cuh"

template <int BUFFER> __device__ __forceinline__ void await_part(int part, int tile) {
    barrier_wait(shared + STATE + FULL + BUFFER * 32 + part * 8, tile / 2 & 1);
}

template <int BUFFER> __device__ __forceinline__ void issue_scores(float (&scores)[32], int tile) {
    constexpr u32 keys = shared + KEYS + BUFFER * TILE * WIDTH * 2;
    constexpr int chunks = WIDTH / 64;
    await_part<BUFFER>(0, tile);
    hold(scores);
    begin_products();
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        u32 at = k / 4 * CHUNK + k % 4 * 32;
        if (k % 4 == 0 && k && k / 4 * PARTS / chunks != (k / 4 - 1) * PARTS / chunks)
            await_part<BUFFER>(k / 4 * PARTS / chunks, tile), begin_products();
        multiply_keys(scores, operand(shared + at, 16), operand(keys + at, 16), k > 0);
    }
    commit_products();
    hold(scores);
}

template <int BUFFER, int FIRST = 0>
__device__ __forceinline__ void issue_values(float (&output)[128], const u32 (&weights)[16]) {
    constexpr u32 values = shared + KEYS + BUFFER * TILE * WIDTH * 2 + FIRST;
    hold(output);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        multiply_values(output, weights + 4 * k, operand(values + k * 2048, CHUNK));
        multiply_values(output + 64, weights + 4 * k, operand(values + k * 2048 + 2 * CHUNK, CHUNK));
    }
    commit_products();
    hold(output);
}

// Of four channels in two words, the second and the third change places.
__device__ __forceinline__ void swap_middle(u32 &a, u32 &b) {
    u32 first = __byte_perm(a, b, 0x5410);
    b = __byte_perm(a, b, 0x7632);
    a = first;
}

// Channels in the order in which they lie in memory, for `write_rows`.
struct InOrder {
    bool coded;
    __device__ __forceinline__ void operator()(u32 (&found)[4]) const {
        if (coded) swap_middle(found[0], found[1]), swap_middle(found[2], found[3]);
    }
};

// Where a head's row goes: the output, or the sums of this block's span.
__device__ __forceinline__ u64 row_of(const Work &work, const Parameters &p, int query, int head) {
    return ((u64)(work.whole ? 0 : blockIdx.z) * gridDim.x + query) * p.heads + head;
}

template <int HALF>
__device__ __forceinline__ void write(const Parameters &p, const Work &work, int query, int head, float (&o)[128],
                                      float first, float second) {
    u16 *to = (work.whole ? p.output : p.partial) + row_of(work, p, query, head) * VALUE + HALF * 256;
    InOrder order{HALF * 256 + (int)threadIdx.x % 32 * 8 < CODED};
    write_rows<5 + HALF>(to, p.heads - head, shared + HALF * 4 * CHUNK, o, first, second, order);
}

__device__ __forceinline__ void load_queries(const Parameters &p, int query, int head) {
    constexpr int units = WIDTH / 8, turns = HEADS * units / 256;
    uint4 found[turns];  // all in flight at once
#pragma unroll
    for (int i = 0; i < turns; i++) {
        int at = i * 256 + threadIdx.x, row = at / units;
        found[i] = make_uint4(0, 0, 0, 0);
        if (head + row < p.heads) found[i] = *(const uint4 *)(p.query + ((u64)query * p.heads + head) * WIDTH + at * 8);
    }
#pragma unroll
    for (int i = 0; i < turns; i++) {
        int at = i * 256 + threadIdx.x, row = at / units, unit = at % units;
        if (unit * 8 < CODED) swap_middle(found[i].x, found[i].y), swap_middle(found[i].z, found[i].w);
        store16(shared + unit / 8 * CHUNK + swizzled(row, unit % 8), found[i].x, found[i].y, found[i].z, found[i].w);
    }
    show_to_tensor_cores();
    meet<1, 256>();
}

__device__ __forceinline__ u64 read_valid(u32 address) {
    u64 x;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(address));
    return x;
}

// Weights as the registers of a bf16 operand, and in shared memory for the other warpgroup (HELD: a thread's for the
// same thread there).
__device__ __forceinline__ void pass_weights(const float (&s)[32], u32 (&weights)[16], const Softmax &softmax) {
    int lane = threadIdx.x % 32, row = own_row();
#pragma unroll
    for (int j = 0; j < 8; j++) {
        weights[2 * j] = pair(s[4 * j], s[4 * j + 1]), weights[2 * j + 1] = pair(s[4 * j + 2], s[4 * j + 3]);
        if (HELD) continue;
        store4(shared + WEIGHTS + swizzled(row, j) + lane % 4 * 4, weights[2 * j]);
        store4(shared + WEIGHTS + swizzled(row + 8, j) + lane % 4 * 4, weights[2 * j + 1]);
    }
#pragma unroll
    for (int k = 0; HELD && k < 4; k++)
        store16(shared + WEIGHTS + k * 2048 + threadIdx.x * 16, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                weights[4 * k + 3]);
    write_rows_of(shared + STATE + FACTOR, softmax.factor);
    if (!HELD) show_to_tensor_cores();
    signal<2, 256>();
}

template <int BUFFER> __device__ __forceinline__ void free_tile() {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared + STATE + FREE + BUFFER * 8);
}

template <int BUFFER>
__device__ __forceinline__ void take_weights(float (&scores)[32], Softmax &softmax, const float (&scale)[2]) {
    hide_all_but(scores, read_valid(shared + STATE + VALID + BUFFER * 8));
    softmax.look(scores, scale);
    softmax.weigh(scores, scale);
}

// From the weights of tile - 1 to those of `tile`, which lies in BUFFER.
template <int BUFFER>
__device__ __forceinline__ void advance(float (&output)[128], float (&scores)[32], u32 (&weights)[16],
                                        Softmax &softmax, int tile, const float (&scale)[2]) {
    issue_values<1 - BUFFER>(output, weights);
    await_products<0>();
    hold(output);
    free_tile<1 - BUFFER>();
    issue_scores<BUFFER>(scores, tile);
    await_products<0>();
    hold(scores);
    take_weights<BUFFER>(scores, softmax, scale);
    meet<3, 256>();  // the other warpgroup has read the weights of the tile before
    pass_weights(scores, weights, softmax);
    rescale(output, softmax.factor[0], softmax.factor[1]);
}

// Writes a head's lse; what its sums are to be multiplied by.
__device__ __forceinline__ float close(const Parameters &p, const Work &work, int query, int head,
                                       const Softmax &softmax, int r, float scale) {
    float total = softmax.whole(r), base = softmax.most[r] * scale, lse = base + __log2f(total);
    if (total == 0) lse = work.whole ? INFINITE : -INFINITE;
    else if (work.whole) lse *= 0.69314718f;
    if (head >= p.heads) return 0;
    if (threadIdx.x % 4 == 0) (work.whole ? p.lse : p.partial_lse)[row_of(work, p, query, head)] = lse;
    if (total == 0) return 0;
    return UNIT / (p.sink && work.whole ? total + power(p.sink[head] * 1.44269504f - base) : total);
}

__device__ __forceinline__ void attend(const Parameters &p, const Work &work, int query, int head) {
    float output[128], scores[32], scale[2] = {p.scale * UNIT, p.scale * UNIT}, inverse[2];
    u32 weights[16];
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] = 0;
    if (work.tiles) {
        issue_scores<0>(scores, 0);
        await_products<0>();
        hold(scores);
        take_weights<0>(scores, softmax, scale);
        pass_weights(scores, weights, softmax);
        int tile = 1;
        for (; tile + 1 < work.tiles; tile += 2) {
            advance<1>(output, scores, weights, softmax, tile, scale);
            advance<0>(output, scores, weights, softmax, tile + 1, scale);
        }
        if (tile < work.tiles) {
            advance<1>(output, scores, weights, softmax, tile, scale);
            issue_values<1>(output, weights);
            await_products<0>();
        } else {
            issue_values<0>(output, weights);
            await_products<0>();
        }
        hold(output);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) inverse[r] = close(p, work, query, head + own_row() + 8 * r, softmax, r, scale[0]);
    write_rows_of(shared + STATE + TOTAL, inverse);
    meet<4, 256>();
    write<0>(p, work, query, head, output, inverse[0], inverse[1]);
}

template <int BUFFER>
__device__ __forceinline__ void accumulate(float (&output)[128], int row, int tile, bool more) {
    await_part<BUFFER>(PARTS - 1, tile);
    meet<2, 256>();
    u32 factor = shared + STATE + FACTOR + 4 * row;
    float first = read_float(factor), second = read_float(factor + 32);
    if constexpr (HELD) {
        u32 weights[16];
#pragma unroll
        for (int k = 0; k < 4; k++) read16(shared + WEIGHTS + k * 2048 + threadIdx.x % 128 * 16, weights + 4 * k);
        if (more) signal<3, 256>();
        if (tile) rescale(output, first, second);
        issue_values<BUFFER, 4 * CHUNK>(output, weights);
    } else {
        constexpr u32 values = shared + KEYS + BUFFER * TILE * WIDTH * 2 + 4 * CHUNK;
        if (tile) rescale(output, first, second);
        hold(output);
        begin_products();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u64 weight = operand(shared + WEIGHTS + k * 32, 16);
            multiply_values(output, weight, operand(values + k * 2048, CHUNK));
            multiply_values(output + 64, weight, operand(values + k * 2048 + 2 * CHUNK, CHUNK));
        }
        commit_products();
    }
    await_products<0>();
    hold(output);
    free_tile<BUFFER>();
    if (more && !HELD) signal<3, 256>();
}

__device__ __forceinline__ void follow(const Parameters &p, const Work &work, int query, int head) {
    float output[128];
    int row = own_row();
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] = 0;
    for (int tile = 0; tile + 1 < work.tiles; tile += 2) {
        accumulate<0>(output, row, tile, true);
        accumulate<1>(output, row, tile + 1, tile + 2 < work.tiles);
    }
    if (work.tiles % 2) accumulate<0>(output, row, work.tiles - 1, false);
    meet<4, 256>();
    u32 total = shared + STATE + TOTAL + 4 * row;
    write<1>(p, work, query, head, output, read_float(total), read_float(total + 32));
}

extern "C" __global__ void __launch_bounds__(512, 1) sparse_decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != shared) __trap();
    if (SPLIT) let_next_launch_start();
    int query = blockIdx.x, head = blockIdx.y * HEADS, group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int part = 0; part < PARTS; part++)
                barrier_init(shared + STATE + FULL + 32 * i + 8 * part, PRODUCERS / 32);
            barrier_init(shared + STATE + FREE + 8 * i, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (group >= 2) {
        fewer_registers<HELD ? 64 : 72>();
        produce(p, query);
    } else if (group == 0) {
        more_registers<208>();
        load_queries(p, query, head);
        Work work(p, query);
        if (work.tiles || !work.from) attend(p, work, query, head);
    } else {
        more_registers<HELD ? 176 : 160>();
        load_queries(p, query, head);
        Work work(p, query);
        if (work.tiles || !work.from) follow(p, work, query, head);
    }
}

// One block a row; queries that were not split are left alone.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Parameters p) {
    await_launch_before();
    int head = blockIdx.x, query = blockIdx.y;
    int tiles = (length_of(p.cache[0], query) + TILE - 1) / TILE;
    if (EXTRA) tiles += (length_of(p.cache[1], query) + TILE - 1) / TILE;
    if (tiles <= p.span) return;
    u64 row = (u64)query * p.heads + head;
    Sums sums = sum_spans(p.partial, p.partial_lse, (tiles + p.span - 1) / p.span, (u64)gridDim.y * p.heads, row);
    float weight = p.sink ? sums.total + power(p.sink[head] * 1.44269504f - sums.most) : sums.total;
    sums.write(p.output + row * VALUE, p.lse + row, weight);
}
