// Rows of 256 output channels from a warpgroup's registers to memory. Knows no kernel.

// Sixteen bytes of eight channels, for rows whose channels lie in tiles as they lie in memory.
struct AsTheyLie {
    __device__ __forceinline__ void operator()(u32 (&)[4]) const {}
};

// bf16 rows to `to` [rows, 512], by way of 32 kB of shared memory at `room`, which nobody else uses; the warpgroup
// meets at barrier ID. A thread's sums are those of a product of 64 rows; `order` sees each eight channels on the way.
template <int ID, typename Order>
__device__ __forceinline__ void write_rows(u16 *to, int rows, u32 room, float (&o)[128], float first, float second,
                                           const Order &order) {
    int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        u32 at = room + j / 8 * 8192 + lane % 4 * 4;
        store4(at + swizzled(row, j % 8), pair(o[4 * j] * first, o[4 * j + 1] * first));
        store4(at + swizzled(row + 8, j % 8), pair(o[4 * j + 2] * second, o[4 * j + 3] * second));
    }
    meet<ID, 128>();
    for (int r = thread / 32; r < 64 && r < rows; r += 4) {
        u32 found[4];
        read16(room + lane / 8 * 8192 + swizzled(r, lane % 8), found);
        order(found);
        *(uint4 *)(to + (u64)r * 512 + lane * 8) = make_uint4(found[0], found[1], found[2], found[3]);
    }
}
