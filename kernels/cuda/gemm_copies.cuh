// Bulk copies into shared memory that complete on a barrier, blocks of a cluster, and single accesses. Knows no kernel.

// L2 policies: what is read once makes room first, what is read again stays.
constexpr u64 READ_ONCE = 0x12f0000000000000, READ_AGAIN = 0x14f0000000000000;

// `copy_box` with a policy.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap *map, int x, int y, int z, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
        : "memory");
}

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void copy_bytes(u32 to, const void *from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void prefetch_map(const void *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// All threads of all blocks of the cluster. Barriers that were shown before are seen behind it, other stores are not.
__device__ __forceinline__ void arrive_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Where `address` of this block's shared memory lies in the block `rank` of the cluster.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// To shared memory of a block of the cluster, whose barrier counts the bytes. Both addresses are of that block.
__device__ __forceinline__ void send_sums(u32 to, const float *x, u32 barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::
                     "r"(to), "r"(__float_as_uint(x[0])), "r"(__float_as_uint(x[1])), "r"(__float_as_uint(x[2])),
                 "r"(__float_as_uint(x[3])), "r"(barrier) : "memory");
}

// A square of 8 x 8 numbers of 16 bits, of whose rows four lanes have a pair each: the square's columns.
__device__ __forceinline__ u32 transpose(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ float2 read_pair(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ u32 read_word(u32 address) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
// Squares of 8 x 8 bf16, transposed, two rows of a column in a word: lane 8 i + j has the address of row j of square i.
__device__ __forceinline__ void store_squares(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void write16(void *to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
