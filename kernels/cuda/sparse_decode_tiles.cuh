// Tiles of sparse decode: which keys a block takes, and how their records come to shared memory. Knows no product.

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
// Where dynamic shared memory starts: a constant, so that operands of products are constants as well.
constexpr u32 shared = 1024;

struct Cache {
    const u8 *records;
    const int *indices;  // [queries, stride]
    const int *lengths;  // [queries], or null: every query has `stride` indices
    u64 page_bytes;
    int page_tokens, slots, stride;
    int scales_at;  // of V4: from a page's first record to its first scale
};

struct Parameters {
    const u16 *query;  // bf16 [queries, heads, WIDTH]
    u16 *output;       // bf16 [queries, heads, VALUE]
    float *lse;        // [queries, heads]
    const float *sink; // [heads], or null
    Cache cache[2];
    u16 *partial;       // bf16 [spans, queries, heads, VALUE], each divided by its own sum
    float *partial_lse; // [spans, queries, heads], base 2
    int heads, span;    // tiles of a span
    float scale;        // softmax scale times log2(e)
};

#include "records.cuh"

__device__ __forceinline__ int length_of(const Cache &cache, int query) {
    if (!cache.lengths) return cache.stride;
    return min(max(cache.lengths[query], 0), cache.stride);
}

// This block's tiles of both caches; the second cache starts a tile of its own.
struct Work {
    int length[2], from, first, tiles;  // `first`: of the second cache; tiles are counted from this block's first
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
