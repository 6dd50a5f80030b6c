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
// block; RESIDENT blocks on a multiprocessor.

#include "hopper.cuh"
#include "gemm_products.cuh"
#include "gemm_copies.cuh"

constexpr int CONSUMERS = 128 * ROW_GROUPS * DEPTH_GROUPS, DEPTH = 128;
constexpr int ROWS = 64 * ROW_GROUPS;
// Where two consumers' sums take most registers there are, whole warpgroups trade them.
constexpr bool TRADED = TOKENS == 128 && ROW_GROUPS * DEPTH_GROUPS == 2;
constexpr int PRODUCERS = TRADED ? 128 : 32;
// Whose products begin before the sums of those before are taken: two partial products fit. Not worth its code where a
// block reads little and once.
constexpr bool FITS = TOKENS <= 64 || TRADED;
constexpr bool EARLY = FORMAT == 8 && GRAIN == 128 && FITS && !(ONCE && TOKENS == 8);
static_assert(SPLIT == 1 || ONCE, "a cluster meets once");
static_assert(STAGES % DEPTH_GROUPS == 0, "a stage has the same reader in each of its turns");
constexpr int PACKED = 64 * DEPTH / 2 + 64 * 4;  // bytes of 64 rows of one block of channels, FORMAT 4
constexpr int WEIGHT = FORMAT == 8 ? ROWS * DEPTH : ROW_GROUPS * PACKED, ACTIVATION = TOKENS * DEPTH;
constexpr bool WHOLE = DEPTH_GROUPS * SPLIT == 1 && TOKENS >= 16;  // no partial sums: bf16 leaves a warpgroup
constexpr int LEADING = ROWS * 4 + 16;  // bytes between tokens of partial sums: no two lanes of a store meet in a bank
constexpr int CHUNK = TOKENS < 64 ? TOKENS : 64;  // tokens that a warp writes at a time, WHOLE
// Partial sums: each of SPLIT blocks adds every SPLIT-th octet of tokens, from SLOTS groups of channels.
constexpr int SLOTS = SPLIT * DEPTH_GROUPS, SLOT = (TOKENS / 8 + SPLIT - 1) / SPLIT * 8 * LEADING;
constexpr int PARTIAL = WHOLE ? CONSUMERS / 32 * CHUNK * 32 : SLOTS * SLOT;
constexpr bool APART = !ONCE || SPLIT > 1;  // sums may not lie where the ring was
constexpr int TOGETHER = 16;  // tiles of tokens that pass all weights while they stay in the L2
constexpr int ACTIVATIONS = FORMAT == 8 ? STAGES * WEIGHT : 0, WEIGHTS = FORMAT == 8 ? 0 : STAGES * ACTIVATION;
constexpr int SCALES = STAGES * (WEIGHT + ACTIVATION), PARTIALS = APART ? SCALES + STAGES * TOKENS * 4 : 0;
constexpr int FULL = SCALES + STAGES * TOKENS * 4 + (APART ? PARTIAL : 0), FREE = FULL + 8 * STAGES;
constexpr int SUMS = FREE + 8 * STAGES;  // counts the partial sums sent to this block

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

// One tile of the output and the blocks of channels this block of threads adds up. `expert` is the group of the
// weights, `group` that of activations and output.
struct Tile { int group, expert, token, tokens, row, first, end; };

// Tiles in the order in which blocks of threads take them: tokens of the same weights one after another.
struct Walk {
    int group = 0, before = 0, next = blockIdx.x / SPLIT;

    __device__ __forceinline__ bool take(const Parameters &p, Tile &tile) {
        int row_tiles = (p.rows + ROWS - 1) / ROWS;
        while (group < p.groups) {
            int count = p.counts ? min(max(__ldg(p.counts + group), 0), p.capacity) : p.capacity;
            int token_tiles = (count + TOKENS - 1) / TOKENS, at = next - before;
            if (at >= token_tiles * row_tiles) {
                before += token_tiles * row_tiles, group++;
                continue;
            }
            next += gridDim.x / SPLIT;
            place(p, tile, at, token_tiles, row_tiles);
            tile.tokens = min(TOKENS, count - tile.token);
            tile.expert = p.experts ? __ldg(p.experts + tile.token) : group;
            if (tile.expert >= 0) return true;
        }
        return false;
    }

    __device__ __forceinline__ void place(const Parameters &p, Tile &tile, int at, int token_tiles, int row_tiles) {
        int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, token = 0;
        if (token_tiles > 1) {
            int first = at / (TOGETHER * row_tiles) * TOGETHER, width = min(TOGETHER, token_tiles - first);
            at -= first * row_tiles;
            token = first + at % width, at /= width;
        }
        tile.group = group, tile.token = token * TOKENS, tile.row = at * ROWS;
        tile.first = rank * p.blocks / SPLIT, tile.end = (rank + 1) * p.blocks / SPLIT;
    }
};

__device__ __forceinline__ int stage_of(int turn) { return turn % STAGES; }
__device__ __forceinline__ void await_full(u32 shared, int turn) {
    barrier_wait(shared + FULL + 8 * stage_of(turn), turn / STAGES & 1);
}

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

__device__ __forceinline__ void produce(const Parameters &p, u32 shared) {
    Walk walk;
    int stage = 0, parity = 1;
    for (Tile tile; walk.take(p, tile);) {
        u32 scale_bytes = min(TOKENS, p.padded - tile.token) * 4;
        const float *scales = p.scales + (u64)tile.group * p.blocks * p.padded + tile.token;
#pragma unroll 1  // less to fetch before the first copy begins
        for (int block = tile.first; block < tile.end; block++) {
            u32 full = shared + FULL + 8 * stage;
            barrier_wait(shared + FREE + 8 * stage, parity);
            barrier_expect(full, WEIGHT + ACTIVATION + scale_bytes);
            load_weights(p, tile, block, shared + WEIGHTS + stage * WEIGHT, full);
            copy_box(shared + ACTIVATIONS + stage * ACTIVATION, &p.activation_map, block * DEPTH, tile.token,
                     tile.group, full, READ_AGAIN);
            copy_bytes(shared + SCALES + stage * TOKENS * 4, scales + (u64)block * p.padded, scale_bytes, full,
                       READ_AGAIN);
            if (++stage == STAGES) stage = 0, parity ^= 1;
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
        int row = tile.row + row_group * 64 + (GRAIN == 32 ? threadIdx.x % 128 / 64 * 32 : 0);
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
    if (threadIdx.x % 32 == 0) barrier_arrive(shared + FREE + 8 * stage);
}

// Products of one block of channels, begun and not awaited.
__device__ __forceinline__ void begin_fp8(u32 shared, int stage, int row_group, float (&part)[TOKENS / 2]) {
    u64 weights = operand(shared + WEIGHTS + stage * WEIGHT + row_group * 64 * DEPTH, 16);
    u64 activations = operand(shared + ACTIVATIONS + stage * ACTIVATION, 16);
    hold(part);
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; step++)
        Product<TOKENS>::run(part, further(weights, step * 32), further(activations, step * 32), step > 0);
    commit_products();
    hold(part);
}

template <int PENDING>
__device__ __forceinline__ void end_fp8(u32 shared, int stage, u32 scale, float (&part)[TOKENS / 2],
                                        float (&sums)[TOKENS / 2]) {
    TokenScales tokens(shared + SCALES + stage * TOKENS * 4);
    await_products<PENDING>();
    hold(part);
    if (TokenScales::AHEAD) release(shared, stage);
    promote(sums, part, tokens, __uint_as_float(scale), __uint_as_float(scale));
    if (!TokenScales::AHEAD) release(shared, stage);
}

__device__ __forceinline__ void multiply_fp8(u32 shared, int stage, int row_group, u32 scale,
                                             float (&sums)[TOKENS / 2]) {
    float part[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) part[i] = 0;
    begin_fp8(shared, stage, row_group, part);
    end_fp8<0>(shared, stage, scale, part, sums);
}

// The same with scales of 32 x 32.
__device__ __forceinline__ void multiply_fine(u32 shared, int stage, int row_group, u32 scales,
                                              float (&sums)[TOKENS / 2]) {
    float part[TOKENS / 2];
    u64 weights = operand(shared + WEIGHTS + stage * WEIGHT + row_group * 64 * DEPTH, 16);
    u64 activations = operand(shared + ACTIVATIONS + stage * ACTIVATION, 16);
    TokenScales tokens(shared + SCALES + stage * TOKENS * 4);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) part[i] = 0;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        hold(part);
        begin_products();
        Product<TOKENS>::run(part, further(weights, step * 32), further(activations, step * 32), 0);
        commit_products();
        await_products<0>();
        hold(part);
        float weight = scale_of(scales >> 8 * step & 255);
        promote(sums, part, tokens, weight, weight);
    }
    release(shared, stage);
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

// One block of channels of FP4 weights as registers of products.
struct Decoded {
    u32 a[16], first, second;
    __device__ __forceinline__ void load(u32 shared, int turn, int row_group) {
        await_full(shared, turn);
        int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
        u32 weights = shared + WEIGHTS + stage_of(turn) * WEIGHT + row_group * PACKED, codes[8];
        read16(weights + thread * 16, codes), read16(weights + 2048 + thread * 16, codes + 4);
        first = read_word(weights + 4096 + row * 4), second = read_word(weights + 4096 + row * 4 + 32);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            decode(codes[2 * step], first >> 4 * step & 0x78, a[4 * step], a[4 * step + 2]);
            decode(codes[2 * step + 1], second >> 4 * step & 0x78, a[4 * step + 1], a[4 * step + 3]);
        }
    }
};

// Products of `now`; meanwhile the block of channels DEPTH_GROUPS further is decoded, if the tile has it.
__device__ __forceinline__ void multiply_fp4(u32 shared, int turn, int row_group, bool more, const Decoded &now,
                                             Decoded &next, float (&sums)[TOKENS / 2]) {
    float part[TOKENS / 2];
    int stage = stage_of(turn);
    u64 activations = operand(shared + ACTIVATIONS + stage * ACTIVATION, 16);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) part[i] = 0;
    hold(part);
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; step++)
        Product<TOKENS>::run(part, now.a + 4 * step, further(activations, 32 * step), step > 0);
    commit_products();
    hold(part);
    if (more) next.load(shared, turn + DEPTH_GROUPS, row_group);
    TokenScales tokens(shared + SCALES + stage * TOKENS * 4);
    await_products<0>();
    hold(part);
    if (TokenScales::AHEAD) release(shared, stage);
    promote(sums, part, tokens, __uint_as_float(now.first & 0x7f800000), __uint_as_float(now.second & 0x7f800000));
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
                                            const float (&sums)[TOKENS / 2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 staging = shared + PARTIALS + warp * CHUNK * 32;
    // Each lane has the address of eight rows of one token in four squares of 8 x 8: bank conflicts are swizzled away.
    u32 to = staging + (lane / 16 * 8 + lane % 8) * 32 + ((lane / 8 ^ lane / 4) % 2 << 4);
#pragma unroll
    for (int first = 0; first < TOKENS; first += CHUNK) {
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i += 8) {
            const float *square = sums + first / 2 + i;
            store_squares(to + i * 64, pair(square[0], square[1]), pair(square[2], square[3]),
                          pair(square[4], square[5]), pair(square[6], square[7]));
        }
        __syncwarp();
        int row = tile.row + row_group * 64 + warp % 4 * 16 + lane % 2 * 8;
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

// Partial sums to the shared memory of the blocks that add them, [group of channels][token][row].
__device__ __forceinline__ void leave(const Tile &tile, u32 shared, int row_group, int depth_group,
                                      const float (&sums)[TOKENS / 2]) {
    int lane = threadIdx.x % 32, row = row_group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    u32 to = shared + PARTIALS + (blockIdx.x % SPLIT * DEPTH_GROUPS + depth_group) * SLOT;
    to += lane % 4 * 2 * LEADING + row * 4;
#pragma unroll
    for (int octet = 0; octet < TOKENS / 8; octet++) {
        if (octet * 8 >= tile.tokens) return;
        int rank = octet % SPLIT;
        u32 there = SPLIT > 1 ? address_in(to, rank) : to, barrier = SPLIT > 1 ? address_in(shared + SUMS, rank) : 0;
        there += octet / SPLIT * 8 * LEADING;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 at = there + i % 2 * LEADING + i / 2 * 32;
            if (SPLIT > 1) send_float(at, sums[octet * 4 + i], barrier);
            else store_float(at, sums[octet * 4 + i]);
        }
    }
}

// bf16 of eight rows of a token: what all groups of channels left, added in their order.
__device__ __forceinline__ void gather(u32 from, u32 (&found)[4]) {
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
        u32 part[8];
        read16(from + slot * SLOT, part), read16(from + slot * SLOT + 16, part + 4);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += __uint_as_float(part[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) found[i] = pair(sum[2 * i], sum[2 * i + 1]);
}

// Adds and writes what was left here, eight rows a thread.
__device__ __forceinline__ void finish(const Parameters &p, const Tile &tile, u32 shared) {
    constexpr int units = ROWS / 8;
    int rank = blockIdx.x % SPLIT, octets = ((tile.tokens + 7) / 8 - rank + SPLIT - 1) / SPLIT;
    if (SPLIT > 1) {
        if (threadIdx.x == 0) barrier_expect(shared + SUMS, SLOTS * octets * 8 * ROWS * 4);
        barrier_wait(shared + SUMS, 0);
    } else {
        meet<1, CONSUMERS>();
    }
#pragma unroll 1
    for (int at = threadIdx.x; at < octets * 8 * units; at += CONSUMERS) {
        int place = at / units, row = at % units * 8, token = (place / 8 * SPLIT + rank) * 8 + place % 8;
        u32 found[4];
        gather(shared + PARTIALS + place * LEADING + row * 4, found);
        if (token < tile.tokens && tile.row + row < p.rows && is_written(p, tile, token))
            write16(output_of(p, tile, token, tile.row + row), found[0], found[1], found[2], found[3]);
    }
}

// FP8 with few tokens: products of the next block of channels begin before the sums of this one are taken.
__device__ __forceinline__ void add_early(const Tile &tile, u32 shared, int block, int turn, int row_group,
                                          WeightScales &scales, float (&sums)[TOKENS / 2]) {
    float even[TOKENS / 2], odd[TOKENS / 2];
    auto begin = [&](float (&part)[TOKENS / 2], int ahead) {
        await_full(shared, turn + ahead);
        begin_fp8(shared, stage_of(turn + ahead), row_group, part);
    };
    if (block >= tile.end) return;
    begin(even, 0);
#pragma unroll 1
    while (block + DEPTH_GROUPS < tile.end) {
        u32 scale = scales.of(block);
        begin(odd, DEPTH_GROUPS);
        end_fp8<1>(shared, stage_of(turn), scale, even, sums);
        block += DEPTH_GROUPS, turn += DEPTH_GROUPS;
        scale = scales.of(block);
        if (block + DEPTH_GROUPS >= tile.end) {
            end_fp8<0>(shared, stage_of(turn), scale, odd, sums);
            return;
        }
        begin(even, DEPTH_GROUPS);
        end_fp8<1>(shared, stage_of(turn), scale, odd, sums);
        block += DEPTH_GROUPS, turn += DEPTH_GROUPS;
    }
    end_fp8<0>(shared, stage_of(turn), scales.of(block), even, sums);
}

// All blocks of channels of a tile that this warpgroup takes; `turn` counts those before them.
__device__ __forceinline__ void add_up(const Parameters &p, const Tile &tile, u32 shared, int turn, int row_group,
                                       int depth_group, float (&sums)[TOKENS / 2]) {
    int block = tile.first + depth_group;
    turn += depth_group;
    if (FORMAT == 8) {
        WeightScales scales(p, tile, row_group);
        if (EARLY) return add_early(tile, shared, block, turn, row_group, scales, sums);
#pragma unroll 1
        for (; block < tile.end; block += DEPTH_GROUPS, turn += DEPTH_GROUPS) {
            u32 scale = scales.of(block);
            await_full(shared, turn);
            if (GRAIN == 32) multiply_fine(shared, stage_of(turn), row_group, scale, sums);
            else multiply_fp8(shared, stage_of(turn), row_group, scale, sums);
        }
        return;
    }
    if (block >= tile.end) return;
    Decoded even, odd;
    even.load(shared, turn, row_group);
    for (;;) {
        multiply_fp4(shared, turn, row_group, block + DEPTH_GROUPS < tile.end, even, odd, sums);
        if ((block += DEPTH_GROUPS) >= tile.end) return;
        turn += DEPTH_GROUPS;
        multiply_fp4(shared, turn, row_group, block + DEPTH_GROUPS < tile.end, odd, even, sums);
        if ((block += DEPTH_GROUPS) >= tile.end) return;
        turn += DEPTH_GROUPS;
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
            leave(tile, shared, row_group, depth_group, sums);
            finish(p, tile, shared);
        }
    }
}

__device__ __forceinline__ void begin(const Parameters &p, u32 shared) {
    if (FORMAT == 8) prefetch_map(&p.weight_map);
    prefetch_map(&p.activation_map);
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        barrier_init(shared + FULL + 8 * i, 1);
        barrier_init(shared + FREE + 8 * i, 4 * ROW_GROUPS);
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
        if (TRADED) fewer_registers<40>();
        signal<2, CONSUMERS + PRODUCERS>();
        if (threadIdx.x == CONSUMERS) produce(p, shared);
        __syncwarp();
        if (SPLIT > 1) await_cluster();
    } else {
        if (TRADED) more_registers<232>();
        meet<2, CONSUMERS + PRODUCERS>();
        if (SPLIT > 1) await_cluster();
        consume(p, shared);
    }
}
