// What gemm_large.cu takes from its headers beyond gemm_emulated.cuh, as plain C++: copies to all blocks of a cluster,
// arrivals at others' barriers, copies by single threads and out of shared memory.

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

static u32 swizzled(int row, int unit) { return emulated::swizzled(row * 128 + unit * 16); }
static void store_rows(u32 to, u32 a, u32 b, u32 c, u32 d) {
    u32 words[4] = {a, b, c, d}, lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        u32 row = __shfl_sync(~0u, to, i * 8 + lane / 4);
        emulated::value<u32>(row + lane % 4 * 4) = words[i];
    }
}
static void copy_box_out(const TensorMap *map, int x, int y, int z, u32 from) {
    const u64 *w = map->words;
    u64 width = w[1] < x * 2 + w[6] ? w[1] - x * 2 : w[6];  // in bytes, within the tensor
    for (u64 row = 0; row < w[7] && y + row < w[2]; row++)
        for (u64 column = 0; x * 2 < w[1] && column < width; column++)
            *((u8 *)w[0] + z * w[5] + (y + row) * w[4] + x * 2 + column) =
                *emulated::at(emulated::swizzled(from + row * w[6] + column));
}
static void await_copies_out() {}
