// Index scores on Hopper (sm_90a): score[token, key] = scale[key] * sum over heads of weight[token, head] *
// relu(query . key), e4m3 operands of 128 channels. Knows how keys come in and scores come out, not what becomes of
// them.
//
// The work of all groups of tokens is one line of tiles of 64 keys, of which each block of threads takes an equal
// piece. One warp copies keys, scales and queries into shared memory; two warpgroups multiply, keys as rows and heads
// as columns. Each works on two accumulators in turn, so that its tensor cores are busy while it sums over heads. A
// score's bits depend on its operands alone: neither on the tile nor on the tokens beside it.
//
// Compiled with HEADS, TOKENS (of a warpgroup; HEADS * TOKENS <= 128 columns), SPLIT (the warpgroups share their
// tokens and take turns at tiles; otherwise each has its own tokens and both take every tile), STAGES and QUERY_STAGES
// (tiles of keys and groups of queries in flight), PAGE (keys of a page; 0: one page has all) and BOX (keys copied at
// once; they divide a tile and a page).

#include "hopper.cuh"
#include "gemm_products.cuh"

#define NAMES_128 \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
             "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, " \
             "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
             "%119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)
PRODUCT(256, 128, 128, 129, 130, 131, 132, 133)

constexpr int TILE = 64, WIDTH = 128, COLUMNS = HEADS * TOKENS, GROUP = SPLIT ? TOKENS : WARPGROUPS * TOKENS;
constexpr int MULTIPLIERS = WARPGROUPS * 128, THREADS = MULTIPLIERS + 128;
constexpr int QUERY_BOX = GROUP * HEADS > 256 ? GROUP * HEADS / 2 : GROUP * HEADS;  // a copy has 256 rows at most
constexpr int QUERY_BYTES = GROUP * HEADS * WIDTH, KEY_BYTES = TILE * WIDTH, WEIGHT_BYTES = GROUP * HEADS * 4;
constexpr bool WHOLE = PAGE && BOX == TILE;  // a tile lies in one page, with its scales in a row
// Where dynamic shared memory starts, and offsets in it.
constexpr u32 shared = 1024;
constexpr u32 QUERIES = shared, KEYS = QUERIES + QUERY_STAGES * QUERY_BYTES, SCALES = KEYS + STAGES * KEY_BYTES;
constexpr u32 WEIGHTS = SCALES + STAGES * TILE * 4, BOUNDS = WEIGHTS + QUERY_STAGES * WEIGHT_BYTES;
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

// The warp that copies. Pages of a lane's two keys of a tile are looked up four tiles ahead.
struct Copier {
    static constexpr u32 MODULUS = PAGE ? PAGE : 1;
    const Scoring &p;
    int lane = threadIdx.x % 32;
    Ring<STAGES> ring;
    Ring<QUERY_STAGES> queries;

    __device__ __forceinline__ int page_of(const Group &group, int key) const {
        if (key >= group.end) return -1;
        return PAGE ? p.table[(u64)group.sequence * p.table_stride + key / MODULUS] : 0;
    }
    // Of a lane's two keys of a tile; where a tile lies in one page, both are looked up as its first key.
    __device__ __forceinline__ int2 pages_of(const Group &group, int tile) const {
        if (BOX == TILE) {
            int page = page_of(group, tile * TILE);
            return make_int2(page, page);
        }
        return make_int2(page_of(group, tile * TILE + lane), page_of(group, tile * TILE + lane + 32));
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
        u32 full = FULL + 8 * ring.stage, to = KEYS + ring.stage * KEY_BYTES, scales = SCALES + ring.stage * TILE * 4;
        if (WHOLE) {
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

    __device__ __forceinline__ void run(Piece piece) {
        constexpr int AHEAD = 4;
        for (; piece.left > 0; piece.group++, piece.skip = 0) {
            Group group(p, piece.group);
            int tiles = min(group.tiles - piece.skip, piece.left), first = group.first + piece.skip;
            if (tiles <= 0) continue;
            int2 pages[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                pages[i] = pages_of(group, first + i);
            copy_queries(group, piece.skip, tiles);
            for (int tile = 0; tile < tiles; tile += AHEAD) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    if (tile + i >= tiles) break;
                    int2 now = pages[i];
                    pages[i] = pages_of(group, first + tile + i + AHEAD);
                    copy_keys(group, first + tile + i, now);
                }
            }
            piece.left -= tiles;
        }
    }
};

// Of the tokens of this warpgroup, those whose scores a lane ends up with: SUMS of them from SUMS * (lane / 2 % 2) on,
// one key of a tile each. With a single token, lanes 2 and 3 of four repeat what 0 and 1 have.
constexpr int SUMS = TOKENS > 1 ? TOKENS / 2 : 1;

struct Scores {
    float of[SUMS];
    int key;  // in the tile
};

__device__ __forceinline__ bool has_scores() { return TOKENS > 1 || threadIdx.x % 4 < 2; }
__device__ __forceinline__ int first_token() { return TOKENS > 1 ? threadIdx.x / 2 % 2 * SUMS : 0; }

// A warpgroup that multiplies. `Sink` gets a group's bounds, then its scores tile after tile, then the end; before each
// run of tiles it says how many it takes.
template <typename Sink> struct Multiplier {
    Sink &sink;
    int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + (lane & 1) * 8;  // of the scores that this lane ends up with
    float weights[COLUMNS / 4];  // halved, of this thread's columns: 8 i + lane % 4 * 2 and the next
    Ring<STAGES> ring;           // of the next tile to be multiplied
    Ring<QUERY_STAGES> queries;

    __device__ __forceinline__ void load_weights() {
        u32 from = WEIGHTS + queries.stage * WEIGHT_BYTES + (SPLIT ? 0 : warpgroup * COLUMNS * 4) + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            weights[2 * i] = 0.5f * read_score(from + i * 32);
            weights[2 * i + 1] = 0.5f * read_score(from + i * 32 + 4);
        }
    }

    // `query`: of the first 32 channels, as low word of an operand.
    __device__ __forceinline__ void issue(float (&d)[COLUMNS / 2], u32 query) {
        barrier_wait(FULL + 8 * ring.stage, ring.phase);
        u32 key = low_word(KEYS) + ring.stage * (KEY_BYTES >> 4);
        hold(d);
        if (ORDERED) take_turn();
        begin_products();
#pragma unroll
        for (int k = 0; k < WIDTH / 32; k++) Product<COLUMNS>::run(d, whole(key + 2 * k), whole(query + 2 * k), k > 0);
        commit_products();
        if (ORDERED) give_turn(1);
        hold(d);
    }

    // `operand` of hopper.cuh, in halves.
    static __device__ __forceinline__ u32 low_word(u32 address) { return address >> 4 | 1 << 16; }
    static __device__ __forceinline__ u64 whole(u32 low) { return (u64)(1024 >> 4 | 1 << 30) << 32 | low; }

    // Warpgroups issue products one after another: while one's run, the others sum.
    __device__ __forceinline__ void take_turn() {
        asm volatile("bar.sync %0, 256;" ::"r"(8 + warpgroup) : "memory");
    }
    __device__ __forceinline__ void give_turn(int ahead) {
        asm volatile("bar.arrive %0, 256;" ::"r"(8 + (warpgroup + ahead) % WARPGROUPS) : "memory");
    }

    // Sums over heads: each thread its columns, then the four of a row. x + |x| is twice relu(x), and NaN stays NaN.
    __device__ __forceinline__ Scores sum(const float (&d)[COLUMNS / 2], float scale) {
        float sums[2][TOKENS];
#pragma unroll
        for (int token = 0; token < TOKENS; token++) {
            sums[0][token] = sums[1][token] = 0;
#pragma unroll
            for (int i = token * (HEADS / 8); i < (token + 1) * (HEADS / 8); i++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float upper = d[4 * i + j], lower = d[4 * i + 2 + j], weight = weights[2 * i + j];
                    sums[0][token] = fmaf(upper + fabsf(upper), weight, sums[0][token]);
                    sums[1][token] = fmaf(lower + fabsf(lower), weight, sums[1][token]);
                }
            }
        }
        float halves[TOKENS];
        Scores found;
#pragma unroll
        for (int token = 0; token < TOKENS; token++) {
            float kept = lane & 1 ? sums[1][token] : sums[0][token], sent = lane & 1 ? sums[0][token] : sums[1][token];
            halves[token] = kept + __shfl_xor_sync(~0u, sent, 1);
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            float kept = halves[i], sent = halves[i];
            if (TOKENS > 1) {
                float other = halves[(i + SUMS) % TOKENS];
                kept = lane & 2 ? other : halves[i], sent = lane & 2 ? halves[i] : other;
            }
            found.of[i] = scale * (kept + __shfl_xor_sync(~0u, sent, 2));
        }
        found.key = row;
        return found;
    }

    // The tile that lies in `stage` is multiplied: makes room and hands its scores on.
    __device__ __forceinline__ void finish(float (&d)[COLUMNS / 2], int stage, int tile) {
        hold(d);
        float scale = read_score(SCALES + (stage * TILE + row) * 4);
        __syncwarp();
        if (lane == 0) barrier_arrive(FREE + 8 * stage);
        sink.take(tile, sum(d, scale));
    }

    __device__ __forceinline__ void step() {
#pragma unroll
        for (int i = 0; i < (SPLIT ? WARPGROUPS : 1); i++) ring.next();
    }

    // `count` tiles from `tile` on, every or every other one.
    __device__ __forceinline__ void multiply(float (&a)[COLUMNS / 2], float (&b)[COLUMNS / 2], int tile, int count,
                                             u32 query) {
        constexpr int STEP = SPLIT ? WARPGROUPS : 1;
        if (BUFFERS == 1) {
#pragma unroll 1
            for (; count > 0; count--, tile += STEP) {
                issue(a, query);
                int stage = ring.stage;
                step();
                await_products<0>();
                finish(a, stage, tile);
            }
            return;
        }
        if (count <= 0) return;
        int before = ring.stage;
        issue(a, query);
        for (count--; count >= 2; count -= 2, tile += 2 * STEP) {
            step();
            int second = ring.stage;
            issue(b, query);
            await_products<1>();
            finish(a, before, tile);
            step();
            before = ring.stage;
            issue(a, query);
            await_products<1>();
            finish(b, second, tile + STEP);
        }
        if (count) {
            step();
            int second = ring.stage;
            issue(b, query);
            await_products<1>();
            finish(a, before, tile);
            await_products<0>();
            finish(b, second, tile + STEP);
        } else {
            await_products<0>();
            finish(a, before, tile);
        }
        step();
    }

    __device__ __forceinline__ void run(int left) {
        float a[COLUMNS / 2], b[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) a[i] = b[i] = 0;
        int turn = SPLIT ? warpgroup : 0;  // the next tile of this warpgroup, counted from the next of the block
        for (int i = 0; i < turn; i++) ring.next();
        if (ORDERED && warpgroup == WARPGROUPS - 1) give_turn(1);
        int all = left;
        while (left > 0) {
            barrier_wait(QUERY_FULL + 8 * queries.stage, queries.phase);
            u32 bounds = BOUNDS + queries.stage * BOUND_BYTES;
            int first = read_int(bounds), tiles = read_int(bounds + 4);
            load_weights();
            sink.begin(bounds, SPLIT ? 0 : warpgroup * TOKENS);
            u32 query = low_word(QUERIES + queries.stage * QUERY_BYTES + (SPLIT ? 0 : warpgroup * COLUMNS * WIDTH));
            constexpr int STEP = SPLIT ? WARPGROUPS : 1;
            int tile = first + turn, count = (tiles - turn + STEP - 1) / STEP;
            for (int most = (tiles + STEP - 1) / STEP; most > 0;) {
                int now = min(most, sink.room());
                multiply(a, b, tile, min(count, now), query);
                count -= min(count, now), most -= now, tile += now * STEP;
            }
            if (SPLIT) turn = ((turn - tiles) % WARPGROUPS + WARPGROUPS) % WARPGROUPS;
            sink.end();
            if (lane == 0) barrier_arrive(QUERY_FREE + 8 * queries.stage);
            queries.next();
            left -= tiles;
        }
        if (ORDERED && warpgroup == (SPLIT ? all % WARPGROUPS : 0)) take_turn();
    }
};
