// Records of 656 bytes: 512 E4M3 codes, their scales (fp32, one for 128 channels), 64 rotated channels in bf16. Knows
// not how they lie in shared memory.

constexpr int RECORD = 656, GROUPS = 4;
constexpr float LOWEST = -1e30f;  // a logarithm below all others
constexpr u32 shared = 1024;      // where dynamic shared memory starts: operands of products are constants

struct Parameters : Paged {
    const u8 *pages;
    u64 page_bytes;
    TensorMap records;  // pairs of bytes [pages, page_tokens, RECORD / 2], read in boxes of `box` tokens and 64 pairs
};

__device__ __forceinline__ float2 read_floats(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
// Four E4M3 codes, the first lowest.
__device__ __forceinline__ u32 codes(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (u32)high << 16 | low;
}
