// A tile's sums on their way to memory, by way of a few bytes of shared memory for each warp. Knows no product.

// Where a warp's tokens of a tile lie, and a bit for each of a pass' 16 that counts.
struct Place {
    int row, token;
    u32 counts, group_and_live;  // in bits 30 and 31, for each pass, whether one of the warpgroup's tokens counts
    __device__ __forceinline__ u32 counted(int pass) const { return counts >> 16 * pass & 0xffff; }
    __device__ __forceinline__ u32 group() const { return group_and_live & 0x3fffffff; }
    __device__ __forceinline__ u32 live() const { return group_and_live >> 30; }
    __device__ __forceinline__ void read(u32 note, int first) {
        row = read_word(note + PLACE), token = read_word(note + PLACE + 4) + first;
        group_and_live = row < 0 ? 0 : read_word(note + PLACE + 8), counts = 0;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            u32 words = note + COUNTED + first / 64 * 8 + pass * 16, low = read_word(words), high = read_word(words + 4);
            counts |= ((first % 64 < 32 ? low : high) >> first % 32 & 0xffff) << 16 * pass;
            if (row >= 0 && (low | high)) group_and_live |= 1u << 30 + pass;
        }
    }
};

// `width` columns of 16 tokens as bf16, from `sums` of a thread to the warp's own memory.
template <int WIDTH> __device__ __forceinline__ void lay_down(u32 own, const float *sums) {
    int lane = threadIdx.x % 32, line = lane % 16;
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++, sums += 8)
        store_rows(own + swizzled(line, 2 * i + lane / 16), pair(sums[0], sums[1]), pair(sums[2], sums[3]),
                   pair(sums[4], sums[5]), pair(sums[6], sums[7]));
}

// From there to `output`, where tokens count: eight columns a thread at a time.
template <int WIDTH>
__device__ __forceinline__ void pick_up(const Parameters &p, u32 own, u32 counted, int row, u64 token) {
    int lane = threadIdx.x % 32, unit = lane % 8;
    u16 *to = p.output + (token + lane / 8) * p.rows + row + unit * 8;
#pragma unroll 2  // by four, the compiler puts sums and products into the same banks of registers
    for (int line = lane / 8; line < 16; line += 4, to += (u64)4 * p.rows) {
        u32 word[4];
        read16(own + swizzled(line, unit), word);
        bool inside = unit * 8 < WIDTH && row + unit * 8 < p.rows;
        if (inside && counted >> line & 1) write16(to, word[0], word[1], word[2], word[3]);
    }
}

// 64 columns from `first` on of the sums of a pass, or those that are left. Whole boxes are copied out while the warp
// goes on.
template <int FIRST>
__device__ __forceinline__ void write_columns(const Parameters &p, u32 own, const Place &place, int pass,
                                              const float (&sums)[ROWS / 2]) {
    constexpr int WIDTH = ROWS - FIRST < 64 ? ROWS - FIRST : 64;
    int token = place.token + pass * 128, row = place.row + FIRST;
    if (threadIdx.x % 32 == 0) await_copies_out();
    __syncwarp();
    lay_down<WIDTH>(own, sums + FIRST / 2);
    if (WIDTH == 64 && place.counted(pass) == 0xffff) {
        show_to_tensor_cores();
        __syncwarp();
        if (threadIdx.x % 32 == 0) copy_box_out(&p.output_map, row, token, place.group(), own);
    } else {
        __syncwarp();
        pick_up<WIDTH>(p, own, place.counted(pass), row, (u64)place.group() * p.capacity + token);
    }
}

__device__ __forceinline__ void write(const Parameters &p, u32 shared, const Place &place, int pass,
                                      const float (&sums)[ROWS / 2]) {
    u32 own = shared + LEAVING + threadIdx.x / 32 * 2048;
    write_columns<0>(p, own, place, pass, sums);
    if constexpr (ROWS > 64) write_columns<64>(p, own, place, pass, sums);
    if constexpr (ROWS > 128) write_columns<128>(p, own, place, pass, sums);
}
