// Which tile of the output a block of threads takes next, and which of its tokens count. Knows no product.

// `expert` is the group of the weights, `group` that of activations and output. `halves`: a bit for each 128 tokens
// that are taken.
struct Tile { int group, expert, token, row, count; u32 halves; };

__device__ __forceinline__ int rank_of_block() { return SHARE > 1 ? blockIdx.x % SHARE : 0; }

__device__ __forceinline__ int count_of(const Parameters &p, int group) {
    return p.counts ? min(max(__ldg(p.counts + group), 0), p.capacity) : p.capacity;
}

// Clusters take units of SHARE tiles, side by side along rows, in turns. A tile of two passes whose halves have two
// experts is taken for one, then for the other. Units of a last turn that leaves half of the clusters idle are taken by
// halves.
struct Walk {
    // Tiles of tokens that pass all weights while those are in the L2.
    static constexpr int TOGETHER = 8;
    int row_units, whole, group = 0, before = 0, next = blockIdx.x / SHARE;  // `whole`: units before those by halves
    u32 left = 0;  // halves of the tile at `next` that another expert's were taken of

    __device__ __forceinline__ explicit Walk(const Parameters &p)
        : row_units(parts(p.rows, SHARE * ROWS)), whole(1 << 30) {
        if (PASSES == 1) return;
        int units = 0, clusters = gridDim.x / SHARE;
        for (int i = threadIdx.x % 32; i < p.groups; i += 32) units += parts(count_of(p, i), TOKENS) * row_units;
#pragma unroll
        for (int step = 16; step; step /= 2) units += __shfl_xor_sync(~0u, units, step);
        int rest = units % clusters;
        if (2 * rest <= clusters) whole = units - rest;
    }

    __device__ __forceinline__ bool take(const Parameters &p, Tile &tile) {
        while (group < p.groups) {
            bool by_halves = next >= whole;
            int unit = by_halves ? whole + (next - whole) / 2 : next, at = unit - before;
            tile.count = count_of(p, group);
            int token_tiles = parts(tile.count, TOKENS), all = token_tiles * row_units;
            if (at >= all) {
                before += all, group++;
                continue;
            }
            place(tile, at, token_tiles);
            left = find_expert(p, tile, left ? left : by_halves ? 1 << (next - whole) % 2 : 3);
            if (!left) next += gridDim.x / SHARE;
            if (tile.halves) return true;
        }
        return false;
    }

    __device__ __forceinline__ void place(Tile &tile, int at, int token_tiles) {
        int first = at / (TOGETHER * row_units) * TOGETHER, width = min(TOGETHER, token_tiles - first);
        at -= first * row_units;
        int row = at / width, token = first + at - row * width;
        tile.group = group;
        tile.token = token * TOKENS;
        tile.row = (row * SHARE + rank_of_block()) * ROWS;
    }

    // Of the `wanted` halves those of one expert, the same in all blocks of a cluster; returns the others that count.
    __device__ __forceinline__ u32 find_expert(const Parameters &p, Tile &tile, u32 wanted) {
        int first = expert_at(p, tile, tile.token), second = PASSES > 1 ? expert_at(p, tile, tile.token + 128) : -1;
        if (!(wanted & 1)) first = -1;
        if (!(wanted & 2)) second = -1;
        tile.expert = first >= 0 ? first : second;
        tile.halves = (first >= 0) | (second >= 0 && second == tile.expert) << 1;
        return second >= 0 && second != tile.expert ? 2 : 0;
    }

    __device__ __forceinline__ int expert_at(const Parameters &p, const Tile &tile, int token) {
        return token >= tile.count ? -1 : p.experts ? __ldg(p.experts + token) : tile.group;
    }
};

// Bits of 32 tokens of a tile from `first` on: those that count. For a whole warp.
__device__ __forceinline__ u32 counting(const Parameters &p, const Tile &tile, int first) {
    int token = tile.token + first + threadIdx.x % 32;
    bool taken = tile.halves >> first / 128 & 1;
    return __ballot_sync(~0u, taken && token < tile.count && (!p.experts || __ldg(p.experts + token) == tile.expert));
}
