// What gemm_large.cu takes from its headers beyond gemm_emulated.cuh, as plain C++: copies to both blocks of a cluster,
// arrivals at the other's barriers, copies by single threads.

static void copy_box(u32 to, const TensorMap *map, int x, int y, int z, u32 barrier) {
    copy_box(to, map, x, y, z, barrier, READ_AGAIN);
}
static void copy_box_to(u32 mask, u32 to, const TensorMap *map, int x, int y, int z, u32 barrier) {
    for (u32 rank = 0; rank < CLUSTER_BLOCKS; rank++)
        if (mask >> rank & 1)
            copy_box(address_in(to, rank), map, x, y, z, address_in(barrier, rank), READ_AGAIN);
}
static void barrier_arrive_in(u32 barrier, u32 rank) { barrier_arrive(address_in(barrier, rank)); }

static void copy16(u32 to, const void *from) { memcpy(emulated::at(to), from, 16); }
static void copy4(u32 to, const void *from) { memcpy(emulated::at(to), from, 4); }
static void arrive_when_copied(u32 barrier) { barrier_arrive(barrier); }
static float read_float(u32 address) { return __uint_as_float(read_word(address)); }
