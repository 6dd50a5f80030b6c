// Copies to all blocks of a cluster, by single threads and out of shared memory, and barriers of a cluster. Knows no
// kernel.

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

// The box of a tensor out of shared memory, where it lies with the 128-byte swizzle; what lies beyond the tensor's ends
// is dropped. Threads that wrote it show it first. `await_copies_out`: memory that this thread's copies read is free.
__device__ __forceinline__ void copy_box_out(const TensorMap *map, int x, int y, int z, u32 from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n"
                 "cp.async.bulk.commit_group;" ::"l"(map), "r"(x), "r"(y), "r"(z), "r"(from) : "memory");
}
__device__ __forceinline__ void await_copies_out() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Four squares of 8 x 8 bf16, two columns of a row in a word: lane 8 i + j has the address of row j of square i.
__device__ __forceinline__ void store_rows(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d) : "memory");
}

__device__ __forceinline__ float read_float(u32 address) { return __uint_as_float(read_word(address)); }
