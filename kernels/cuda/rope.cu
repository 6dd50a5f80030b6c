// Rotary embedding of whole heads in place (reference/rope.py).
//
// A block takes one of PARTS parts of a row: what it turns is on its way before the row's position is known. A thread
// takes the same channels of several heads. Macros: HEADS of WIDTH channels, all of which turn, a power of two; BLOCK
// threads; PARTS, of which each has whole heads; INVERSE.

#include "scales.cuh"

#define UNITS (HEADS / PARTS * WIDTH / 8)  // of four pairs, of a part
#define TURNS ((UNITS + BLOCK - 1) / BLOCK)
static_assert(HEADS % PARTS == 0, "whole heads");
static_assert(BLOCK % (WIDTH / 8) == 0, "a thread's channels are the same in all its turns");

struct Parameters {
    u16 *x;
    const int *positions;
    const float *cosine, *sine;
    u64 x_stride;
};

__device__ __forceinline__ u32 turned(u32 both, float cosine, float sine) {
    float even = low_half(both), odd = high_half(both);
    return pair(even * cosine - odd * sine, even * sine + odd * cosine);
}

extern "C" __global__ void __launch_bounds__(BLOCK) rope(const __grid_constant__ Parameters p) {
    int row = blockIdx.x / PARTS, thread = threadIdx.x;
    int position = p.positions[row];
    uint4 *heads = (uint4 *)(p.x + row * p.x_stride) + blockIdx.x % PARTS * UNITS, x[TURNS];
#pragma unroll
    for (int k = 0; k < TURNS; k++) x[k] = heads[min(k * BLOCK + thread, UNITS - 1)];
    u64 place = (u64)position * (WIDTH / 8) + thread % (WIDTH / 8);
    float4 c = ((const float4 *)p.cosine)[place], s = ((const float4 *)p.sine)[place];
#if INVERSE
    s = make_float4(-s.x, -s.y, -s.z, -s.w);
#endif
#pragma unroll
    for (int k = 0; k < TURNS; k++)
        if (k * BLOCK + thread < UNITS)
            heads[k * BLOCK + thread] = make_uint4(turned(x[k].x, c.x, s.x), turned(x[k].y, c.y, s.y),
                                                   turned(x[k].z, c.z, s.z), turned(x[k].w, c.w, s.w));
}
