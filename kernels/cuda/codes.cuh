// Eight numbers of a thread as E4M3 codes, with the scale of the group that its neighbours hold the rest of. Includes
// scales.cuh.

#pragma once
#include "scales.cuh"

struct Coded {
    uint2 codes;
    u32 scale;  // the bits of a float, or an exponent
};

// Of 8 numbers a thread, GROUP columns that GROUP / 8 neighbouring lanes hold; all lanes of a warp call it together.
template <int GROUP_COLUMNS, bool OF_POWERS> __device__ __forceinline__ Coded code(const float *y) {
    float largest = FLOOR;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = larger(largest, fabsf(y[i]));
#pragma unroll
    for (int step = 1; step < GROUP_COLUMNS / 8; step *= 2)
        largest = larger(largest, __shfl_xor_sync(~0u, largest, step));
    Coded found;
    float factor;
    if (OF_POWERS) {
        found.scale = power_of_scale(largest), factor = inverse_power(found.scale);
    } else {
        found.scale = __float_as_uint(share_of_448(largest)), factor = shares_in_448(largest);
    }
    found.codes = make_uint2(e4m3(y[0] * factor, y[1] * factor, y[2] * factor, y[3] * factor),
                             e4m3(y[4] * factor, y[5] * factor, y[6] * factor, y[7] * factor));
    return found;
}

template <bool OF_POWERS> __device__ __forceinline__ void put_scale(void *scales, u64 place, u32 scale) {
    if (OF_POWERS) ((u8 *)scales)[place] = scale;
    else ((float *)scales)[place] = __uint_as_float(scale);
}
