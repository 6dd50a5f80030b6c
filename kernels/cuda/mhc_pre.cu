// mHC's coefficients and the collapse of its streams in one launch (reference/mhc.py).
//
// A block collapses one row, by weights that were given or that each of its warps makes for itself while the streams are
// on their way. In front of as many blocks as it has warps, four rows each, stands one that makes all coefficients of
// their rows: a lane holds a row of a matrix, so that Sinkhorn's columns are two exchanges. Macros: HIDDEN, a multiple of
// 256; PARTS of the sums; ITERATIONS; BLOCK threads; NORMED; GIVEN.

#include "scales.cuh"

#define UNITS (HIDDEN / 8)
#define TURNS ((UNITS + BLOCK - 1) / BLOCK)
#define WARPS (BLOCK / 32)
#define BATCH 4  // rows whose coefficients a warp makes together
#define TEAM (WARPS * BATCH)
#define SUMS ((PARTS + 7) / 8)  // parts that a lane of a collapsing warp sums

struct Parameters {
    const u16 *x;
    const float *z, *squares, *base, *scale, *given, *norm;
    u16 *collapsed;
    float *mixed, *post_weights, *comb;
    int rows;
    float hyper_eps, norm_eps;
};

// Each over the sum of all and eps.
__device__ __forceinline__ void share(float (&a)[4], float eps) {
    float unit = inverse(a[0] + a[1] + (a[2] + a[3]) + eps);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] *= unit;
}

// The same along columns, which four neighbouring lanes hold.
__device__ __forceinline__ void share_down(float (&a)[4], float eps) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = a[i] + __shfl_xor_sync(~0u, a[i], 1);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] *= inverse(sum[i] + eps);
}

__device__ __forceinline__ float sigmoid(float x) { return inverse(1.0f + power(x * -1.44269504f)); }

// Of four rows from `first` on: lanes 4 r + q hold what a row r has in column q of `mixed` and of `post_weights`, and row
// q of its matrix; lanes 16 and more sum the other half of the parts, then do the same again.
__device__ __forceinline__ void coefficients(const Parameters &p, int first, int lane) {
    int row = min(first + lane / 4 % BATCH, p.rows - 1), q = lane % 4, half = lane / 16;
    const float *z = p.z + (row + (u64)half * p.rows) * 24, *squares = p.squares + row + (u64)half * p.rows;
    float pre = 0, post = 0, square = 0, a[4] = {0, 0, 0, 0};
#pragma unroll
    for (int part = 0; part < PARTS; part += 2) {
        if (part + half < PARTS) {
            const float *mine = z + part * (24ull * p.rows);
            float4 four = *(const float4 *)(mine + 8 + 4 * q);
            pre += mine[q], post += mine[4 + q];
            a[0] += four.x, a[1] += four.y, a[2] += four.z, a[3] += four.w;
        }
        if (part % 8 == 0 && part + half + 2 * q < PARTS) square += squares[(u64)(part + 2 * q) * p.rows];
    }
    float s = p.scale[0], t = p.scale[1], c = p.scale[2], base[6] = {p.base[q], p.base[4 + q]};
#pragma unroll
    for (int i = 0; i < 4; i++) base[2 + i] = p.base[8 + 4 * q + i];
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    square += __shfl_xor_sync(~0u, square, 16);
    pre += __shfl_xor_sync(~0u, pre, 16), post += __shfl_xor_sync(~0u, post, 16);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] += __shfl_xor_sync(~0u, a[i], 16);
    float unit = inverse_root(square * (0.25f / HIDDEN) + p.norm_eps);
    pre = sigmoid(pre * unit * s + base[0]) + p.hyper_eps;
    post = 2.0f * sigmoid(post * unit * t + base[1]);
    bool inside = lane < 16 && first + lane / 4 < p.rows;
    if (inside) p.mixed[row * 4ull + q] = pre, p.post_weights[row * 4ull + q] = post;
    #pragma unroll
    for (int i = 0; i < 4; i++) a[i] = a[i] * unit * c + base[2 + i];
    float most = larger(larger(a[0], a[1]), larger(a[2], a[3]));
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = power((a[i] - most) * 1.44269504f);
    share(a, 0.0f);
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] += p.hyper_eps;
    share_down(a, p.hyper_eps);
#pragma unroll 1
    for (int i = 1; i < ITERATIONS; i++) share(a, p.hyper_eps), share_down(a, p.hyper_eps);
    if (inside) *(float4 *)(p.comb + row * 16ull + q * 4) = make_float4(a[0], a[1], a[2], a[3]);
}

// What the collapse of a row wants of them: each lane all four of `mixed`. Lanes 4 g + q sum every eighth part from g on.
__device__ __forceinline__ float4 weights_of(const Parameters &p, int row, int lane, const float (&z)[SUMS], float square) {
    float pre = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) pre += z[i];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) pre += __shfl_xor_sync(~0u, pre, step);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) square += __shfl_xor_sync(~0u, square, step);
    float unit = inverse_root(square * (0.25f / HIDDEN) + p.norm_eps);
    pre = sigmoid(pre * unit * p.scale[0] + p.base[lane % 4]) + p.hyper_eps;
    return make_float4(__shfl_sync(~0u, pre, 0), __shfl_sync(~0u, pre, 1), __shfl_sync(~0u, pre, 2),
                       __shfl_sync(~0u, pre, 3));
}

__device__ __forceinline__ float collapsed_of(float4 w, float a, float b, float c, float d) {
    return w.x * a + w.y * b + (w.z * c + w.w * d);
}

extern "C" __global__ void __launch_bounds__(BLOCK) mhc_pre(const __grid_constant__ Parameters p) {
    int thread = threadIdx.x, lane = thread % 32;
    int team = blockIdx.x / (TEAM + 1), place = (int)(blockIdx.x % (TEAM + 1)) - 1;
    if (place < 0) {
        int first = team * TEAM + thread / 32 * BATCH;
        if (first < p.rows) coefficients(p, first, lane);
        return;
    }
    int row = team * TEAM + place;
    if (row >= p.rows) return;
#if GIVEN
    float4 w = ((const float4 *)p.given)[row];
#else
    float z[SUMS], square = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        int part = i * 8 + lane / 4;
        z[i] = part < PARTS ? p.z[(part * (u64)p.rows + row) * 24 + lane % 4] : 0.0f;
    }
#pragma unroll
    for (int part = 0; part < PARTS; part += 32)
        square += part + lane < PARTS ? p.squares[(part + lane) * (u64)p.rows + row] : 0.0f;
#endif
    const uint4 *from = (const uint4 *)(p.x + (u64)row * (4 * HIDDEN));
    uint4 x[TURNS][4];
#pragma unroll
    for (int k = 0; k < TURNS; k++)
#pragma unroll
        for (int j = 0; j < 4; j++) x[k][j] = from[j * UNITS + min(k * BLOCK + thread, UNITS - 1)];
#if !GIVEN
    float4 w = weights_of(p, row, lane, z, square);
#endif
    uint4 *out = (uint4 *)(p.collapsed + (u64)row * HIDDEN);
    float y[NORMED ? TURNS : 1][8];
#if NORMED
    float sum = 0;
#endif
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
        float *found = y[NORMED ? k : 0];
        const u32 *a = &x[k][0].x, *b = &x[k][1].x, *c = &x[k][2].x, *d = &x[k][3].x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            found[2 * j] = collapsed_of(w, low_half(a[j]), low_half(b[j]), low_half(c[j]), low_half(d[j]));
            found[2 * j + 1] = collapsed_of(w, high_half(a[j]), high_half(b[j]), high_half(c[j]), high_half(d[j]));
        }
#if NORMED
        if (k * BLOCK + thread < UNITS)
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fmaf(found[j], found[j], sum);
#else
        if (k * BLOCK + thread < UNITS) out[k * BLOCK + thread] = packed(found);
#endif
    }
#if NORMED
    SHARED_MEMORY(memory);
    float *sums = (float *)memory;
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) sums[thread / 32] = sum;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int j = 0; j < WARPS; j++) total += sums[j];
    float unit_rms = inverse_root(total * (1.0f / HIDDEN) + p.norm_eps);
#pragma unroll
    for (int k = 0; k < TURNS; k++) {
        int unit = min(k * BLOCK + thread, UNITS - 1);
        float4 low = ((const float4 *)p.norm)[unit * 2], high = ((const float4 *)p.norm)[unit * 2 + 1];
        float norm[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; j++) y[k][j] *= unit_rms * norm[j];
        if (k * BLOCK + thread < UNITS) out[k * BLOCK + thread] = packed(y[k]);
    }
#endif
}
