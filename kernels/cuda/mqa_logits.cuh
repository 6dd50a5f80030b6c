// Index scores on Hopper (sm_90a): score[token, key] = scale[key] * sum over heads of weight[token, head] *
// relu(query . key), e4m3 operands of 128 channels. Knows how keys come in and scores come out, not what becomes of
// them.
//
// The work of all groups of tokens is one line of tiles of 64 keys, of which each block of threads takes an equal
// piece. One warp copies keys, scales and queries into shared memory; WARPGROUPS multiply, keys as rows and heads as
// columns: while one sums over heads, another's products run. A score's bits depend on its operands alone: neither on
// the tile nor on the tokens beside it.
//
// Compiled with HEADS, TOKENS (of a warpgroup; HEADS * TOKENS columns), WARPGROUPS, BUFFERS (accumulators of each: one,
// or two in turn), SPLIT (the warpgroups share their tokens and take turns at tiles; otherwise each has its own tokens
// and all take every tile), STAGES and QUERY_STAGES (tiles of keys and groups of queries in flight), PAGE (keys of a
// page; 0: one page has all), BOX (keys copied at once; they divide a tile and a page) and JOINED (pages are tiles with
// their scales behind them, copied together).

#include "hopper.cuh"
#include "gemm_products.cuh"
#include "mqa_logits_copies.cuh"

#define NAMES_128 \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
             "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, " \
             "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
             "%119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)
PRODUCT(256, 128, 128, 129, 130, 131, 132, 133)

// Of the tokens of this warpgroup, those whose scores a lane ends up with: SUMS of them from SUMS * (lane / 2 % 2) on,
// one key of a tile each. With a single token, lanes 2 and 3 of four repeat what 0 and 1 have.
constexpr int SUMS = TOKENS > 1 ? TOKENS / 2 : 1;

struct Scores {
    float of[SUMS];
    int key;  // in the tile
};

// relu(x) divided by WEIGHED, exactly; NaN stays NaN. A maximum leaves more to the pipe that adds up, which counts where
// few tokens wait for their keys.
constexpr float WEIGHED = SPLIT ? 1.0f : 0.5f;
__device__ __forceinline__ float rectified(float x) {
    if (!SPLIT) return x + fabsf(x);
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ bool has_scores() { return TOKENS > 1 || threadIdx.x % 4 < 2; }
__device__ __forceinline__ int first_token() { return TOKENS > 1 ? threadIdx.x / 2 % 2 * SUMS : 0; }

// A warpgroup that multiplies. `Sink` gets a group's bounds, then its scores tile after tile, then the end; before each
// run of tiles it says how many it takes.
template <typename Sink> struct Multiplier {
    Sink &sink;
    int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + (lane & 1) * 8;  // of the scores that this lane ends up with
    u32 joined = swizzled(TILE + row / 32, row % 32 / 4) + row % 4 * 4;  // where the scale lies behind joined keys
    float weights[COLUMNS / 4];  // times WEIGHED, of this thread's columns: 8 i + lane % 4 * 2 and the next
    Ring<STAGES> ring;           // of the next tile to be multiplied
    Ring<QUERY_STAGES> queries;

    __device__ __forceinline__ void load_weights() {
        u32 from = WEIGHTS + queries.stage * WEIGHT_BYTES + (SPLIT ? 0 : warpgroup * COLUMNS * 4) + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            weights[2 * i] = WEIGHED * read_score(from + i * 32);
            weights[2 * i + 1] = WEIGHED * read_score(from + i * 32 + 4);
        }
    }

    // `query`: of the first 32 channels, as low word of an operand.
    __device__ __forceinline__ void issue(float (&d)[COLUMNS / 2], u32 query) {
        barrier_wait(FULL + 8 * ring.stage, ring.phase);
        u32 key = low_word(KEYS) + ring.stage * (KEY_PITCH >> 4);
        hold(d);
        begin_products();
#pragma unroll
        for (int k = 0; k < WIDTH / 32; k++) Product<COLUMNS>::run(d, whole(key + 2 * k), whole(query + 2 * k), k > 0);
        commit_products();
        hold(d);
    }

    // `operand` of hopper.cuh, in halves.
    static __device__ __forceinline__ u32 low_word(u32 address) { return address >> 4 | 1 << 16; }
    static __device__ __forceinline__ u64 whole(u32 low) { return (u64)(1024 >> 4 | 1 << 30) << 32 | low; }

    // Sums over heads: each thread its columns, then the four of a row.
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
                    sums[0][token] = fmaf(rectified(upper), weight, sums[0][token]);
                    sums[1][token] = fmaf(rectified(lower), weight, sums[1][token]);
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
        float scale = read_score(JOINED ? KEYS + stage * KEY_PITCH + joined : SCALES + (stage * TILE + row) * 4);
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
    }
};
