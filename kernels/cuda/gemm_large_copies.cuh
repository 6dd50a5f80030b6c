// Copies to both blocks of a cluster and by single threads, and barriers of a cluster. Knows no kernel.

// `copy_box` to the same place in the shared memory of all blocks of the cluster in `mask`; a barrier in each counts.
__device__ __forceinline__ void copy_box_to(u32 mask, u32 to, const TensorMap *map, int x, int y, int z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier),
        "h"((u16)mask) : "memory");
}

// An arrival at a barrier of another block of the cluster. Without a scope: one of the cluster would be a fence.
__device__ __forceinline__ void barrier_arrive_in(u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier), "r"(rank) : "memory");
}

// Copies that run on when their thread does; `arrive_when_copied` is an arrival behind all that the thread began.
__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ float read_float(u32 address) { return __uint_as_float(read_word(address)); }
