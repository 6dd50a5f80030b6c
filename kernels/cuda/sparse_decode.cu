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

enum { NONE = 0, V4 = 1, V32 = 2, V41_WINDOW = 3, V41_ENTRY = 4 };

constexpr int TILE = 64, HEADS = 64, VALUE = 512;
constexpr int CHUNK = TILE * 128;  // bytes of 64 rows of 64 channels: the unit of the 128-byte swizzle
constexpr int KEYS = HEADS * WIDTH * 2, WEIGHTS = KEYS + 2 * TILE * WIDTH * 2, STATE = WEIGHTS + HEADS * TILE * 2;
constexpr int FULL = 0, FREE = 64, VALID = 80, FACTOR = 96, TOTAL = FACTOR + 4 * HEADS;  // offsets in the state
constexpr int CODED = MAIN == V4 ? 448 : 512;  // channels whose order is permuted (records.cuh)
constexpr int PARTS = 2;  // of a tile, handed over singly, so that scores begin before the rest is laid down
// Warpgroup 1 takes weights as registers. Its registers are the producers' loss: V4.1's records, the smallest, gain.
constexpr bool HELD = MAIN == V41_WINDOW;
constexpr int PRODUCERS = 256;
constexpr float LAG = 8;
// Where dynamic shared memory starts: a constant, so that operands of products are constants as well.
constexpr u32 shared = 1024;

struct Cache {
    const u8 *records;
    const int *indices;  // [queries, stride]
    const int *lengths;  // [queries], or null: every query has `stride` indices
    u64 page_bytes;
    int page_tokens, slots, stride, unused;
};

struct Parameters {
    const u16 *query;  // bf16 [queries, heads, WIDTH]
    u16 *output;       // bf16 [queries, heads, VALUE]
    float *lse;        // [queries, heads]
    const float *sink; // [heads], or null
    Cache cache[2];
    float *partial;     // [spans, queries, heads, VALUE], each divided by its own sum, channels as in tiles
    float *partial_lse; // [spans, queries, heads], base 2
    int heads, span;    // tiles of a span
    float scale;        // softmax scale times log2(e)
};

#include "records.cuh"
#include "spans.cuh"

__device__ __forceinline__ int length_of(const Cache &cache, int query) {
    if (!cache.lengths) return cache.stride;
    return min(max(cache.lengths[query], 0), cache.stride);
}

// This block's tiles of both caches; the second cache starts a tile of its own.
struct Work {
    int length[2], from, first, tiles;  // `first`: of the second cache, counted from this block's first as all tiles are
    bool whole;                         // nothing is left to combine
    __device__ __forceinline__ Work(const Parameters &p, int query) {
        length[0] = length_of(p.cache[0], query);
        length[1] = EXTRA ? length_of(p.cache[1], query) : 0;
        first = (length[0] + TILE - 1) / TILE;
        tiles = first + (length[1] + TILE - 1) / TILE;
        from = 0, whole = true;
        if (!SPLIT) return;
        from = blockIdx.z * p.span, first -= from;
        whole = tiles <= p.span;
        tiles = min(max(tiles - from, 0), p.span);
    }
};

// The slot this thread's key of a tile lies in, or -1.
__device__ __forceinline__ int slot_of(const Parameters &p, const Work &work, int query, int tile, int row) {
    int second = tile >= work.first;
    const Cache &cache = p.cache[EXTRA ? second : 0];
    int at = (second ? tile - work.first : tile + work.from) * TILE + row;
    if (tile >= work.tiles || at >= (second ? work.length[1] : work.length[0])) return -1;
    int slot = cache.indices[(u64)query * cache.stride + at];
    return slot >= 0 && slot < cache.slots ? slot : -1;
}

__device__ __forceinline__ Place locate(const Parameters &p, const Work &work, int tile, int slot) {
    if (EXTRA == NONE || tile < work.first) return Record<MAIN>::locate(p.cache[0], slot);
    return Record<EXTRA ? EXTRA : MAIN>::locate(p.cache[1], slot);
}

template <int KIND>
__device__ __forceinline__ void lay_tile(Record<KIND> &record, const Place &next, bool named, int row, int part,
                                         int turn) {
    u32 lane = threadIdx.x % 32, buffer = turn % 2, state = shared + STATE;
    if (turn >= 2) barrier_wait(state + FREE + 8 * buffer, (turn / 2 - 1) & 1);
    u32 valid = __ballot_sync(~0u, __shfl_sync(~0u, named, lane % 8 * 4)) & 0xff;
    if (lane == 0)
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(state + VALID + 8 * buffer + row / 8), "r"(valid) : "memory");
    record.template lay<0>(shared + KEYS + buffer * TILE * WIDTH * 2, row, part, next, [&](int done) {
        show_to_tensor_cores();
        __syncwarp();
        if (lane == 0) barrier_arrive(state + FULL + 32 * buffer + 8 * done);
    });
}

// Tiles `tile` up to `end`, all of one kind; `place` and `slot` are of the tile and of the one behind it.
template <int KIND>
__device__ __forceinline__ void produce_tiles(const Parameters &p, const Work &work, Place &place, int &slot,
                                              int query, int row, int part, int tile, int end) {
    if (tile >= end) return;
    Record<KIND> record;
    record.load(place, part);
    for (; tile < end; tile++) {
        bool named = place.record;
        place = locate(p, work, tile + 1, slot);
        slot = slot_of(p, work, query, tile + 2, row);
        lay_tile<KIND>(record, tile + 1 < end ? place : Place{nullptr, nullptr}, named, row, part, tile);
    }
}

// Indices are read two tiles ahead, records one tile ahead.
__device__ __forceinline__ void produce(const Parameters &p, int query) {
    int row = (threadIdx.x - 256) / 4, part = threadIdx.x % 4;
    int main = row < p.cache[0].stride ? p.cache[0].indices[(u64)query * p.cache[0].stride + row] : -1;
    int extra = -1;  // both before lengths are known, which saves one trip to memory
    if (EXTRA && row < p.cache[1].stride) extra = p.cache[1].indices[(u64)query * p.cache[1].stride + row];
    Work work(p, query);
    bool second = EXTRA && work.first == 0;
    int slot = second ? extra : main;
    if (row >= (second ? work.length[1] : work.length[0]) || slot >= p.cache[second].slots) slot = -1;
    if (SPLIT) slot = slot_of(p, work, query, 0, row);
    Place place = locate(p, work, 0, slot);
    slot = slot_of(p, work, query, 1, row);
    constexpr int second_kind = EXTRA ? EXTRA : MAIN;
    int middle = MAIN == second_kind ? work.tiles : min(max(work.first, 0), work.tiles);
    produce_tiles<MAIN>(p, work, place, slot, query, row, part, 0, middle);
    if (MAIN != second_kind) produce_tiles<second_kind>(p, work, place, slot, query, row, part, middle, work.tiles);
}

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

// Running softmax of the two rows a thread shares: rows `warp * 16 + lane / 4` and eight below.
struct Softmax {
    float most[2], total[2], factor[2];

    // Scores become weights; `factor` is what earlier sums are to be multiplied by.
    __device__ __forceinline__ void take(float (&s)[32], u64 valid, float scale) {
        int column = threadIdx.x % 4 * 2;
        if (valid != ~0ull)
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (!(valid >> (i / 4 * 8 + column + i % 2) & 1)) s[i] = -__int_as_float(0x7f800000);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float peak = most[r];
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (i / 2 % 2 == r) peak = fmaxf(peak, s[i]);
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
            // The base follows the peak only when it falls 2**8 behind: weights stay far from overflow, and the sums
            // of earlier tiles are seldom rescaled.
            if ((peak - most[r]) * scale > LAG) {
                factor[r] = power((most[r] - peak) * scale);
                most[r] = peak;
            } else {
                factor[r] = 1.0f;
            }
            float base = most[r] == -__int_as_float(0x7f800000) ? 0.0f : most[r] * scale;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (i / 2 % 2 == r) sum += s[i] = power(s[i] * scale - base);
            total[r] = total[r] * factor[r] + sum;
        }
    }
};

__device__ __forceinline__ void rescale(float (&output)[128], float first, float second) {
    if (!__any_sync(~0u, first != 1.0f || second != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] *= i / 2 % 2 ? second : first;
}

// Of four channels in two words, the second and the third change places.
__device__ __forceinline__ void swap_middle(u32 &a, u32 &b) {
    u32 first = __byte_perm(a, b, 0x5410);
    b = __byte_perm(a, b, 0x7632);
    a = first;
}

// A row of the sums of this block's span.
__device__ __forceinline__ u64 partial_row(const Parameters &p, int query, int head) {
    return ((u64)blockIdx.z * gridDim.x + query) * p.heads + head;
}

// fp32 rows of 256 channels to memory, for `combine`.
template <int HALF>
__device__ __forceinline__ void write_partial(const Parameters &p, int query, int head, float (&o)[128], float first,
                                              float second) {
    int lane = threadIdx.x % 32, row = head + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= p.heads) continue;
        float *to = p.partial + partial_row(p, query, row + 8 * r) * VALUE + HALF * 256 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 32; j++) {
            float factor = r ? second : first;
            *(float2 *)(to + 8 * j) = make_float2(o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor);
        }
    }
}

// bf16 rows of 256 channels to memory, by way of the shared memory in which the queries lay.
template <int HALF>
__device__ __forceinline__ void write(const Parameters &p, int query, int head, float (&o)[128], float first,
                                      float second) {
    int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    u32 base = shared + HALF * 4 * CHUNK;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        u32 at = base + j / 8 * CHUNK + lane % 4 * 4;
        store4(at + swizzled(row, j % 8), pair(o[4 * j] * first, o[4 * j + 1] * first));
        store4(at + swizzled(row + 8, j % 8), pair(o[4 * j + 2] * second, o[4 * j + 3] * second));
    }
    meet<5 + HALF, 128>();
    for (int r = thread / 32; r < HEADS && head + r < p.heads; r += 4) {
        u32 a, b, c, d, at = base + lane / 8 * CHUNK + swizzled(r, lane % 8);
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
        if (HALF * 256 + lane * 8 < CODED) swap_middle(a, b), swap_middle(c, d);
        u16 *to = p.output + ((u64)query * p.heads + head + r) * VALUE + HALF * 256 + lane * 8;
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    }
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

__device__ __forceinline__ float read_float(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}
__device__ __forceinline__ void write_float(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ u64 read_valid(u32 address) {
    u64 x;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(address));
    return x;
}

// Weights as the registers of a bf16 operand, and in shared memory for the other warpgroup (HELD: a thread's for the
// same thread there).
__device__ __forceinline__ void pass_weights(const float (&s)[32], u32 (&weights)[16], const Softmax &softmax) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
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
    if (lane % 4 == 0) {
        write_float(shared + STATE + FACTOR + 4 * row, softmax.factor[0]);
        write_float(shared + STATE + FACTOR + 4 * (row + 8), softmax.factor[1]);
    }
    if (!HELD) show_to_tensor_cores();
    signal<2, 256>();
}

template <int BUFFER> __device__ __forceinline__ void free_tile() {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared + STATE + FREE + BUFFER * 8);
}

// From the weights of tile - 1 to those of `tile`, which lies in BUFFER.
template <int BUFFER>
__device__ __forceinline__ void advance(float (&output)[128], float (&scores)[32], u32 (&weights)[16],
                                        Softmax &softmax, int tile, float scale) {
    issue_values<1 - BUFFER>(output, weights);
    await_products<0>();
    hold(output);
    free_tile<1 - BUFFER>();
    issue_scores<BUFFER>(scores, tile);
    await_products<0>();
    hold(scores);
    softmax.take(scores, read_valid(shared + STATE + VALID + BUFFER * 8), scale);
    meet<3, 256>();  // the other warpgroup has read the weights of the tile before
    pass_weights(scores, weights, softmax);
    rescale(output, softmax.factor[0], softmax.factor[1]);
}

__device__ __forceinline__ void attend(const Parameters &p, const Work &work, int query, int head) {
    float output[128], scores[32], scale = p.scale * UNIT;
    u32 weights[16];
    Softmax softmax;
    const float infinity = __int_as_float(0x7f800000);
    softmax.most[0] = softmax.most[1] = -infinity, softmax.total[0] = softmax.total[1] = 0;
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] = 0;
    if (work.tiles) {
        issue_scores<0>(scores, 0);
        await_products<0>();
        hold(scores);
        softmax.take(scores, read_valid(shared + STATE + VALID), scale);
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
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = softmax.total[r];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        int at = head + row + 8 * r;
        bool mine = at < p.heads;
        float base = softmax.most[r] * scale, lse = base + __log2f(total);
        if (mine && lane % 4 == 0 && work.whole)
            p.lse[(u64)query * p.heads + at] = total > 0 ? lse * 0.69314718f : infinity;
        if (mine && lane % 4 == 0 && !work.whole)
            p.partial_lse[partial_row(p, query, at)] = total > 0 ? lse : -infinity;
        float whole = total;
        if (mine && p.sink && total > 0 && work.whole) whole += power(p.sink[at] * 1.44269504f - base);
        inverse[r] = total > 0 ? UNIT / whole : 0.0f;
        if (lane % 4 == 0) write_float(shared + STATE + TOTAL + 4 * (row + 8 * r), inverse[r]);
    }
    meet<4, 256>();
    if (work.whole) write<0>(p, query, head, output, inverse[0], inverse[1]);
    else write_partial<0>(p, query, head, output, inverse[0], inverse[1]);
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
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] = 0;
    for (int tile = 0; tile + 1 < work.tiles; tile += 2) {
        accumulate<0>(output, row, tile, true);
        accumulate<1>(output, row, tile + 1, tile + 2 < work.tiles);
    }
    if (work.tiles % 2) accumulate<0>(output, row, work.tiles - 1, false);
    meet<4, 256>();
    u32 total = shared + STATE + TOTAL + 4 * row;
    if (work.whole) write<1>(p, query, head, output, read_float(total), read_float(total + 32));
    else write_partial<1>(p, query, head, output, read_float(total), read_float(total + 32));
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
    bool any = sums.total > 0;
    float whole = sums.total;
    if (p.sink && any) whole += power(p.sink[head] * 1.44269504f - sums.most);
    float inverse = any ? 1.0f / whole : 0.0f;
    u32 low = pair(sums.values.x * inverse, sums.values.y * inverse);
    u32 high = pair(sums.values.z * inverse, sums.values.w * inverse);
    if (threadIdx.x * 4 < CODED) swap_middle(low, high);
    *(uint2 *)(p.output + row * VALUE + threadIdx.x * 4) = make_uint2(low, high);
    if (threadIdx.x == 0)
        p.lse[row] = any ? (sums.most + __log2f(sums.total)) * 0.69314718f : __int_as_float(0x7f800000);
}
