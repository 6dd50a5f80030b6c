// Block-scaled FP8 product for few tokens (sm_90a): output[token, row] = sum_k activation[token, k] * weight[row, k].
//
// Weights are streamed once through a ring of shared memory by one thread; they are the M side of the products, tokens
// the N side. ROW_GROUPS warpgroups take 64 rows each; DEPTH_GROUPS of them take turns over blocks of 128 channels, and
// SPLIT blocks of threads (a cluster) share one tile's channels. Sums of 128 channels leave the tensor cores times their
// scales; partial sums are added in a fixed order, so that a token's bits depend on nothing but its own operands.
//
// FORMAT 8: e4m3 weights row by row, an fp32 scale for 128 x 128 (GRAIN 128) or an e8m0 scale for 32 x 32 (GRAIN 32).
// FORMAT 4: e2m1 weights packed as gemm_stream.py says. TOKENS at a time, STAGES of the ring; ONCE: at most one tile a
// block; RESIDENT blocks on a multiprocessor.

#include "hopper.cuh"
#include "gemm_products.cuh"
#include "gemm_copies.cuh"

constexpr int CLUSTER = SPLIT * SHARE, CONSUMERS = 128 * ROW_GROUPS * DEPTH_GROUPS, DEPTH = 128;
constexpr int GROUP_ROWS = 64 * PASSES, ROWS = GROUP_ROWS * ROW_GROUPS;
// With two passes a consumer's sums take most registers there are, and whole warpgroups trade them.
constexpr int PRODUCERS = PASSES > 1 ? 128 : 32;
static_assert(PASSES == 1 || FORMAT == 8 && GRAIN == 128, "a warpgroup's rows share their scale");
static_assert(SPLIT == 1 || ONCE, "a cluster meets once");
constexpr int PACKED = 64 * DEPTH / 2 + 64 * 4;  // bytes of 64 rows of one block of channels, FORMAT 4
constexpr int WEIGHT = FORMAT == 8 ? ROWS * DEPTH : ROW_GROUPS * PACKED, ACTIVATION = TOKENS * DEPTH;
constexpr bool WHOLE = DEPTH_GROUPS * SPLIT == 1 && TOKENS >= 16;  // no partial sums: bf16 leaves a warpgroup
constexpr int LEADING = ROWS * 4 + 16;  // bytes between tokens of partial sums: no two lanes of a store meet in a bank
constexpr int CHUNK = TOKENS < 64 ? TOKENS : 64;  // tokens that a warp writes at a time, WHOLE
constexpr int PARTIAL = WHOLE ? CONSUMERS / 32 * CHUNK * 32 : DEPTH_GROUPS * TOKENS * LEADING;
constexpr int TOGETHER = 16;  // tiles of tokens that pass all weights while they stay in the L2
constexpr int ACTIVATIONS = FORMAT == 8 ? STAGES * WEIGHT : 0, WEIGHTS = FORMAT == 8 ? 0 : STAGES * ACTIVATION;
constexpr int SCALES = STAGES * (WEIGHT + ACTIVATION), PARTIALS = ONCE ? 0 : SCALES + STAGES * TOKENS * 4;
constexpr int FULL = SCALES + STAGES * TOKENS * 4 + (ONCE ? 0 : PARTIAL), FREE = FULL + 8 * STAGES;

struct Parameters {
    TensorMap weight_map;       // FORMAT 8: [groups, rows, channels]
    TensorMap activation_map;   // [groups, capacity, channels]
    const u8 *packed;           // FORMAT 4
    const void *weight_scales;  // fp32 [groups, rows / 128, blocks] or e8m0 [groups, rows / 32, blocks * 4]
    const float *scales;        // [groups, blocks, padded]
    u16 *output;                // bf16 [groups, capacity, rows]
    const int *counts;          // [groups] tokens, or null: `capacity` in each
    const int *experts;         // [capacity] or null: whose weights the tokens of a tile take (one group), or -1
    int groups, capacity, padded, rows, blocks, unused[13];
};

// A cluster is SHARE times SPLIT blocks of threads: those of one place among SHARE have the same rows.
__device__ __forceinline__ int place_in_share() { return SHARE == 1 ? 0 : blockIdx.x % CLUSTER / SPLIT; }

// One tile of the output and the blocks of channels this block of threads adds up. `expert` is the group of the
// weights, `group` that of activations and output.
struct Tile { int group, expert, token, tokens, row, first, end; };

// Tiles in the order in which blocks of threads take them: tokens of the same weights one after another.
struct Walk {
    int group = 0, before = 0, next = blockIdx.x / CLUSTER;

    __device__ __forceinline__ bool take(const Parameters &p, Tile &tile) {
        int row_tiles = (p.rows + ROWS * SHARE - 1) / (ROWS * SHARE);
        while (group < p.groups) {
            int count = p.counts ? min(max(__ldg(p.counts + group), 0), p.capacity) : p.capacity;
            int token_tiles = (count + TOKENS - 1) / TOKENS, at = next - before;
            if (at >= token_tiles * row_tiles) {
                before += token_tiles * row_tiles, group++;
                continue;
            }
            next += gridDim.x / CLUSTER;
            place(p, tile, at, token_tiles, row_tiles);
            tile.tokens = min(TOKENS, count - tile.token);
            tile.expert = p.experts ? __ldg(p.experts + tile.token) : group;
            if (tile.expert >= 0) return true;
        }
        return false;
    }

    __device__ __forceinline__ void place(const Parameters &p, Tile &tile, int at, int token_tiles, int row_tiles) {
        int first = at / (TOGETHER * row_tiles) * TOGETHER, width = min(TOGETHER, token_tiles - first);
        int rank = blockIdx.x % SPLIT;
        at -= first * row_tiles;
        tile.group = group, tile.row = (at / width * SHARE + place_in_share()) * ROWS, tile.token = (first + at % width) * TOKENS;
        tile.first = rank * p.blocks / SPLIT, tile.end = (rank + 1) * p.blocks / SPLIT;
    }
};

struct Ring {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance(int by = 1) {
        stage += by;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

__device__ __forceinline__ void load_weights(const Parameters &p, const Tile &tile, int block, u32 to, u32 barrier) {
    if (FORMAT == 8) {
        copy_box(to, &p.weight_map, block * DEPTH, tile.row, tile.expert, barrier, READ_ONCE);
    } else {
#pragma unroll
        for (int i = 0; i < ROW_GROUPS; i++) {
            u64 at = ((u64)tile.expert * p.rows + tile.row) / 64 + i;
            copy_bytes(to + i * PACKED, p.packed + (at * p.blocks + block) * PACKED, PACKED, barrier, READ_ONCE);
        }
    }
}

// Each block of threads that shares activations reads its part of them for all.
__device__ __forceinline__ void load_activations(const Parameters &p, const Tile &tile, int block, u32 to,
                                                 u32 barrier) {
    constexpr int tokens = TOKENS / SHARE;
    int part = place_in_share(), token = tile.token + part * tokens;
    to += part * tokens * DEPTH;
    if (SHARE == 1) return copy_box(to, &p.activation_map, block * DEPTH, token, tile.group, barrier, READ_AGAIN);
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < SHARE; i++) all |= 1 << (i * SPLIT + blockIdx.x % SPLIT);
    copy_box_to(all, to, &p.activation_map, block * DEPTH, token, tile.group, barrier, READ_AGAIN);
}

__device__ __forceinline__ void produce(const Parameters &p, u32 shared) {
    Walk walk;
    Ring ring;
    for (Tile tile; walk.take(p, tile);) {
        u32 scale_bytes = min(TOKENS, p.padded - tile.token) * 4;
        const float *scales = p.scales + (u64)tile.group * p.blocks * p.padded + tile.token;
        for (int block = tile.first; block < tile.end; block++, ring.advance()) {
            u32 full = shared + FULL + 8 * ring.stage;
            barrier_wait(shared + FREE + 8 * ring.stage, ring.parity ^ 1);
            barrier_expect(full, WEIGHT + ACTIVATION + scale_bytes);
            load_weights(p, tile, block, shared + WEIGHTS + ring.stage * WEIGHT, full);
            load_activations(p, tile, block, shared + ACTIVATIONS + ring.stage * ACTIVATION, full);
            copy_bytes(shared + SCALES + ring.stage * TOKENS * 4, scales + (u64)block * p.padded, scale_bytes, full,
                       READ_AGAIN);
        }
    }
}

__device__ __forceinline__ float scale_of(u32 exponent) {  // of an e8m0 code
    return exponent ? __uint_as_float(exponent << 23) : __uint_as_float(1 << 22);
}

// Scales of the next 32 blocks of channels, one a lane: read a trip to memory before they are needed.
struct WeightScales {
    const u32 *scales;
    int blocks, begin;
    u32 now, ahead;
    __device__ __forceinline__ u32 read(int block) {
        block += threadIdx.x % 32;
        return block < blocks ? __ldg(scales + block) : 0;
    }
    __device__ __forceinline__ WeightScales(const Parameters &p, const Tile &tile, int row_group) {
        int row = tile.row + row_group * GROUP_ROWS + (GRAIN == 32 ? threadIdx.x % 128 / 64 * 32 : 0);
        int rows = (p.rows + GRAIN - 1) / GRAIN;
        scales = (const u32 *)p.weight_scales + ((u64)tile.expert * rows + min(row / GRAIN, rows - 1)) * p.blocks;
        blocks = p.blocks, begin = tile.first, now = read(begin), ahead = read(begin + 32);
    }
    __device__ __forceinline__ u32 of(int block) {
        if (block - begin >= 32) begin += 32, now = ahead, ahead = read(begin + 32);
        return __shfl_sync(~0u, now, block - begin);
    }
};

// Scales of the tokens whose columns a thread holds: read ahead of their use where registers allow.
struct TokenScales {
    static constexpr bool AHEAD = TOKENS <= 64;
    float2 held[AHEAD ? TOKENS / 8 : 1];
    u32 from;
    __device__ __forceinline__ explicit TokenScales(u32 scales) : from(scales + threadIdx.x % 4 * 8) {
        if (AHEAD)
#pragma unroll
            for (int i = 0; i < TOKENS / 8; i++) held[i] = read_pair(from + 32 * i);
    }
    __device__ __forceinline__ float2 operator[](int i) const { return AHEAD ? held[i] : read_pair(from + 32 * i); }
};

// sums += part times the scale of weights and that of each token.
__device__ __forceinline__ void promote(float (&sums)[TOKENS / 2], const float (&part)[TOKENS / 2],
                                        const TokenScales &tokens, float first, float second) {
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
        float2 token = tokens[i];
        sums[4 * i] += part[4 * i] * (token.x * first);
        sums[4 * i + 1] += part[4 * i + 1] * (token.y * first);
        sums[4 * i + 2] += part[4 * i + 2] * (token.x * second);
        sums[4 * i + 3] += part[4 * i + 3] * (token.y * second);
    }
}

__device__ __forceinline__ void release(u32 shared, int stage) {
    int lane = threadIdx.x % 32;
    if (SHARE == 1 && lane == 0) barrier_arrive(shared + FREE + 8 * stage);
    if (SHARE > 1 && lane < SHARE) barrier_arrive_in(shared + FREE + 8 * stage, lane * SPLIT + blockIdx.x % SPLIT);
}

__device__ __forceinline__ void multiply_fp8(u32 shared, int stage, int row_group, u32 scale,
                                             float (&sums)[PASSES][TOKENS / 2]) {
    float part[TOKENS / 2];
    u64 weights = operand(shared + WEIGHTS + stage * WEIGHT + row_group * GROUP_ROWS * DEPTH, 16);
    u64 activations = operand(shared + ACTIVATIONS + stage * ACTIVATION, 16);
    constexpr int steps = GRAIN / 32;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) part[i] = 0;
#pragma unroll
    for (int step = 0; step < 4 * PASSES; step++) {
        if (step % steps == 0) {
            hold(part);
            begin_products();
        }
        Product<TOKENS>::run(part, further(weights, step / 4 * 64 * DEPTH + step % 4 * 32),
                             further(activations, step % 4 * 32), step % steps > 0);
        if (step % steps != steps - 1) continue;
        commit_products();
        TokenScales tokens(shared + SCALES + stage * TOKENS * 4);
        await_products<0>();
        hold(part);
        if (step == 4 * PASSES - 1 && TokenScales::AHEAD) release(shared, stage);
        float weight = GRAIN == 128 ? __uint_as_float(scale) : scale_of(scale >> 8 * (step % 4) & 255);
        promote(sums[step / 4], part, tokens, weight, weight);
    }
    if (!TokenScales::AHEAD) release(shared, stage);
}

// Eight e2m1 codes become two words of e4m3 times 2**(shift - 5). Magnitudes are looked up in a table of eight bytes
// that the shift (in bits 3 to 6 of `shift`) moves by an exponent; signs of the first four stand in bits 7, 15, 23 and
// 31, of the others four bits below.
__device__ __forceinline__ void decode(u32 codes, u32 shift, u32 &low, u32 &high) {
    u32 small = shift * 0x01010100 + 0x14100800, large = shift * 0x01010101 + 0x24201c18;
    u32 magnitudes = codes & 0x77777777;
    low = pick_bytes(small, large, magnitudes) | (codes & 0x80808080);
    high = pick_bytes(small, large, magnitudes >> 16) | (codes << 4 & 0x80808080);
}

__device__ __forceinline__ void multiply_fp4(u32 shared, int stage, int row_group, float (&sums)[PASSES][TOKENS / 2]) {
    float part[TOKENS / 2];
    int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    u32 weights = shared + WEIGHTS + stage * WEIGHT + row_group * PACKED, codes[8], a[16];
    u64 activations = operand(shared + ACTIVATIONS + stage * ACTIVATION, 16);
    read16(weights + thread * 16, codes), read16(weights + 2048 + thread * 16, codes + 4);
    u32 first = read_word(weights + 4096 + row * 4), second = read_word(weights + 4096 + row * 4 + 32);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) part[i] = 0;
    hold(part);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        u32 *to = a + 4 * step;
        decode(codes[2 * step], first >> 4 * step & 0x78, to[0], to[2]);
        decode(codes[2 * step + 1], second >> 4 * step & 0x78, to[1], to[3]);
    }
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; step++)
        Product<TOKENS>::run(part, a + 4 * step, further(activations, 32 * step), step > 0);
    commit_products();
    TokenScales tokens(shared + SCALES + stage * TOKENS * 4);
    await_products<0>();
    hold(part);
    if (TokenScales::AHEAD) release(shared, stage);
    promote(sums[0], part, tokens, __uint_as_float(first & 0x7f800000), __uint_as_float(second & 0x7f800000));
    if (!TokenScales::AHEAD) release(shared, stage);
}

__device__ __forceinline__ bool is_written(const Parameters &p, const Tile &tile, int token) {
    return !p.experts || __ldg(p.experts + tile.token + token) >= 0;
}
__device__ __forceinline__ u16 *output_of(const Parameters &p, const Tile &tile, int token, int row) {
    return p.output + ((u64)tile.group * p.capacity + tile.token + token) * p.rows + row;
}

// Whole sums of a warp to memory as bf16, by way of shared memory of its own: sixteen rows, CHUNK tokens at a time.
__device__ __forceinline__ void write_whole(const Parameters &p, const Tile &tile, u32 shared, int row_group,
                                            const float (&sums)[PASSES][TOKENS / 2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 staging = shared + PARTIALS + warp * CHUNK * 32;
    // Each lane has the address of eight rows of one token in four squares of 8 x 8: bank conflicts are swizzled away.
    u32 to = staging + (lane / 16 * 8 + lane % 8) * 32 + ((lane / 8 ^ lane / 4) % 2 << 4);
#pragma unroll
    for (int at = 0; at < PASSES * TOKENS; at += CHUNK) {
        int pass = at / TOKENS, first = at % TOKENS;
        const float (&of)[TOKENS / 2] = sums[pass];
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i += 8) {
            const float *square = of + first / 2 + i;
            store_squares(to + i * 64, pair(square[0], square[1]), pair(square[2], square[3]),
                          pair(square[4], square[5]), pair(square[6], square[7]));
        }
        __syncwarp();
        int row = tile.row + row_group * GROUP_ROWS + pass * 64 + warp % 4 * 16 + lane % 2 * 8;
#pragma unroll
        for (int i = 0; i < CHUNK; i += 16) {
            int at_token = i + lane / 2, token = first + at_token;
            u32 found[4];
            read16(staging + at_token * 32 + ((lane ^ at_token / 4) % 2 << 4), found);
            if (token < tile.tokens && row < p.rows && is_written(p, tile, token))
                write16(output_of(p, tile, token, row), found[0], found[1], found[2], found[3]);
        }
        __syncwarp();
    }
}

// Partial sums to shared memory, [group of channels][token][row].
__device__ __forceinline__ void leave(u32 shared, int row_group, int depth_group,
                                      const float (&sums)[PASSES][TOKENS / 2]) {
    int lane = threadIdx.x % 32, row = row_group * GROUP_ROWS + threadIdx.x % 128 / 32 * 16 + lane / 4;
    u32 to = shared + PARTIALS + (depth_group * TOKENS + lane % 4 * 2) * LEADING + row * 4;
#pragma unroll
    for (int i = 0; i < PASSES * TOKENS / 2; i++) {
        int pass = i / (TOKENS / 2), j = i % (TOKENS / 2);
        store_float(to + (j / 4 * 8 + j % 2) * LEADING + j / 2 % 2 * 32 + pass * 256, sums[pass][j]);
    }
}

// bf16 of eight rows of a token: what all groups of channels left, added in their order.
__device__ __forceinline__ void gather(u32 from, u32 (&found)[4]) {
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int part = 0; part < SPLIT * DEPTH_GROUPS; part++) {
        u32 at = address_in(from + part % DEPTH_GROUPS * TOKENS * LEADING,
                            place_in_share() * SPLIT + part / DEPTH_GROUPS);
        float4 low = read_cluster(at), high = read_cluster(at + 16);
        sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
        sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) found[i] = pair(sum[2 * i], sum[2 * i + 1]);
}

// Writes what was left, eight rows a thread.
__device__ __forceinline__ void finish(const Parameters &p, const Tile &tile, u32 shared) {
    constexpr int units = ROWS / 8;
    int rank = blockIdx.x % SPLIT;
    for (int at = threadIdx.x * SPLIT + rank; at < tile.tokens * units; at += CONSUMERS * SPLIT) {
        int token = at / units, row = at % units * 8;
        if (tile.row + row >= p.rows || !is_written(p, tile, token)) continue;
        u32 found[4];
        gather(shared + PARTIALS + token * LEADING + row * 4, found);
        write16(output_of(p, tile, token, tile.row + row), found[0], found[1], found[2], found[3]);
    }
}

__device__ __forceinline__ void consume(const Parameters &p, u32 shared) {
    int group = threadIdx.x / 128, row_group = group % ROW_GROUPS, depth_group = group / ROW_GROUPS;
    Walk walk;
    Ring ring;
    bool again = false;
    for (Tile tile; walk.take(p, tile); again = true) {
        float sums[PASSES][TOKENS / 2];
#pragma unroll
        for (int i = 0; i < PASSES * TOKENS / 2; i++) sums[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0;
        WeightScales scales(p, tile, row_group);
        for (int block = tile.first, turn = 0; block < tile.end; block++, ring.advance()) {
            bool mine = turn == depth_group;
            turn = turn + 1 == DEPTH_GROUPS ? 0 : turn + 1;
            if (!mine) continue;
            u32 scale = FORMAT == 8 ? scales.of(block) : 0;
            barrier_wait(shared + FULL + 8 * ring.stage, ring.parity);
            if (FORMAT == 8) multiply_fp8(shared, ring.stage, row_group, scale, sums);
            else multiply_fp4(shared, ring.stage, row_group, sums);
        }
        // Nobody reads the ring, or the sums of the tile before, any more.
        if (ONCE || again && !WHOLE) meet<1, CONSUMERS>();
        if (WHOLE) {
            write_whole(p, tile, shared, row_group, sums);
            continue;
        }
        leave(shared, row_group, depth_group, sums);
        if (SPLIT > 1) meet_cluster();
        else meet<1, CONSUMERS>();
        finish(p, tile, shared);
    }
    if (SPLIT > 1 && !again) meet_cluster();  // there was no tile
}

#if SPLIT * SHARE > 1
#define IN_CLUSTERS __cluster_dims__(SPLIT * SHARE, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(CONSUMERS + PRODUCERS, RESIDENT)
gemm_stream(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) uint4 memory[];
    u32 shared = address_of(memory);
    if (threadIdx.x == CONSUMERS) {
        if (FORMAT == 8) prefetch_map(&p.weight_map);
        prefetch_map(&p.activation_map);
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared + FULL + 8 * i, 1);
            barrier_init(shared + FREE + 8 * i, 4 * ROW_GROUPS * SHARE);
        }
        show_barriers();
    }
    if (CLUSTER > 1) meet_cluster();
    else __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (PASSES > 1) fewer_registers<40>();
        if (threadIdx.x == CONSUMERS) produce(p, shared);
        __syncwarp();
        if (SPLIT > 1) meet_cluster();
    } else {
        if (PASSES > 1) more_registers<232>();
        consume(p, shared);
    }
    if (CLUSTER > 1) meet_cluster();  // the others read these sums and free their stages here
}
