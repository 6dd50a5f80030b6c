// Which tile of the output a block of threads takes next, and which of its tokens count. Knows no product.

// `expert` is the group of the weights, `group` that of activations and output.
struct Tile { int group, expert, token, row, count; };

__device__ __forceinline__ int rank_of_block() { return SHARE > 1 ? blockIdx.x % SHARE : 0; }

// Clusters take units of SHARE tiles, side by side along rows. Where tokens of a tile of two passes may have two
// experts, all tiles are taken for the first one, then those that have two for the second.
struct Walk {
    // Tiles of tokens that pass all weights while those are in the L2.
    static constexpr int TOGETHER = 8;
    int group = 0, before = 0, next = blockIdx.x / SHARE;

    __device__ __forceinline__ bool take(const Parameters &p, Tile &tile) {
        int row_units = parts(p.rows, SHARE * ROWS);
        while (group < p.groups) {
            tile.count = p.counts ? min(max(__ldg(p.counts + group), 0), p.capacity) : p.capacity;
            int token_tiles = parts(tile.count, TOKENS), all = token_tiles * row_units, at = next - before;
            int times = PASSES > 1 && p.experts ? 2 : 1;
            if (at >= all * times) {
                before += all * times, group++;
                continue;
            }
            next += gridDim.x / SHARE;
            place(tile, at % all, token_tiles, row_units);
            if (find_expert(p, tile, at >= all)) return true;
        }
        return false;
    }

    __device__ __forceinline__ void place(Tile &tile, int at, int token_tiles, int row_units) {
        int first = at / (TOGETHER * row_units) * TOGETHER, width = min(TOGETHER, token_tiles - first);
        at -= first * row_units;
        int row = at / width, token = first + at - row * width;
        tile.group = group;
        tile.token = token * TOKENS;
        tile.row = (row * SHARE + rank_of_block()) * ROWS;
    }

    // False where no token has an expert, the same in all blocks of a cluster. `second`: whose second one it is.
    __device__ __forceinline__ bool find_expert(const Parameters &p, Tile &tile, bool second) {
        tile.expert = tile.group;
        if (!p.experts) return true;
        tile.expert = expert_at(p, tile.token);
        if (PASSES > 1) {
            int other = expert_at(p, tile.token + 128);
            if (second) return tile.expert >= 0 && other != tile.expert && (tile.expert = other) >= 0;
            if (tile.expert < 0) tile.expert = other;
        }
        return tile.expert >= 0;
    }

    __device__ __forceinline__ int expert_at(const Parameters &p, int token) {
        return token < p.capacity ? __ldg(p.experts + token) : -1;
    }
};

// Bits of 32 tokens of a tile from `first` on: those that count. For a whole warp.
__device__ __forceinline__ u32 counting(const Parameters &p, const Tile &tile, int first) {
    int token = tile.token + first + threadIdx.x % 32;
    return __ballot_sync(~0u, token < tile.count && (!p.experts || __ldg(p.experts + token) == tile.expert));
}
