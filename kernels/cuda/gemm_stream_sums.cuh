// Sums on their way out: partial ones are added in a fixed order, within a block of threads and over the cluster, whole
// ones are written as bf16.

__device__ __forceinline__ bool is_written(const Parameters &p, const Tile &tile, int token) {
    return DENSE || !p.experts || __ldg(p.experts + tile.token + token) >= 0;
}
__device__ __forceinline__ u16 *output_of(const Parameters &p, const Tile &tile, int token, int row) {
    return p.output + ((u64)tile.group * p.capacity + tile.token + token) * p.rows + row;
}

// Whole sums of a warp to memory as bf16, by way of shared memory of its own: sixteen rows, CHUNK tokens at a time.
__device__ __forceinline__ void write_whole(const Parameters &p, const Tile &tile, u32 shared, int row_group,
                                            const float (&sums)[TOKENS / 2]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 staging = shared + PARTIALS + warp * CHUNK * 32;
    // Each lane has the address of eight rows of one token in four squares of 8 x 8: bank conflicts are swizzled away.
    u32 to = staging + (lane / 16 * 8 + lane % 8) * 32 + ((lane / 8 ^ lane / 4) % 2 << 4);
#pragma unroll
    for (int first = 0; first < TOKENS; first += CHUNK) {
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i += 8) {
            const float *square = sums + first / 2 + i;
            store_squares(to + i * 64, pair(square[0], square[1]), pair(square[2], square[3]),
                          pair(square[4], square[5]), pair(square[6], square[7]));
        }
        __syncwarp();
        int row = tile.row + row_group * 64 + warp % 4 * 16 + lane % 2 * 8;
#pragma unroll
        for (int i = 0; i < CHUNK; i += 16) {
            int at_token = i + lane / 2, token = first + at_token;
            u32 found[4];
            read16(staging + at_token * 32 + ((lane ^ at_token / 4) % 2 << 4), found);
            if (token < tile.tokens && row < p.rows && is_written(p, tile, token))
                write16(output_of(p, tile, token, row), found[0], found[1], found[2], found[3]);
        }
        __syncwarp();
    }
}

// Four sums of one octet of tokens, which a thread has of two rows.
__device__ __forceinline__ void read_sums(u32 from, float (&to)[4]) {
    u32 found[4];
    read16(from, found);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = __uint_as_float(found[i]);
}

// bf16 of an octet whose sums are complete.
__device__ __forceinline__ void write_octet(const Parameters &p, const Tile &tile, int row_group, int octet,
                                            const float *sums) {
    int lane = threadIdx.x % 32, token = octet * 8 + lane / 4;
    int row = tile.row + row_group * 64 + threadIdx.x % 128 / 32 * 16 + lane % 4 * 2;
    u32 low = transpose(pair(sums[0], sums[1])), high = transpose(pair(sums[2], sums[3]));
    if (token >= tile.tokens || !is_written(p, tile, token)) return;
    if (row < p.rows) *(u32 *)output_of(p, tile, token, row) = low;
    if (row + 8 < p.rows) *(u32 *)output_of(p, tile, token, row + 8) = high;
}

__device__ __forceinline__ void store_sums(u32 to, const float *x) {
    store16(to, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
}

// Adds what lies in slots that are `apart`, in their order.
template <int SLOTS> __device__ __forceinline__ void add_slots(u32 from, int apart, float (&total)[4]) {
    read_sums(from, total);
#pragma unroll
    for (int slot = 1; slot < SLOTS; slot++) {
        float part[4];
        read_sums(from + slot * apart, part);
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] += part[i];
    }
}

// Adds what the cluster's blocks have in the order of their ranks: this one's own, and what the others sent.
__device__ __forceinline__ void add_ranks(u32 sent, u32 own, int rank, float (&total)[4]) {
    read_sums(rank ? sent : own, total);
#pragma unroll
    for (int other = 1; other < SPLIT; other++) {
        float part[4];
        read_sums(rank == other ? own : sent + (other - (other > rank)) * SLOT, part);
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] += part[i];
    }
}

// What the cluster's other blocks send to this one comes to `sent`; its own sums are in `left`.
__device__ __forceinline__ void add_blocks(const Parameters &p, const Tile &tile, u32 shared, u32 sent, u32 left,
                                           int row_group, int depth_group, int octets) {
    int rank = blockIdx.x % SPLIT, mine = 0;
#pragma unroll
    for (int i = 0; i < SHARES; i++) mine += min(max(octets - (i * SPLIT + rank) * DEPTH_GROUPS, 0), DEPTH_GROUPS);
    if (!mine) return;
    if (threadIdx.x == 0) barrier_expect(shared + SUMS, mine * (SPLIT - 1) * SLOT);
    barrier_wait(shared + SUMS, 0);
#pragma unroll 1
    for (int octet = rank * DEPTH_GROUPS + depth_group; octet < octets; octet += SPLIT * DEPTH_GROUPS) {
        float total[4];
        add_ranks(sent, left + octet * SLOT, rank, total);
        write_octet(p, tile, row_group, octet, total);
        sent += (SPLIT - 1) * SLOT;
    }
}

// Adds partial sums in a fixed order and writes them: of an octet those of the block's warpgroups first, then those of
// the cluster's blocks. Warpgroups and blocks take octets in turns.
__device__ __forceinline__ void finish(const Parameters &p, const Tile &tile, u32 shared, int row_group,
                                       int depth_group, const float (&sums)[TOKENS / 2]) {
    u32 thread = (row_group * 128 + threadIdx.x % 128) * 16, left = shared + PARTIALS + thread;
    u32 sent = shared + SENT + depth_group * SHARES * (SPLIT - 1) * SLOT + thread, slot = sent;
    int octets = (tile.tokens + 7) / 8, rank = blockIdx.x % SPLIT;
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
        store_sums(left + (depth_group * OCTETS + octet) * SLOT, sums + 4 * octet);
    if (DEPTH_GROUPS > 1) meet<1, CONSUMERS>();
    int to = 0;
#pragma unroll 1
    for (int octet = depth_group; octet < octets; octet += DEPTH_GROUPS) {
        float total[4];
        add_slots<DEPTH_GROUPS>(left + octet * SLOT, OCTETS * SLOT, total);
        if (SPLIT == 1) {
            write_octet(p, tile, row_group, octet, total);
        } else {
            if (to == rank) store_sums(left + octet * SLOT, total);  // read by this thread alone
            else send_sums(address_in(slot + (rank - (rank > to)) * SLOT, to), total, address_in(shared + SUMS, to));
            if (++to == SPLIT) to = 0, slot += (SPLIT - 1) * SLOT;
        }
    }
    if (SPLIT > 1) add_blocks(p, tile, shared, sent, left, row_group, depth_group, octets);
}
