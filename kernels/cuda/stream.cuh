// Instructions of single numbers, and accesses that leave the caches early. Knows no kernel.

#pragma once
#include "hopper.cuh"

#define SHARED_MEMORY(name) extern __shared__ __align__(128) uint4 name[]

// Makes barriers that one thread has initialized known to the copy engine.
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// 16 bytes that nobody reads again, and 8 that nobody reads soon: they leave the L2 before what lies there longer.
__device__ __forceinline__ uint4 read_once(const void *from) {
    u64 policy;
    uint4 x;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from), "l"(policy));
    return x;
}
__device__ __forceinline__ void write_once(void *to, uint2 x) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}

// Boxes of a tensor, as `copy_box` has them, to shared memory and from there: what nobody reads again, or soon.
__device__ __forceinline__ u64 leaves_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void read_box_once(u32 to, const TensorMap *map, int x, int y, int z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier),
                 "l"(leaves_first()) : "memory");
}
__device__ __forceinline__ void write_box_once(const TensorMap *map, int x, int y, int z, u32 from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;" ::
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(from), "l"(leaves_first()) : "memory");
}

// Boxes that a thread writes are groups; later, it may wait until all have been read, or are written.
__device__ __forceinline__ void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void await_boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void await_boxes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The larger and the smaller of two; NaN where one is.
__device__ __forceinline__ float larger(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ float smaller(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Four E4M3 codes, the first in the lowest byte; what is beyond 448 becomes 448.
__device__ __forceinline__ u32 e4m3(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | (u32)high << 16;
}
