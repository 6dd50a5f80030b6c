// Sums over spans of keys, each divided by its own, become those of all keys. For blocks of 128 threads, one a row.

struct Sums {
    float most, total;  // logarithm (base 2) of the largest part, and all parts over it
    float4 values;      // of channels 4 * threadIdx.x and the three behind, to be divided by `total`

    // A row of 512 channels and its lse; `weight`: what values are divided by.
    __device__ __forceinline__ void write(u16 *output, float *lse, float weight) const {
        float inverse = total != 0 ? 1.0f / weight : 0.0f;
        u32 low = pair(values.x * inverse, values.y * inverse), high = pair(values.z * inverse, values.w * inverse);
        *(uint2 *)(output + threadIdx.x * 4) = make_uint2(low, high);
        if (threadIdx.x == 0)
            *lse = total != 0 ? (most + __log2f(total)) * 0.69314718f : __int_as_float(0x7f800000);
    }
};

// Parts lie `step` rows apart from row `first`; partial bf16 [rows, 512], partial_lse [rows] in base 2 (minus infinity:
// none). bf16 halves their way through memory and adds less than the rounding of outputs: there are several of them.
__device__ __forceinline__ Sums sum_spans(const u16 *partial, const float *partial_lse, int count, u64 step,
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
        const uint2 *from = (const uint2 *)(partial + (start * step + first) * 512) + threadIdx.x;
#pragma unroll 8
        for (int i = 0; i < taken; i++) {
            uint2 part = from[i * step * 128];
            float factor = factors[i];
            sums.total += factor;
            sums.values.x += factor * __uint_as_float(part.x << 16);
            sums.values.y += factor * __uint_as_float(part.x & 0xffff0000);
            sums.values.z += factor * __uint_as_float(part.y << 16);
            sums.values.w += factor * __uint_as_float(part.y & 0xffff0000);
        }
    }
    return sums;
}
