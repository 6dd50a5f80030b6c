// Numbers of bf16 pairs, and scales of E4M3 codes without a division (reference/cast.py). Includes stream.cuh.

#pragma once
#include "stream.cuh"

#define FLOOR 1e-4f  // what the largest of a group counts as at least

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Eight numbers as bf16.
__device__ __forceinline__ uint4 packed(const float *y) {
    return make_uint4(pair(y[0], y[1]), pair(y[2], y[3]), pair(y[4], y[5]), pair(y[6], y[7]));
}

// v / 448 and 448 / v to nearest for 1e-4 <= v < 2^128, without the branches of a division: a product with the inverse
// and what that leaves. Not finite for what is not.
__device__ __forceinline__ float share_of_448(float v) {
    const float unit = 1.0f / 448.0f;
    float q = v * unit;
    return fmaf(fmaf(-q, 448.0f, v), unit, q);
}
__device__ __forceinline__ float shares_in_448(float v) {
    float down = v > 0x1p64f ? 0x1p-64f : 1.0f;  // an inverse must not be denormal
    v *= down;
    float y = inverse(v);
    y = fmaf(y, fmaf(-v, y, 1.0f), y);
    float q = 448.0f * y;
    return fmaf(fmaf(-v, q, 448.0f), y, q) * down;
}

// 2^(byte - 127) is the least power of two that is at least largest / 448: no division, as 448 is 7 times a power.
__device__ __forceinline__ u32 power_of_scale(float largest) {
    u32 bits = __float_as_uint(largest);
    return bits < 0x7f800000u ? (bits + 0x1fffffu >> 23) - 8 : 255;
}
__device__ __forceinline__ float inverse_power(u32 byte) { return __uint_as_float(254 - byte << 23); }
