// Block-scaled FP8 product for many tokens (sm_90a): output[token, row] = sum_k activation[token, k] * weight[row, k].
//
// Blocks of threads that stay take one tile of the output after another, TOKENS = 128 * PASSES by ROWS. Three warps fill
// a ring of shared memory, 128 channels at a time; two warpgroups multiply 64 tokens each in a pass, of two passes only
// in those where one counts. Products of 128 channels leave the tensor cores times the scales of their token and of their
// weights; while one warpgroup adds them up, the tensor cores work for the other, and while it writes a tile, they work
// on its next. SHARE blocks of a cluster take tiles side by side along rows and fetch a part of the activations each,
// which costs less power. Channels are added in their order whatever the tile, so that a token's bits depend on nothing
// but its own operands.
//
// GRAIN 128: an fp32 scale for 128 x 128 weights; GRAIN 32: an e8m0 scale for 32 x 32. FP4: four warps more decode
// weights into e4m3, which have an exponent for 64 x 128 then. STAGES of the ring.

#include "hopper.cuh"
#include "gemm_copies.cuh"
#include "gemm_large_products.cuh"
#include "gemm_large_copies.cuh"

__device__ __forceinline__ constexpr int parts(int whole, int part) { return (whole + part - 1) / part; }

constexpr int CONSUMERS = 256, DEPTH = 128, TOKENS = 128 * PASSES;
constexpr int ACTIVATION = TOKENS * DEPTH, WEIGHT = ROWS * DEPTH;
constexpr int SLICE = ROWS % 32 ? 16 : 32;      // columns that surely share a scale
constexpr int ALIGNED = ROWS & -ROWS;           // tiles begin at multiples of it
constexpr int CHUNK = 64 * DEPTH / 2 + 64 * 4, PACKED = FP4 ? ROWS / 64 * CHUNK : 0;  // of FP4 weights, as packed
constexpr int SCALE_ROWS = FP4 ? ROWS / 64 : GRAIN == 32 ? ROWS / 32
                                           : ALIGNED >= 128 ? 1 : 1 + parts(ROWS - ALIGNED, 128);
static_assert(!FP4 || ROWS % 64 == 0, "whole chunks");
static_assert(ROWS % SLICE == 0 && SLICE <= GRAIN && (GRAIN == 128 || ROWS % 32 == 0), "a tile");

// What a stage says beside its operands: words of the weights' scales, and with the first of a tile where that lies and
// which of its tokens count.
constexpr int NOTE = 128, PLACE = 32, COUNTED = 48, MORE = 80;
constexpr int WEIGHTS = STAGES * ACTIVATION, SCALES = WEIGHTS + STAGES * WEIGHT;
constexpr int PACKS = SCALES + STAGES * TOKENS * 4, NOTES = PACKS + STAGES * PACKED, FULL = NOTES + STAGES * NOTE;
constexpr int FREE = FULL + 8 * STAGES, COME = FREE + 8 * STAGES;  // COME: packed weights are there
constexpr int END = COME + (FP4 ? 8 * STAGES : 0);
constexpr int LEAVING = parts(END, 1024) * 1024;  // of each warp 16 tokens by 64 rows on their way out
constexpr int DECODERS = FP4 ? 4 : 0;  // warps
// At a full stage: lanes that fetch scales, notes, activations, and weights.
constexpr int ARRIVALS = 32 + 2 + (FP4 ? DECODERS : 1);

struct Parameters {
    TensorMap activation_map;   // [groups, capacity, channels]
    TensorMap weight_map;       // [groups, rows, channels]
    TensorMap output_map;       // [groups, capacity, rows]
    const u32 *weight_scales;   // fp32 [groups, rows / 128, blocks], four e8m0 in a word [groups, rows / 32, blocks],
                                // or FP4 weights with their scales (gemm_pack.py) [groups, rows / 64, blocks, CHUNK / 4]
    const float *scales;        // [groups, blocks, padded]
    u16 *output;                // bf16 [groups, capacity, rows]
    const int *counts;          // [groups] tokens, or null: `capacity` in each
    const int *experts;         // [capacity] or null: whose weights the tokens of a tile take (one group), or -1
    int groups, capacity, padded, rows, blocks, unused[1];
};

// A place in the ring, and the parity of the barrier to wait for there.
struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

#include "gemm_large_walk.cuh"
#include "gemm_large_fetch.cuh"
#include "gemm_large_decode.cuh"
#include "gemm_large_write.cuh"

__device__ __forceinline__ void release(u32 shared, int stage) {
    int lane = threadIdx.x % 32;
    if (SHARE == 1) {
        if (lane == 0) barrier_arrive(shared + FREE + 8 * stage);
    } else {
        if (lane < SHARE) barrier_arrive_in(shared + FREE + 8 * stage, lane);
    }
}

// What the weights' scales of a block of channels come to: for slice `i` of columns, in step `step` of 32 channels.
struct Scales {
    u32 words[SCALE_ROWS];
    __device__ __forceinline__ void read(u32 note) {
#pragma unroll
        for (int i = 0; i < SCALE_ROWS; i++) words[i] = read_word(note + 4 * i) & (FP4 ? 0x7f800000 : ~0u);
    }
    // `boundary`: columns before the second scale, GRAIN 128, at least ALIGNED.
    __device__ __forceinline__ float of(int slice, int step, int boundary) const {
        if (GRAIN == 32) {
            u32 exponent = words[slice] >> 8 * step & 255;
            return __uint_as_float(exponent ? exponent << 23 : 1 << 22);
        }
        if (FP4) return __uint_as_float(words[slice * SLICE / 64]);
        u32 found = words[0];
#pragma unroll
        for (int i = 1; i < SCALE_ROWS; i++) {
            int column = slice * SLICE - 128 * (i - 1);
            if (column >= 128 || (column >= ALIGNED && column >= boundary)) found = words[i];
        }
        return __uint_as_float(found);
    }
};

// sums += part times the scales of both operands; a thread has columns of the tokens `first` and `second` are scales of.
__device__ __forceinline__ void promote(float (&sums)[ROWS / 2], const float (&part)[ROWS / 2], const Scales &scales,
                                        int step, int boundary, float first, float second) {
#pragma unroll
    for (int slice = 0; slice < ROWS / SLICE; slice++) {
        float weight = scales.of(slice, step, boundary), x = first * weight, y = second * weight;
#pragma unroll
        for (int i = slice * SLICE / 2; i < (slice + 1) * SLICE / 2; i += 4) {
            sums[i] += part[i] * x, sums[i + 1] += part[i + 1] * x;
            sums[i + 2] += part[i + 2] * y, sums[i + 3] += part[i + 3] * y;
        }
    }
}

// One block of channels of 64 tokens, in the stage `at` of the ring.
struct Block {
    static constexpr int AT_ONCE = GRAIN == 32 ? 1 : 4;  // steps of 32 channels that share a scale
    // Whether scales are read before products begin, where registers hold them: 2 % faster in two passes, 18 % of 64 rows,
    // but 2 % slower where a tile has three.
    static constexpr bool EARLY = GRAIN == 32 ? PASSES == 1 : SCALE_ROWS < 3;
    int stage;
    u64 activations, weights;
    u32 note, tokens;
    Scales scales;
    float first, second;

    // `tokens`: where this thread's scales are in the first stage; `chunk`: which 64 of the tile's tokens.
    __device__ __forceinline__ Block(u32 shared, int at, int chunk, u32 tokens)
        : stage(at), activations(operand(shared + at * ACTIVATION + chunk * 64 * DEPTH, 16)),
          weights(operand(shared + WEIGHTS + at * WEIGHT, 16)), note(shared + NOTES + at * NOTE),
          tokens(tokens + at * TOKENS * 4) {
        if (EARLY) read();
    }

    __device__ __forceinline__ void read() {
        scales.read(note), first = read_float(tokens), second = read_float(tokens + 32);
    }

    // Products from `step` on, not awaited.
    __device__ __forceinline__ void begin(int step, float (&part)[ROWS / 2]) const {
        hold(part);
        begin_products();
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            Product<ROWS>::run(part, further(activations, (step + i) * 32), further(weights, (step + i) * 32), i);
        commit_products();
        hold(part);
    }

    // The rest of it; if `last`, the stage is free again.
    __device__ __forceinline__ void end(u32 shared, bool last, int boundary, float (&part)[ROWS / 2],
                                        float (&sums)[ROWS / 2]) {
        if (!EARLY) read();
#pragma unroll
        for (int step = 0; step < 4; step += AT_ONCE) {
            if (step) begin(step, part);
            await_products<0>();
            hold(part);
            if (last && step + AT_ONCE == 4) release(shared, stage);
            promote(sums, part, scales, step, boundary, first, second);
        }
    }
};

// All blocks of channels of a tile but the first, in passes whose bit is set in `live`. ALL: in every one. (Where tiles
// of one pass left out a warpgroup, those beside each other lost step, and read weights twice: 461 us for 389.)
template <bool ALL>
__device__ __forceinline__ void add_up(const Parameters &p, u32 shared, int group, u32 live, int boundary, u32 tokens,
                                       Ring &at, float (&part)[ROWS / 2], float (&sums)[PASSES][ROWS / 2]) {
#pragma unroll 1
    for (int block = 1; block < p.blocks; block++, at.advance()) {
        barrier_wait(shared + FULL + 8 * at.stage, at.parity);
        if (!ALL && !live) release(shared, at.stage);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            if (!ALL && !(live >> pass & 1)) continue;
            Block now(shared, at.stage, pass * 2 + group, tokens + pass * 512);
            now.begin(0, part);
            now.end(shared, ALL ? pass == PASSES - 1 : live >> pass == 1, boundary, part, sums[pass]);
        }
    }
}

__device__ __forceinline__ void consume(const Parameters &p, u32 shared) {
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;  // the same in all lanes, as the compiler knows
    int first = group * 64 + warp % 4 * 16;
    u32 tokens = shared + SCALES + first * 4 + threadIdx.x % 32 / 4 * 4;
    Ring at = {0, 0};
    float sums[PASSES][ROWS / 2], part[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) part[i] = 0;
    Place place;
    for (bool any = false;; any = true) {
        barrier_wait(shared + FULL + 8 * at.stage, at.parity);
        Place next;
        next.read(shared + NOTES + at.stage * NOTE, first);
        int boundary = 128 - next.row % 128;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            if (next.row < 0) {  // no more tiles
                if (any) write(p, shared, place, pass, sums[pass]);
                continue;
            }
            // Products of this tile run while the sums of the one before are written.
            Block now(shared, at.stage, pass * 2 + group, tokens + pass * 512);
            now.begin(0, part);
            if (any) write(p, shared, place, pass, sums[pass]);
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) sums[pass][i] = 0;
            now.end(shared, pass == PASSES - 1, boundary, part, sums[pass]);
        }
        if (next.row < 0) return await_copies_out();
        place = next;
        at.advance();
        u32 live = place.live();
        if (PASSES == 1 || live == 3) add_up<true>(p, shared, group, live, boundary, tokens, at, part, sums);
        else add_up<false>(p, shared, group, live, boundary, tokens, at, part, sums);
    }
}

__device__ __forceinline__ void begin(const Parameters &p, u32 shared) {
    prefetch_map(&p.activation_map), prefetch_map(&p.output_map);
    if (!FP4) prefetch_map(&p.weight_map);
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared + FULL + 8 * i, ARRIVALS);
        barrier_init(shared + FREE + 8 * i, CONSUMERS / 32 * SHARE);
        if (FP4) barrier_init(shared + COME + 8 * i, 1);
    }
    show_barriers();
}

#if SHARE > 1
#define IN_CLUSTERS __cluster_dims__(SHARE, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(CONSUMERS + 128 + 32 * DECODERS, 1)
gemm_large(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) uint4 memory[];
    u32 shared = address_of(memory);
    if (threadIdx.x == 0) begin(p, shared);
    __syncthreads();
    if (SHARE > 1) arrive_cluster(), await_cluster();
    if (FP4 && threadIdx.x >= CONSUMERS + 128) {
        fewer_registers<32>();
        decode_weights(shared);
    } else if (threadIdx.x >= CONSUMERS) {
        fewer_registers<FP4 ? 48 : 56>();
        if (threadIdx.x < CONSUMERS + 32) fetch_activations(p, shared);
        else if (threadIdx.x < CONSUMERS + 64) FP4 ? fetch_packed(p, shared) : fetch_weights(p, shared);
        else if (threadIdx.x < CONSUMERS + 96) fetch_scales(p, shared);
    } else {
        more_registers<FP4 ? 216 : 224>();
        consume(p, shared);
    }
    if (SHARE > 1) {  // none leaves while another may still write here
        __syncwarp();
        arrive_cluster(), await_cluster();
    }
}
