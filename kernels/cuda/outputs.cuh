// Rows of 256 output channels from a warpgroup's registers to memory. Knows no kernel.

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

// Of four numbers of each of the four threads that share a row, STEP apart, a thread takes the one of its own place
// from all.
template <int STEP> __device__ __forceinline__ void exchange(u32 *x) {
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j & step) continue;
            u32 got = __shfl_xor_sync(~0u, lane & step ? x[STEP * j] : x[STEP * (j | step)], step);
            (lane & step ? x[STEP * j] : x[STEP * (j | step)]) = got;
        }
}

// 128 channels of both rows that a thread shares, of which there are `rows` in all from the first of its block: of a
// row, four threads have eight channels in each of 16 places, and become the owners of four places each.
__device__ __forceinline__ void write_channels(u16 *to, int rows, const float *o, float first, float second) {
    int lane = threadIdx.x % 4, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int half = i % 2;
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float *from = o + (i / 2 * 4 + j) * 4 + 2 * half;
            x[j] = pair(from[0] * (half ? second : first), from[1] * (half ? second : first));
        }
        exchange<1>(x);
        if (row + 8 * half < rows)
            *(uint4 *)(to + (u64)(row + 8 * half) * 512 + (i / 2 * 4 + lane) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

// 128 bf16 channels of both rows that a thread shares to 16 kB of shared memory at `room`, as boxes of 64 rows and 64
// channels have them.
__device__ __forceinline__ void stage_channels(u32 room, const float *o, float first, float second) {
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        u32 at = room + j / 8 * 8192 + threadIdx.x % 4 * 4;
        store4(at + swizzled(row, j % 8), pair(o[4 * j] * first, o[4 * j + 1] * first));
        store4(at + swizzled(row + 8, j % 8), pair(o[4 * j + 2] * second, o[4 * j + 3] * second));
    }
}
