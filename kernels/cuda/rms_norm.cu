// RMSNorm of rows, behind an addition if there is one, to bf16 or to E4M3 with scales (reference/rms_norm.py, cast.py).
//
// A block takes one row and holds it in registers: all loads before the first use, one barrier. Macros: WIDTH, a multiple
// of 128; BLOCK threads, RESIDENT blocks of which a multiprocessor has room for; ADDED; WIDE for fp32 weights, else bf16; GROUP columns of a scale or 0 for bf16; POWERS for E8M0
// scales.

#include "codes.cuh"

#define UNITS (WIDTH / 8)  // of 16 bytes, a thread's share at a time
#define TURNS ((UNITS + BLOCK - 1) / BLOCK)
#define WARPS (BLOCK / 32)

struct Parameters {
    const u16 *x;
    u16 *residual;
    const void *weight;
    void *out, *scales;
    u64 x_stride, residual_stride, out_stride, scale_stride, scale_step;
    int rows;
    float eps;
};

// Eight numbers and the share of their row: out as bf16, or as codes and a scale for a group of neighbouring threads.
__device__ __forceinline__ void put(const Parameters &p, int row, int unit, const float *y) {
    bool inside = unit < UNITS;
#if GROUP == 0
    if (inside) *(uint4 *)((u16 *)p.out + row * p.out_stride + unit * 8) = packed(y);
#else
    Coded coded = code<GROUP, POWERS>(y);
    if (!inside) return;
    *(uint2 *)((u8 *)p.out + row * p.out_stride + unit * 8) = coded.codes;
    if (unit % (GROUP / 8) == 0)
        put_scale<POWERS>(p.scales, row * p.scale_stride + unit / (GROUP / 8) * p.scale_step, coded.scale);
#endif
}

__device__ __forceinline__ void take_weights(const void *weight, int unit, float *to) {
#if WIDE
    float4 low = ((const float4 *)weight)[unit * 2], high = ((const float4 *)weight)[unit * 2 + 1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
#else
    uint4 given = ((const uint4 *)weight)[unit];
    to[0] = low_half(given.x), to[1] = high_half(given.x), to[2] = low_half(given.y), to[3] = high_half(given.y);
    to[4] = low_half(given.z), to[5] = high_half(given.z), to[6] = low_half(given.w), to[7] = high_half(given.w);
#endif
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) rms_norm(const __grid_constant__ Parameters p) {
    SHARED_MEMORY(memory);
    float *sums = (float *)memory;
    int thread = threadIdx.x, row = blockIdx.x;
    uint4 x[TURNS];
#pragma unroll
    for (int k = 0; k < TURNS; k++)
        x[k] = *(const uint4 *)(p.x + row * p.x_stride + min(k * BLOCK + thread, UNITS - 1) * 8);
#if ADDED
    uint4 other[TURNS];
#pragma unroll
    for (int k = 0; k < TURNS; k++)
        other[k] = *(const uint4 *)(p.residual + row * p.residual_stride + min(k * BLOCK + thread, UNITS - 1) * 8);
#endif
#if ADDED  // where there are two loads for each weight, it is worth the registers
    float weight[TURNS][8];
#pragma unroll
    for (int k = 0; k < TURNS; k++) take_weights(p.weight, min(k * BLOCK + thread, UNITS - 1), weight[k]);
#endif
    float sum = 0;
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
        int unit = k * BLOCK + thread;
        u32 *mine = &x[k].x;
#if ADDED
        const u32 *more = &other[k].x;
#pragma unroll
        for (int i = 0; i < 4; i++)
            mine[i] = pair(low_half(mine[i]) + low_half(more[i]), high_half(mine[i]) + high_half(more[i]));
        if (unit < UNITS) *(uint4 *)(p.residual + row * p.residual_stride + unit * 8) = x[k];
#endif
        if (unit < UNITS)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum = fmaf(low_half(mine[i]), low_half(mine[i]), sum);
                sum = fmaf(high_half(mine[i]), high_half(mine[i]), sum);
            }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) total += sums[i];
    float unit_rms = inverse_root(total * (1.0f / WIDTH) + p.eps);
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
        const u32 *mine = &x[k].x;
        float y[8];
#if ADDED
        const float *by = weight[k];
#else
        float by[8];
        take_weights(p.weight, min(k * BLOCK + thread, UNITS - 1), by);
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) {
            y[2 * i] = low_half(mine[i]) * unit_rms * by[2 * i];
            y[2 * i + 1] = high_half(mine[i]) * unit_rms * by[2 * i + 1];
        }
        put(p, row, k * BLOCK + thread, y);
    }
}
