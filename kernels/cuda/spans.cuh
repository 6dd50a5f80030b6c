// Sums over spans of keys, each divided by its own, become those of all keys. For blocks of 128 threads, one a row.

struct Sums {
    float most, total;  // logarithm (base 2) of the largest part, and all parts over it
    float4 values;      // of channels 4 * threadIdx.x and the three behind, to be divided by `total`
};

// Parts lie `step` rows apart from row `first`; partial [rows, 512], partial_lse [rows] in base 2 (minus infinity: none).
__device__ __forceinline__ Sums sum_spans(const float *partial, const float *partial_lse, int count, u64 step,
                                          u64 first) {
    __shared__ float factors[128];
    const float infinity = __int_as_float(0x7f800000);
    Sums sums = {-infinity, 0, make_float4(0, 0, 0, 0)};
    for (int i = threadIdx.x % 32; i < count; i += 32) sums.most = fmaxf(sums.most, partial_lse[i * step + first]);
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) sums.most = fmaxf(sums.most, __shfl_xor_sync(~0u, sums.most, lane));
    if (sums.most == -infinity) sums.most = 0;
    for (int start = 0; start < count; start += 128) {
        int taken = min(count - start, 128);
        __syncthreads();
        if (threadIdx.x < taken)
            factors[threadIdx.x] = power(partial_lse[(start + threadIdx.x) * step + first] - sums.most);
        __syncthreads();
        const float4 *from = (const float4 *)(partial + (start * step + first) * 512) + threadIdx.x;
#pragma unroll 8
        for (int i = 0; i < taken; i++) {
            float4 part = from[i * step * 128];
            float factor = factors[i];
            sums.total += factor;
            sums.values.x += factor * part.x, sums.values.y += factor * part.y;
            sums.values.z += factor * part.z, sums.values.w += factor * part.w;
        }
    }
    return sums;
}
