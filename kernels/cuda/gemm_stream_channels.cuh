// What a warpgroup adds up over blocks of channels that arrive in the ring: products of e4m3 or decoded e2m1 weights,
// times the scales of both sides. Knows neither who fills the ring nor what becomes of the sums.

__device__ __forceinline__ int stage_of(int turn) { return turn % STAGES; }
__device__ __forceinline__ void await_full(u32 shared, int turn) {
    barrier_wait(shared + FULL + 8 * stage_of(turn), turn / STAGES & 1);
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
    static constexpr bool AHEAD = TOKENS <= 64 || (FETCHERS == 3 && WARPGROUPS == 2);
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

// Each lane has read scales for itself, and says so for itself: racecheck does not follow one that speaks for its warp.
__device__ __forceinline__ void release(u32 shared, int stage) { barrier_arrive(shared + FREE + 8 * stage); }

// Products of one block of channels.
__device__ __forceinline__ void multiply_fp8(u32 shared, int stage, int row_group, u32 scale,
                                             float (&sums)[TOKENS / 2]) {
    float part[TOKENS / 2];
    u64 weights = operand(shared + WEIGHTS + stage * WEIGHT + row_group * 64 * DEPTH, 16);
    u64 activations = operand(shared + ACTIVATIONS + stage * ACTIVATION, 16);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) part[i] = 0;
    hold(part);
    begin_products();
#pragma unroll
    for (int step = 0; step < 4; step++)
        Product<TOKENS>::run(part, further(weights, step * 32), further(activations, step * 32), step > 0);
    commit_products();
    hold(part);
    TokenScales tokens(shared + SCALES + stage * TOKENS * 4);
    await_products<0>();
    hold(part);
    if (TokenScales::AHEAD) release(shared, stage);
    promote(sums, part, tokens, __uint_as_float(scale), __uint_as_float(scale));
    if (!TokenScales::AHEAD) release(shared, stage);
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

// All blocks of channels of a tile that this warpgroup takes; `turn` counts those before them.
__device__ __forceinline__ void add_up(const Parameters &p, const Tile &tile, u32 shared, int turn, int row_group,
                                       int depth_group, float (&sums)[TOKENS / 2]) {
    int block = tile.first + depth_group;
    turn += depth_group;
    if (FORMAT == 8) {
        WeightScales scales(p, tile, row_group);
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
