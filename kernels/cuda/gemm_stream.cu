// Block-scaled FP8 product for few tokens (sm_90a): output[token, row] = sum_k activation[token, k] * weight[row, k].
//
// Weights are streamed once through a ring of shared memory by one thread; they are the M side of the products, tokens
// the N side. ROW_GROUPS warpgroups take 64 rows each; DEPTH_GROUPS of them take turns over blocks of 128 channels, and
// SPLIT blocks of threads (a cluster) share one tile's channels. Sums of 128 channels leave the tensor cores times
// their scales; partial sums are sent to the block that adds them in a fixed order, so that a token's bits depend on
// nothing but its own operands.
//
// FORMAT 8: e4m3 weights row by row, an fp32 scale for 128 x 128 (GRAIN 128) or an e8m0 scale for 32 x 32 (GRAIN 32).
// FORMAT 4: e2m1 weights packed as gemm_stream.py says. TOKENS at a time, STAGES of the ring; ONCE: at most one tile a
// block; RESIDENT blocks on a multiprocessor. FETCHERS: 1, or 3 that fetch weights, activations and scales apart.

#include "hopper.cuh"
#include "gemm_products.cuh"
#include "gemm_copies.cuh"

constexpr int CONSUMERS = 128 * ROW_GROUPS * DEPTH_GROUPS, DEPTH = 128;
constexpr int ROWS = 64 * ROW_GROUPS;
// Where the consumers' sums take most registers there are, whole warpgroups trade them.
constexpr int WARPGROUPS = ROW_GROUPS * DEPTH_GROUPS;
constexpr bool TRADED = TOKENS >= 64 && WARPGROUPS >= (TOKENS == 128 ? 2 : 3) && WARPGROUPS <= 4;
constexpr int KEPT = WARPGROUPS == 2 ? 232 : WARPGROUPS == 3 ? 160 : 112;
constexpr int LEFT = WARPGROUPS == 2 ? 40 : WARPGROUPS == 3 ? 32 : 24;
constexpr int PRODUCERS = TRADED ? 128 : 32;
static_assert(!TRADED || RESIDENT == 1, "two blocks would wait for each other's registers");
static_assert(FETCHERS == 1 || (FETCHERS == 3 && TRADED), "each fetcher is a warp of its own");
static_assert(SPLIT == 1 || ONCE, "a cluster meets once");
constexpr int PACKED = 64 * DEPTH / 2 + 64 * 4;  // bytes of 64 rows of one block of channels, FORMAT 4
constexpr int WEIGHT = FORMAT == 8 ? ROWS * DEPTH : ROW_GROUPS * PACKED, ACTIVATION = TOKENS * DEPTH;
constexpr bool WHOLE = DEPTH_GROUPS * SPLIT == 1 && TOKENS >= 16;  // no partial sums: bf16 leaves a warpgroup
constexpr int CHUNK = TOKENS < 64 ? TOKENS : 64;  // tokens that a warp writes at a time, WHOLE
// Partial sums: slots of eight tokens' sums (an octet) of a warpgroup, those of this block where the ring was, if
// nothing is to come any more, and those that the cluster's other blocks send. A warpgroup writes SHARES octets.
constexpr int OCTETS = TOKENS / 8, SLOT = ROW_GROUPS * 128 * 16;
constexpr int SHARES = (OCTETS + DEPTH_GROUPS * SPLIT - 1) / (DEPTH_GROUPS * SPLIT);
constexpr int SENT_BYTES = DEPTH_GROUPS * SHARES * (SPLIT - 1) * SLOT;
static_assert(STAGES % DEPTH_GROUPS == 0, "a stage has the same reader in each of its turns");
constexpr int PARTIAL = WHOLE ? CONSUMERS / 32 * CHUNK * 32 : DEPTH_GROUPS * OCTETS * SLOT;
constexpr bool APART = !ONCE;  // sums may not lie where the ring was
static_assert(APART || PARTIAL <= STAGES * (WEIGHT + ACTIVATION), "sums fit where the ring was");
constexpr int TOGETHER = 16;  // tiles of tokens that pass all weights while they stay in the L2
constexpr int ACTIVATIONS = FORMAT == 8 ? STAGES * WEIGHT : 0, WEIGHTS = FORMAT == 8 ? 0 : STAGES * ACTIVATION;
constexpr int SCALES = STAGES * (WEIGHT + ACTIVATION), PARTIALS = APART ? SCALES + STAGES * TOKENS * 4 : 0;
constexpr int SENT = SCALES + STAGES * TOKENS * 4 + (APART ? PARTIAL : 0);
constexpr int FULL = SENT + SENT_BYTES, FREE = FULL + 8 * STAGES;
constexpr int SUMS = FREE + 8 * STAGES;  // counts the partial sums sent to this block

#include "gemm_stream_tiles.cuh"
#include "gemm_stream_channels.cuh"
#include "gemm_stream_sums.cuh"

__device__ __forceinline__ void load_weights(const Parameters &p, const Tile &tile, int block, u32 to, u32 barrier) {
    if (FORMAT == 8) {
        copy_box(to, &p.weight_map, block * DEPTH, tile.row, tile.expert, barrier, READ_ONCE);
    } else {
#pragma unroll
        for (int i = 0; i < ROW_GROUPS; i++) {
            int chunks = p.rows / 64, at = tile.expert * chunks + min(tile.row / 64 + i, chunks - 1);
            copy_bytes(to + i * PACKED, p.packed + ((u64)at * p.blocks + block) * PACKED, PACKED, barrier, READ_ONCE);
        }
    }
}

enum { OF_WEIGHTS = 1, OF_ACTIVATIONS = 2, OF_SCALES = 4, OF_ALL = 7 };

// Fetches PARTS of all stages: one thread.
template <int PARTS> __device__ __forceinline__ void produce(const Parameters &p, u32 shared) {
    Walk walk;
    int stage = 0, parity = 1;
    for (Tile tile; walk.take(p, tile);) {
        u32 scale_bytes = min(TOKENS, p.padded - tile.token) * 4;
        u32 bytes = (PARTS & OF_WEIGHTS ? WEIGHT : 0) + (PARTS & OF_ACTIVATIONS ? ACTIVATION : 0) +
                    (PARTS & OF_SCALES ? scale_bytes : 0);
        const float *scales = p.scales + (u64)tile.group * p.blocks * p.padded + tile.token;
#pragma unroll 1  // less to fetch before the first copy begins
        for (int block = tile.first; block < tile.end; block++) {
            u32 full = shared + FULL + 8 * stage;
            barrier_wait(shared + FREE + 8 * stage, parity);
            barrier_expect(full, bytes);
            if (PARTS & OF_WEIGHTS) load_weights(p, tile, block, shared + WEIGHTS + stage * WEIGHT, full);
            if (PARTS & OF_ACTIVATIONS)
                copy_box(shared + ACTIVATIONS + stage * ACTIVATION, &p.activation_map, block * DEPTH, tile.token,
                         tile.group, full, READ_AGAIN);
            if (PARTS & OF_SCALES)
                copy_bytes(shared + SCALES + stage * TOKENS * 4, scales + (u64)block * p.padded, scale_bytes, full,
                           READ_AGAIN);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

__device__ __forceinline__ void consume(const Parameters &p, u32 shared) {
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the same in all lanes, as the compiler now knows
    int row_group = group % ROW_GROUPS, depth_group = group / ROW_GROUPS, turn = 0;
    Walk walk;
    for (Tile tile; walk.take(p, tile); turn += tile.end - tile.first) {
        float sums[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0;
        add_up(p, tile, shared, turn, row_group, depth_group, sums);
        // Nobody reads the ring, or the sums of the tile before, any more.
        if (!APART || turn && !WHOLE) meet<1, CONSUMERS>();
        if (WHOLE) {
            write_whole(p, tile, shared, row_group, sums);
        } else {
            finish(p, tile, shared, row_group, depth_group, sums);
        }
    }
}

__device__ __forceinline__ void begin(const Parameters &p, u32 shared) {
    if (FORMAT == 8) prefetch_map(&p.weight_map);
    prefetch_map(&p.activation_map);
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared + FULL + 8 * i, FETCHERS);
        barrier_init(shared + FREE + 8 * i, 128 * ROW_GROUPS);
    }
    if (SPLIT > 1) barrier_init(shared + SUMS, 1);
    show_barriers();
}

#if SPLIT > 1
#define IN_CLUSTERS __cluster_dims__(SPLIT, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(CONSUMERS + PRODUCERS, RESIDENT)
gemm_stream(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) uint4 memory[];
    u32 shared = address_of(memory);
    if (threadIdx.x == CONSUMERS) begin(p, shared);
    __syncwarp();
    if (SPLIT > 1) arrive_cluster();
    if (threadIdx.x >= CONSUMERS) {
        if (TRADED) fewer_registers<LEFT>();
        if (FETCHERS > 1) meet<3, PRODUCERS>();
        signal<2, CONSUMERS + PRODUCERS>();
        if (FETCHERS == 1) {
            if (threadIdx.x == CONSUMERS) produce<OF_ALL>(p, shared);
        } else {
            if (threadIdx.x == CONSUMERS) produce<OF_WEIGHTS>(p, shared);
            if (threadIdx.x == CONSUMERS + 32) produce<OF_ACTIVATIONS>(p, shared);
            if (threadIdx.x == CONSUMERS + 64) produce<OF_SCALES>(p, shared);
        }
        __syncwarp();
        if (SPLIT > 1) await_cluster();
    } else {
        if (TRADED) more_registers<KEPT>();
        meet<2, CONSUMERS + PRODUCERS>();
        if (SPLIT > 1) await_cluster();
        consume(p, shared);
    }
}
