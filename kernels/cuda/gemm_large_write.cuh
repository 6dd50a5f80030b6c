// A tile's sums on their way to memory, by way of registers alone. Knows no product.

// Where a warp's tokens of a tile lie, and a bit for each that counts.
struct Place {
    int row, token, group;
    u32 counted[PASSES];
    __device__ __forceinline__ void read(u32 note, int first) {
        row = read_word(note + PLACE), token = read_word(note + PLACE + 4) + first, group = read_word(note + PLACE + 8);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            counted[pass] = read_word(note + COUNTED + (first + pass * 64) / 32 * 4) >> first % 32 & 0xffff;
    }
};

// Words of four octets of columns, one of each in a thread, become those of one octet in each thread of four.
__device__ __forceinline__ void turn(u32 (&word)[4]) {
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 other = __shfl_xor_sync(~0u, odd ? word[i] : word[i + 1], 1);
        if (odd) word[i] = other;
        else word[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 other = __shfl_xor_sync(~0u, high ? word[i] : word[i + 2], 2);
        if (high) word[i] = other;
        else word[i + 2] = other;
    }
}

// The sums of a pass as bf16, eight columns of a token a thread at a time.
__device__ __forceinline__ void write(const Parameters &p, const Place &place, int pass, const float (&sums)[ROWS / 2]) {
    int lane = threadIdx.x % 32, row = place.row + lane % 4 * 8;
    u64 first = (u64)place.group * p.capacity + place.token + pass * 64;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int token = lane / 4 + half * 8;
        bool counts = place.counted[pass] >> token & 1;
        u16 *to = p.output + (first + token) * p.rows + row;
#pragma unroll
        for (int i = 0; i < ROWS; i += 32) {
            u32 word[4];
#pragma unroll
            for (int octet = 0; octet < 4; octet++) {
                const float *two = sums + i / 2 + octet * 4 + half * 2;
                word[octet] = pair(two[0], two[1]);
            }
            turn(word);
            if (counts && row + i < p.rows) write16(to + i, word[0], word[1], word[2], word[3]);
        }
    }
}
