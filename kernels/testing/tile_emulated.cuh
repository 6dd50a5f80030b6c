// What tile kernels take from stream.cuh and mhc_products.cuh, as plain C++ for `emulated.cuh`.

#include "gemm_emulated.cuh"

static void copy_box(u32 to, const TensorMap *map, int x, int y, int z, u32 barrier) {
    copy_box(to, map, x * 2, y, z, barrier, 0);  // a map of bytes, of 2 a number
}

static void copy_box_once(u32 to, const TensorMap *map, int x, int y, int z, u32 barrier) {
    copy_box(to, map, x, y, z, barrier);
}
static float read_float(u32 address) { return emulated::value<float>(address); }
static uint4 read_once(const void *from) { return *(const uint4 *)from; }

template <typename T> static void write_once(void *to, T x) { *(T *)to = x; }

static float larger(float a, float b) { return a != a || b != b ? NAN : max(a, b); }
static float smaller(float a, float b) { return a != a || b != b ? NAN : min(a, b); }
static float inverse(float x) { return 1.0f / x; }
static float inverse_root(float x) { return 1.0f / sqrtf(x); }
static float power(float x) { return exp2f(x); }

static u32 e4m3(float x) {
    if (x != x) return 0x7f;
    float size = min(fabsf(x), 448.0f);
    int exponent = max((int)(__float_as_uint(size) >> 23) - 127, -6);
    u32 count = (u32)nearbyintf(ldexpf(size, 3 - exponent));  // of eighths; 16 of them are the next exponent's 8
    return (signbit(x) ? 128 : 0) | (count < 8 ? count : (exponent + 7) * 8 + count - 8);
}
static u32 e4m3(float a, float b, float c, float d) { return e4m3(a) | e4m3(b) << 8 | e4m3(c) << 16 | e4m3(d) << 24; }

static float bf16_at(u32 address) {
    return __uint_as_float((u32)emulated::value<u16>(emulated::swizzled(address)) << 16);
}
static u32 swizzled(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }
static void multiply(float (&d)[24], u64 x, u64 weight, int accumulate) {  // operands are addresses here, 16 a step
    u32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    for (u32 i = 0; i < 24; i++) {
        float sum = accumulate ? d[i] : 0;
        u32 at = row + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (u32 k = 0; k < 16; k++) sum += bf16_at(x + at * 128 + 2 * k) * bf16_at(weight + column * 128 + 2 * k);
        d[i] = sum;
    }
}
