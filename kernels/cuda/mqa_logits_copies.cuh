// What index scores are made of, brought into shared memory: the line of tiles, a block's piece of it, and the warp that
// copies keys, scales, queries and weights. Included by mqa_logits.cuh, which says what all is compiled with.

constexpr int TILE = 64, WIDTH = 128, COLUMNS = HEADS * TOKENS, GROUP = SPLIT ? TOKENS : WARPGROUPS * TOKENS;
constexpr int MULTIPLIERS = WARPGROUPS * 128, THREADS = MULTIPLIERS + 128;
constexpr int QUERY_BOX = GROUP * HEADS > 256 ? GROUP * HEADS / 2 : GROUP * HEADS;  // a copy has 256 rows at most
constexpr int QUERY_BYTES = GROUP * HEADS * WIDTH, KEY_BYTES = TILE * WIDTH, WEIGHT_BYTES = GROUP * HEADS * 4;
constexpr int KEY_PITCH = JOINED ? 9 * 1024 : KEY_BYTES;  // scales follow as rows 64 and 65
// A stage has the same reader in each of its turns: tiles may arrive in another order than they were asked for.
static_assert(!SPLIT || STAGES % WARPGROUPS == 0, "warpgroups that take turns at tiles share the stages evenly");
constexpr bool WHOLE = PAGE && BOX == TILE;  // a tile lies in one page, with its scales in a row
// Where dynamic shared memory starts, and offsets in it.
constexpr u32 shared = 1024;
constexpr u32 QUERIES = shared, KEYS = QUERIES + QUERY_STAGES * QUERY_BYTES, SCALES = KEYS + STAGES * KEY_PITCH;
constexpr u32 WEIGHTS = SCALES + (JOINED ? 0 : STAGES * TILE * 4), BOUNDS = WEIGHTS + QUERY_STAGES * WEIGHT_BYTES;
// Of a group: first tile, tiles, token, count, tiles of other blocks before and in all, then every token's bounds.
constexpr u32 TOKEN_BOUNDS = 32, BOUND_BYTES = (TOKEN_BOUNDS + GROUP * 8 + 15) / 16 * 16;
constexpr u32 BARRIERS = BOUNDS + QUERY_STAGES * BOUND_BYTES, FULL = BARRIERS, FREE = FULL + STAGES * 8;
constexpr u32 QUERY_FULL = FREE + STAGES * 8, QUERY_FREE = QUERY_FULL + QUERY_STAGES * 8;
constexpr u32 SCRATCH = (QUERY_FREE + QUERY_STAGES * 8 + 15) / 16 * 16, SCORING_END = SCRATCH + 128;

struct Scoring {
    TensorMap queries;     // e4m3 [tokens * HEADS, 128], in boxes of QUERY_BOX
    TensorMap keys;        // e4m3 [pages, page_tokens, 128], in boxes of BOX keys
    const float *weights;  // [tokens, HEADS]
    const float *scales;   // of key s in page p: scales[p * scale_stride + s]
    const int *starts;     // [tokens], or null: keys from 0 on
    const int *ends;       // [tokens]: keys before
    const int *table;      // [sequences, table_stride] pages, or null: one page has all keys
    u64 scale_stride;
    int sequences, sequence_tokens, table_stride, columns;
};
static_assert(sizeof(Scoring) == 320, "the launch lays operands out like this");

__device__ __forceinline__ int read_int(u32 address) {
    int x;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ float read_score(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

// Queues a copy of `bytes`, which like both addresses are a multiple of 16.
__device__ __forceinline__ void copy_row(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Tokens of one sequence that are scored together, and the tiles that any of them sees.
struct Group {
    int sequence, token, count, first, tiles, end;

    __device__ __forceinline__ Group(const Scoring &p, int index) {
        int each = (p.sequence_tokens + GROUP - 1) / GROUP;
        sequence = index / each;
        int within = (index - sequence * each) * GROUP, low = p.columns;
        token = sequence * p.sequence_tokens + within;
        count = min(GROUP, p.sequence_tokens - within);
        end = 0;
        for (int i = 0; i < count; i++) {
            int from = start_of(p, token + i), to = end_of(p, token + i);
            if (from < to) low = min(low, from), end = max(end, to);
        }
        first = low / TILE;
        tiles = end ? (end + TILE - 1) / TILE - first : 0;
    }
    static __device__ __forceinline__ int start_of(const Scoring &p, int token) {
        return p.starts ? max(p.starts[token], 0) : 0;
    }
    static __device__ __forceinline__ int end_of(const Scoring &p, int token) { return min(p.ends[token], p.columns); }
    static __device__ __forceinline__ int all(const Scoring &p) {
        return p.sequences * ((p.sequence_tokens + GROUP - 1) / GROUP);
    }
};

// A block's piece of the line of `total` tiles, which begins at `start`: `left` tiles from tile `skip` of group `group`
// on. No block of the first `blocks` is idle. `scratch`: 32 words of shared memory.
struct Piece {
    int group, skip, left;
    u32 start, total, blocks;

    __device__ __forceinline__ Piece(const Scoring &p, u32 *scratch) {
        constexpr int WARPS = THREADS / 32;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = Group::all(p);
        int each = (groups + THREADS - 1) / THREADS, from = min((int)threadIdx.x * each, groups);
        int to = min(from + each, groups);
        u32 mine = 0;
        for (int i = from; i < to; i++) mine += Group(p, i).tiles;
        u32 sum = mine;
        for (int step = 1; step < 32; step *= 2) {
            u32 other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) scratch[warp] = sum;
        if (threadIdx.x == 0) scratch[WARPS] = groups, scratch[WARPS + 1] = 0;
        __syncthreads();
        u32 before = sum - mine;
        total = 0;
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) before += scratch[i];
            total += scratch[i];
        }
        blocks = min(gridDim.x, total);
        start = blockIdx.x < blocks ? (u64)total * blockIdx.x / blocks : total;
        left = blockIdx.x < blocks ? (u64)total * (blockIdx.x + 1) / blocks - start : 0;
        if (before <= start && start < before + mine) {
            u32 at = before;
            int i = from;
            for (u32 tiles; at + (tiles = Group(p, i).tiles) <= start; i++) at += tiles;
            scratch[WARPS] = i, scratch[WARPS + 1] = start - at;
        }
        __syncthreads();
        group = scratch[WARPS], skip = scratch[WARPS + 1];
    }

    // The block that has a tile of the line.
    __device__ __forceinline__ u32 block_of(u32 tile) const { return (((u64)tile + 1) * blocks - 1) / total; }
};

// Where a ring of `SIZE` stages stands.
template <int SIZE> struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == SIZE) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ void prepare_barriers() {
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(FULL + 8 * i, WHOLE ? 1 : 33);
            barrier_init(FREE + 8 * i, SPLIT ? 4 : 4 * WARPGROUPS);
        }
        for (int i = 0; i < QUERY_STAGES; i++) {
            barrier_init(QUERY_FULL + 8 * i, 33);
            barrier_init(QUERY_FREE + 8 * i, 4 * WARPGROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

// The warp that copies. Where a tile lies in one page, each lane looks up a tile's, and so 32 to 63 tiles ahead: a trip
// to memory takes as long as several tiles. Elsewhere pages of a lane's two keys of a tile are looked up, AHEAD tiles
// before it.
struct Copier {
    static constexpr u32 MODULUS = PAGE ? PAGE : 1;
    static constexpr int AHEAD = 4, LANES = 32;
    const Scoring &p;
    int lane = threadIdx.x % 32;
    Ring<STAGES> ring;
    Ring<QUERY_STAGES> queries;

    __device__ __forceinline__ int page_of(const Group &group, int key) const {
        if (key >= group.end) return -1;
        return PAGE ? p.table[(u64)group.sequence * p.table_stride + key / MODULUS] : 0;
    }
    // Of a lane's two keys of a tile.
    __device__ __forceinline__ int2 pages_of(const Group &group, int tile) const {
        return make_int2(page_of(group, tile * TILE + lane), page_of(group, tile * TILE + lane + 32));
    }
    // Of the tile that is this lane's, of those from `tile` on.
    __device__ __forceinline__ int page_ahead(const Group &group, int tile) const {
        return page_of(group, (tile + lane) * TILE);
    }
    static __device__ __forceinline__ int slot_of(int key) { return PAGE ? key % MODULUS : key; }

    __device__ __forceinline__ void copy_queries(const Group &group, int skip, int tiles) {
        barrier_wait(QUERY_FREE + 8 * queries.stage, queries.phase ^ 1);
        u32 full = QUERY_FULL + 8 * queries.stage, bounds = BOUNDS + queries.stage * BOUND_BYTES;
        if (lane < GROUP) {
            bool there = lane < group.count;
            store4(bounds + TOKEN_BOUNDS + 8 * lane, there ? Group::start_of(p, group.token + lane) : 0);
            store4(bounds + TOKEN_BOUNDS + 4 + 8 * lane, there ? Group::end_of(p, group.token + lane) : 0);
        }
        if (lane == 0) {
            store16(bounds, group.first + skip, tiles, group.token, group.count);
            store16(bounds + 16, skip, group.tiles, 0, 0);
            u32 bytes = group.count * HEADS * 4;
            barrier_expect(full, QUERY_BYTES + bytes);
            for (int i = 0; i < GROUP * HEADS; i += QUERY_BOX)
                copy_box(QUERIES + queries.stage * QUERY_BYTES + i * WIDTH, &p.queries, 0, group.token * HEADS + i, 0,
                         full);
            copy_row(WEIGHTS + queries.stage * WEIGHT_BYTES, p.weights + (u64)group.token * HEADS, bytes, full);
        }
        barrier_arrive(full);
        queries.next();
    }

    __device__ __forceinline__ void copy_keys(const Group &group, int tile, int2 pages) {
        barrier_wait(FREE + 8 * ring.stage, ring.phase ^ 1);
        u32 full = FULL + 8 * ring.stage, to = KEYS + ring.stage * KEY_PITCH, scales = SCALES + ring.stage * TILE * 4;
        if (JOINED) {
            if (lane == 0) {
                barrier_expect(full, KEY_BYTES + TILE * 4);
                copy_box(to, &p.keys, 0, 0, pages.x, full);
            }
        } else if (WHOLE) {
            if (lane == 0) {
                barrier_expect(full, KEY_BYTES + TILE * 4);
                copy_box(to, &p.keys, 0, slot_of(tile * TILE), pages.x, full);
                copy_row(scales, p.scales + p.scale_stride * pages.x + slot_of(tile * TILE), TILE * 4, full);
            }
        } else {
            copy_scale(scales + lane * 4, group, tile * TILE + lane, pages.x);
            copy_scale(scales + lane * 4 + 128, group, tile * TILE + lane + 32, pages.y);
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
            int boxes = BOX == TILE ? 1 : (min(group.end - tile * TILE, TILE) + BOX - 1) / BOX;
            if (lane == 0) barrier_expect(full, boxes * BOX * WIDTH);
#pragma unroll 1
            for (int i = 0; i < boxes; i++) {
                int at = i * BOX, page = __shfl_sync(~0u, at < 32 ? pages.x : pages.y, at % 32);
                if (lane == 0) copy_box(to + at * WIDTH, &p.keys, 0, slot_of(tile * TILE + at), page, full);
            }
        }
        ring.next();
    }

    __device__ __forceinline__ void copy_scale(u32 to, const Group &group, int key, int page) {
        bool there = key < group.end;
        const float *from = there ? p.scales + p.scale_stride * page + slot_of(key) : p.scales;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0)
                     : "memory");
    }

    // Tiles `first` to `first + tiles` of a group whose tile `skip` the first one is.
    __device__ __forceinline__ void copy_whole_tiles(const Group &group, int skip, int first, int tiles) {
        int now = page_ahead(group, first), next = page_ahead(group, first + LANES);
        copy_queries(group, skip, tiles);
        for (int tile = 0; tile < tiles; tile++) {
            if (tile && tile % LANES == 0) now = next, next = page_ahead(group, first + tile + LANES);
            int page = __shfl_sync(~0u, now, tile % LANES);
            copy_keys(group, first + tile, make_int2(page, page));
        }
    }

    __device__ __forceinline__ void copy_tiles(const Group &group, int skip, int first, int tiles) {
        int2 pages[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) pages[i] = pages_of(group, first + i);
        copy_queries(group, skip, tiles);
        for (int tile = 0; tile < tiles; tile += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (tile + i >= tiles) break;
                int2 now = pages[i];
                pages[i] = pages_of(group, first + tile + i + AHEAD);
                copy_keys(group, first + tile + i, now);
            }
        }
    }

    __device__ __forceinline__ void run(Piece piece) {
        for (; piece.left > 0; piece.group++, piece.skip = 0) {
            Group group(p, piece.group);
            int tiles = min(group.tiles - piece.skip, piece.left), first = group.first + piece.skip;
            if (tiles <= 0) continue;
            if (BOX == TILE) copy_whole_tiles(group, piece.skip, first, tiles);
            else copy_tiles(group, piece.skip, first, tiles);
            piece.left -= tiles;
        }
    }
};
