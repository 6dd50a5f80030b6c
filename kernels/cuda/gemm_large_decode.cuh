// Four warps that decode FP4 weights of a stage into e4m3, as products read them. Knows neither tiles nor sums.

// Eight e2m1 codes become two words of e4m3 times 2**(shift - 5), as gemm_stream_channels.cuh has it.
__device__ __forceinline__ void decode(u32 codes, u32 shift, u32 &low, u32 &high) {
    u32 small = shift * 0x01010100 + 0x14100800, large = shift * 0x01010101 + 0x24201c18;
    u32 magnitudes = codes & 0x77777777;
    low = pick_bytes(small, large, magnitudes) | (codes & 0x80808080);
    high = pick_bytes(small, large, magnitudes >> 16) | (codes << 4 & 0x80808080);
}

// A thread decodes 64 channels of the rows `row` and `row + 8` of a chunk, 4 of every 16.
__device__ __forceinline__ void decode_chunk(u32 packed, u32 to, int thread, int row) {
    u32 codes[8], first = read_word(packed + 4096 + row * 4), second = read_word(packed + 4096 + row * 4 + 32);
    read16(packed + thread * 16, codes), read16(packed + 2048 + thread * 16, codes + 4);
    to += row * DEPTH + thread % 4 * 4;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        u32 even = to + ((2 * step ^ (row & 7)) << 4), odd = to + ((2 * step + 1 ^ (row & 7)) << 4), low, high;
        decode(codes[2 * step], first >> 4 * step & 0x78, low, high);
        store4(even, low), store4(odd, high);
        decode(codes[2 * step + 1], second >> 4 * step & 0x78, low, high);
        store4(even + 8 * DEPTH, low), store4(odd + 8 * DEPTH, high);
    }
}

__device__ __forceinline__ void decode_weights(u32 shared) {
    int thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    for (Ring at = {0, 0};; at.advance()) {
        barrier_wait(shared + COME + 8 * at.stage, at.parity);
        if (!read_word(shared + NOTES + at.stage * NOTE + MORE)) return;
#pragma unroll
        for (int i = 0; i < ROWS / 64; i++)
            decode_chunk(shared + PACKS + at.stage * PACKED + i * CHUNK,
                         shared + WEIGHTS + at.stage * WEIGHT + i * 64 * DEPTH, thread, row);
        show_to_tensor_cores();
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(shared + FULL + 8 * at.stage);
    }
}
