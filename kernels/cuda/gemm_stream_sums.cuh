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

// Two warpgroups with the same rows and tokens: each keeps every other octet and gives the rest to the other one.
__device__ __forceinline__ void add_groups(u32 shared, u32 thread, int depth_group, const float (&sums)[TOKENS / 2],
                                           float (&kept)[KEPT_OCTETS * 4]) {
    u32 left = shared + PARTIALS + thread;
#pragma unroll
    for (int i = 0; i < KEPT_OCTETS; i++) {
        float given[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float even = sums[8 * i + j], odd = OCTETS > 1 ? sums[(8 * i + 4 + j) % (TOKENS / 2)] : even;
            kept[4 * i + j] = depth_group ? odd : even, given[j] = depth_group ? even : odd;
        }
        store_sums(left + (depth_group * KEPT_OCTETS + i) * SLOT, given);
    }
    meet<1, CONSUMERS>();
#pragma unroll
    for (int i = 0; i < KEPT_OCTETS; i++) {
        float part[4];
        read_sums(left + ((1 - depth_group) * KEPT_OCTETS + i) * SLOT, part);
#pragma unroll
        for (int j = 0; j < 4; j++) kept[4 * i + j] += part[j];
    }
}

// Blocks of a cluster: each adds and writes every SPLIT-th of the octets that its warpgroups kept, in the blocks' order.
__device__ __forceinline__ void add_blocks(const Parameters &p, const Tile &tile, u32 shared, u32 thread, int row_group,
                                           int depth_group, const float (&kept)[KEPT_OCTETS * 4]) {
    int rank = blockIdx.x % SPLIT;
    u32 sent = shared + SENT + depth_group * SHARES * SPLIT * SLOT + thread, from = rank * SLOT;
#pragma unroll
    for (int to = 0; to < SPLIT; to++) {
        u32 there = address_in(sent, to), barrier = address_in(shared + SUMS, to);
#pragma unroll
        for (int i = to; i < KEPT_OCTETS; i += SPLIT)
            if ((i * DEPTH_GROUPS + depth_group) * 8 < tile.tokens)
                send_sums(there + i / SPLIT * SPLIT * SLOT + from, kept + 4 * i, barrier);
    }
    int octets = (tile.tokens + 7) / 8, mine = 0;
#pragma unroll
    for (int i = 0; i < SHARES; i++)
        mine += min(max(octets - (i * SPLIT + rank) * DEPTH_GROUPS, 0), DEPTH_GROUPS);
    if (!mine) return;
    if (threadIdx.x == 0) barrier_expect(shared + SUMS, mine * SPLIT * SLOT);
    barrier_wait(shared + SUMS, 0);
#pragma unroll 1
    for (int i = 0; (i * SPLIT + rank) * DEPTH_GROUPS + depth_group < octets; i++) {
        float total[4];
        read_sums(sent + i * SPLIT * SLOT, total);
#pragma unroll
        for (int slot = 1; slot < SPLIT; slot++) {
            float part[4];
            read_sums(sent + (i * SPLIT + slot) * SLOT, part);
#pragma unroll
            for (int j = 0; j < 4; j++) total[j] += part[j];
        }
        write_octet(p, tile, row_group, (i * SPLIT + rank) * DEPTH_GROUPS + depth_group, total);
    }
}

// Adds partial sums in a fixed order and writes them.
__device__ __forceinline__ void finish(const Parameters &p, const Tile &tile, u32 shared, int row_group,
                                       int depth_group, const float (&sums)[TOKENS / 2]) {
    u32 thread = (row_group * 128 + threadIdx.x % 128) * 16;
    float kept[KEPT_OCTETS * 4];
    if (DEPTH_GROUPS > 1) {
        add_groups(shared, thread, depth_group, sums, kept);
    } else {
#pragma unroll
        for (int i = 0; i < KEPT_OCTETS * 4; i++) kept[i] = sums[i];
    }
    if (SPLIT > 1) {
        add_blocks(p, tile, shared, thread, row_group, depth_group, kept);
    } else {
#pragma unroll
        for (int i = 0; i < KEPT_OCTETS; i++)
            if ((i * DEPTH_GROUPS + depth_group) * 8 < tile.tokens)
                write_octet(p, tile, row_group, i * DEPTH_GROUPS + depth_group, kept + 4 * i);
    }
}
