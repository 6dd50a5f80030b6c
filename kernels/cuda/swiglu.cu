// SwiGLU, clamp, routing weight and cast to E4M3 with scales in one pass (reference/swiglu.py, cast.py).
//
// A thread makes eight adjacent results of a row, [gate | up]; threads of a group agree on its scale by exchanges. Macros:
// INNER, a multiple of 128; BLOCK threads; CLAMPED; WEIGHTED; GROUP columns of a scale; POWERS for E8M0 scales; SHORT
// where what the L2 holds from before counts.

#include "codes.cuh"

#define UNITS (INNER / 8)  // of a row

struct Parameters {
    const u16 *x;
    const float *weights;
    u8 *codes;
    void *scales;
    u64 x_stride, code_stride, scale_stride, scale_step;
    int rows;
    float limit;
};

__device__ __forceinline__ float activated(float gate, float up, float limit) {
#if CLAMPED
    gate = smaller(gate, limit), up = smaller(larger(up, -limit), limit);
#endif
    return gate * inverse(1.0f + power(gate * -1.44269504f)) * up;
}

extern "C" __global__ void __launch_bounds__(BLOCK) swiglu(const __grid_constant__ Parameters p) {
    u32 all = p.rows * UNITS, mine = blockIdx.x * BLOCK + threadIdx.x, at = min(mine, all - 1);
    u32 row = at / UNITS, unit = at % UNITS;
    const uint4 *from = (const uint4 *)(p.x + row * p.x_stride) + unit;
#if SHORT
    uint4 gate = read_once(from), up = read_once(from + UNITS);
#else
    uint4 gate = from[0], up = from[UNITS];
#endif
#if WEIGHTED
    float weight = p.weights[row];
#endif
    const u32 *g = &gate.x, *u = &up.x;
    float y[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[2 * i] = activated(low_half(g[i]), low_half(u[i]), p.limit);
        y[2 * i + 1] = activated(high_half(g[i]), high_half(u[i]), p.limit);
#if WEIGHTED
        y[2 * i] *= weight, y[2 * i + 1] *= weight;
#endif
    }
    Coded coded = code<GROUP, POWERS>(y);
    if (mine >= all) return;
    uint2 *to = (uint2 *)(p.codes + row * p.code_stride + unit * 8);
#if SHORT
    write_once(to, coded.codes);
#else
    *to = coded.codes;
#endif
    if (unit % (GROUP / 8) == 0)
        put_scale<POWERS>(p.scales, row * p.scale_stride + unit / (GROUP / 8) * p.scale_step, coded.scale);
}
