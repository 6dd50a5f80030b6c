// Which tile of the output a block of threads takes next, and which of its tokens count. Knows no product.

// `expert` is the group of the weights, `group` that of activations and output. APART: the block beside this one takes
// tokens of another expert, so that weights cannot be shared.
struct Tile { int group, expert, token, row, count; bool apart; };

__device__ __forceinline__ int parts(int whole, int part) { return (whole + part - 1) / part; }
__device__ __forceinline__ int rank_of_block() { return CLUSTER > 1 ? blockIdx.x % CLUSTER : 0; }

// Clusters take units of CLUSTER tiles, side by side along tokens. Where tokens of a tile of two passes may have two
// experts, all tiles are taken for the first one, then those that have two for the second.
struct Walk {
    // Units of tokens that pass all weights while those are in the L2.
    static constexpr int TOGETHER = 16 / (PASSES * CLUSTER);
    int group = 0, before = 0, next = blockIdx.x / CLUSTER;

    __device__ __forceinline__ bool take(const Parameters &p, Tile &tile) {
        int row_tiles = parts(p.rows, ROWS);
        while (group < p.groups) {
            tile.count = p.counts ? min(max(__ldg(p.counts + group), 0), p.capacity) : p.capacity;
            int token_units = parts(tile.count, TOKENS * CLUSTER), all = token_units * row_tiles, at = next - before;
            int times = PASSES > 1 && p.experts ? 2 : 1;
            if (at >= all * times) {
                before += all * times, group++;
                continue;
            }
            next += gridDim.x / CLUSTER;
            place(tile, at % all, token_units, row_tiles);
            if (find_expert(p, tile, at >= all)) return true;
        }
        return false;
    }

    __device__ __forceinline__ void place(Tile &tile, int at, int token_units, int row_tiles) {
        int first = at / (TOGETHER * row_tiles) * TOGETHER, width = min(TOGETHER, token_units - first);
        at -= first * row_tiles;
        int row = at / width, token = first + at - row * width;
        tile.group = group;
        tile.token = (token * CLUSTER + rank_of_block()) * TOKENS;
        tile.row = row * ROWS;
    }

    // False where neither this block nor the one beside it has tokens of an expert. `second`: of the second one.
    __device__ __forceinline__ bool find_expert(const Parameters &p, Tile &tile, bool second) {
        tile.apart = false, tile.expert = tile.group;
        if (!p.experts) return true;
        tile.expert = expert_at(p, tile.token);
        if (PASSES > 1) {
            int other = expert_at(p, tile.token + 128);
            if (second) return tile.expert >= 0 && other != tile.expert && (tile.expert = other) >= 0;
            if (tile.expert < 0) tile.expert = other;
        } else if (CLUSTER > 1) {
            int other = expert_at(p, tile.token + (rank_of_block() ? -TOKENS : TOKENS));
            tile.apart = tile.expert >= 0 && other >= 0 && other != tile.expert;
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
