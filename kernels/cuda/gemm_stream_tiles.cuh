// Tiles of a block-scaled product and the order in which blocks of threads take them. Knows neither loads nor products.

struct Parameters {
    TensorMap weight_map;       // FORMAT 8: [groups, rows, channels]
    TensorMap activation_map;   // [groups, capacity, channels]
    const u8 *packed;           // FORMAT 4
    const void *weight_scales;  // fp32 [groups, rows / 128, blocks] or e8m0 [groups, rows / 32, blocks * 4]
    const float *scales;        // [groups, blocks, padded]
    u16 *output;                // bf16 [groups, capacity, rows]
    const int *counts;          // [groups] tokens, or null: `capacity` in each
    const int *experts;         // [capacity] or null: whose weights the tokens of a tile take (one group), or -1
    int groups, capacity, padded, rows, blocks, unused[13];
};

// One tile of the output and the blocks of channels this block of threads adds up. `expert` is the group of the
// weights, `group` that of activations and output.
struct Tile { int group, expert, token, tokens, row, first, end; };

// Tiles in the order in which blocks of threads take them: tokens of the same weights one after another.
struct Walk {
    int group = 0, before = 0, next = blockIdx.x / SPLIT;

    __device__ __forceinline__ bool take(const Parameters &p, Tile &tile) {
        if (DENSE) return take_dense(p, tile);
        int row_tiles = (p.rows + ROWS - 1) / ROWS;
        while (group < p.groups) {
            int count = p.counts ? min(max(__ldg(p.counts + group), 0), p.capacity) : p.capacity;
            int token_tiles = (count + TOKENS - 1) / TOKENS, at = next - before;
            if (at >= token_tiles * row_tiles) {
                before += token_tiles * row_tiles, group++;
                continue;
            }
            next += gridDim.x / SPLIT;
            place(p, tile, at, token_tiles, row_tiles);
            tile.tokens = min(TOKENS, count - tile.token);
            tile.expert = p.experts ? __ldg(p.experts + tile.token) : group;
            if (tile.expert >= 0) return true;
        }
        return false;
    }

    // One group of tokens that all count: little to compute before the first copy.
    __device__ __forceinline__ bool take_dense(const Parameters &p, Tile &tile) {
        int token_tiles = (p.capacity + TOKENS - 1) / TOKENS, token = 0, row = next;
        if (ONCE ? before : next >= (p.rows + ROWS - 1) / ROWS * token_tiles) return false;
        if (token_tiles > 1) token = next % token_tiles, row = next / token_tiles;
        before = 1, next += gridDim.x / SPLIT;
        int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0;
        tile.group = tile.expert = 0, tile.token = token * TOKENS, tile.row = row * ROWS;
        tile.tokens = min(TOKENS, p.capacity - tile.token);
        tile.first = rank * p.blocks / SPLIT, tile.end = (rank + 1) * p.blocks / SPLIT;
        return true;
    }

    __device__ __forceinline__ void place(const Parameters &p, Tile &tile, int at, int token_tiles, int row_tiles) {
        int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, token = 0;
        if (token_tiles > 1) {
            int first = at / (TOGETHER * row_tiles) * TOGETHER, width = min(TOGETHER, token_tiles - first);
            at -= first * row_tiles;
            token = first + at % width, at /= width;
        }
        tile.group = group, tile.token = token * TOKENS, tile.row = at * ROWS;
        tile.first = rank * p.blocks / SPLIT, tile.end = (rank + 1) * p.blocks / SPLIT;
    }
};
