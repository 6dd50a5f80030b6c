// Casts of bf16 rows to E4M3 with scales (reference/cast.py), for scales that stand by columns.
//
// A block takes ROWS rows by 256 columns, a warp a row at a time, all loads before the first use; what it has of a
// column of scales, ROWS of them beside each other, is gathered in shared memory and written whole. Macros: GROUP
// columns of a scale; POWERS for E8M0 scales, else fp32; ROWS, a multiple of 8; FLOOR.

#include "codes.cuh"

#define WARPS 8
#define EACH (ROWS / WARPS)  // rows of a warp
#define COLUMNS 256
#define GROUPS (COLUMNS / GROUP)
#if POWERS
typedef u8 Scale;
#define SCALE(bits) (bits)
#else
typedef float Scale;
#define SCALE(bits) __uint_as_float(bits)
#endif

struct Parameters {
    const u16 *x;
    u8 *codes;
    Scale *scales;
    u64 x_stride, code_stride, scale_stride, scale_step;
    int rows, width;
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) cast(const __grid_constant__ Parameters p) {
    SHARED_MEMORY(memory);
    Scale(*held)[ROWS] = (Scale(*)[ROWS])memory;  // of each group of columns
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    int across = (p.width + COLUMNS - 1) / COLUMNS, first = (int)(blockIdx.x / across) * ROWS;
    int start = blockIdx.x % across * COLUMNS, column = start + lane * 8;
    bool inside = column < p.width;
    uint4 x[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        int row = min(first + k * WARPS + warp, p.rows - 1);
        x[k] = inside ? *(const uint4 *)(p.x + row * p.x_stride + column) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        int row = first + k * WARPS + warp;
        u32 words[4] = {x[k].x, x[k].y, x[k].z, x[k].w};
        float y[8];
#pragma unroll
        for (int i = 0; i < 4; i++) y[2 * i] = low_half(words[i]), y[2 * i + 1] = high_half(words[i]);
        Coded coded = code<GROUP, POWERS>(y);
        if (lane % (GROUP / 8) == 0) held[lane / (GROUP / 8)][k * WARPS + warp] = SCALE(coded.scale);
        if (inside && row < p.rows) *(uint2 *)(p.codes + row * p.code_stride + column) = coded.codes;
    }
    __syncthreads();
#pragma unroll
    for (int i = thread; i < GROUPS * ROWS; i += WARPS * 32) {
        int group = i / ROWS, row = first + i % ROWS;
        if (row < p.rows && start + group * GROUP < p.width)
            p.scales[row * p.scale_stride + (start / GROUP + group) * p.scale_step] = held[group][i % ROWS];
    }
}
