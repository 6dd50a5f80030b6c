// Attention of 64 rows over tiles of 64 bf16 latents in shared memory: the two warpgroups that consume them, for any
// producer. Knows wgmma, the running softmax and who waits for whom; a `Rows` knows which keys rows see.
//
// Warpgroup 0 takes scores, keeps the softmax and accumulates output channels 0..127; warpgroup 1 accumulates the other
// 384 with the weights that warpgroup 0 leaves in shared memory. That is two thirds and a third of the products. The
// registers that warpgroup 0 has left hold nearly half of the queries: shared memory is read less, and has room for
// more tiles. Scores of the next tile begin before the exponentials of this one, and two thirds of warpgroup 1's values
// wait until they are done. The value of a key is its first 512 channels: one copy serves both products (K-major, then
// MN-major).
//
// A tile is parts that are freed singly: part 0 is the 64 rotated channels, if there are any, and parts 1 to 4 are 128
// channels each, which are values too. Scores take parts in the order of their numbers. Of those that scores want first
// and values leave last there are three in shared memory, of the others two. Warpgroup 0 frees parts 0 and 1,
// warpgroup 1 the others; but the values of the last tile are not freed: outputs take their place.
//
// Wants WIDTH (512 or 576 channels) and EARLY (chunks of the next tile's scores that begin before the exponentials).

constexpr bool ROPED = WIDTH > VALUE;
constexpr int FIRST = ROPED ? 0 : 1, PARTS = 5, CHUNKS = WIDTH / 64, HELD = 4;
constexpr int CHUNK = TILE * 128;  // bytes of 64 rows of 64 channels: the unit of the 128-byte swizzle
// In shared memory: the chunks of queries that are not held in registers, parts, weights, and the state.
constexpr int TILES = (CHUNKS - HELD) * CHUNK, WEIGHTS = TILES + 22 * CHUNK, STATE = WEIGHTS + ROWS * TILE * 2;
// In the state: barriers, 32 bytes for others, and numbers by row: those of weights take turns.
constexpr int FULL = 0, FREED = 120, READ = 240, OWN = 248, FACTOR = 280, TOTAL = FACTOR + 8 * ROWS;
// Where dynamic shared memory starts: a constant, so that operands of products are constants as well.
constexpr u32 shared = 1024;

__device__ constexpr int copies_of(int part) { return part == 1 || part == 2 || (part == 3 && !ROPED) ? 3 : 2; }
__device__ constexpr int part_bytes(int part) { return part ? 2 * CHUNK : CHUNK; }
// Behind `shared`, the first of a part's copies.
__device__ constexpr u32 place_of(int part) {
    return TILES + (part == 0 ? 20 : part == 1 ? 0 : part == 2 ? 6 : part == 3 ? 12 : ROPED ? 16 : 18) * CHUNK;
}
// The first chunk of 64 channels of a part, and the chunks of a tile in the order in which scores take them.
__device__ constexpr int chunk_of(int part) { return part ? 2 * part - 2 : 8; }
__device__ constexpr bool begins_part(int turn) { return turn == 0 || (turn + ROPED) % 2 == 0; }
__device__ constexpr int part_at(int turn) { return ROPED ? (turn + 1) / 2 : turn / 2 + 1; }
__device__ constexpr int chunk_at(int turn) { return chunk_of(part_at(turn)) + !begins_part(turn); }

__device__ __forceinline__ u32 full(int part, int copy) { return shared + STATE + FULL + (part * 3 + copy) * 8; }
__device__ __forceinline__ u32 freed(int part, int copy) { return shared + STATE + FREED + (part * 3 + copy) * 8; }
__device__ __forceinline__ u32 factors(int message) { return shared + STATE + FACTOR + (message & 1) * 4 * ROWS; }

// By one thread, before a meeting of all; so many arrivals fill a part, and `more` part 1.
__device__ __forceinline__ void prepare_barriers(int arrivals, int more) {
#pragma unroll 1
    for (int i = 0; i < PARTS * 3; i++)
        barrier_init(full(0, i), arrivals + (i / 3 == 1 ? more : 0)), barrier_init(freed(0, i), 4);
    barrier_init(shared + STATE + READ, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    show_to_tensor_cores();
}

// Which copies of the parts a tile has, and how often they were filled before, modulo 2.
struct Copies {
    int tile = 0, threes = 0;  // counted over all tasks; modulo 6, for parts of which there are three

    __device__ __forceinline__ void next() { tile++, threes = threes == 5 ? 0 : threes + 1; }
    __device__ __forceinline__ Copies before() const {
        Copies copies;
        copies.tile = tile - 1, copies.threes = threes == 0 ? 5 : threes - 1;
        return copies;
    }
    __device__ __forceinline__ int of(int part) const {
        return copies_of(part) == 3 ? threes - (threes >= 3 ? 3 : 0) : tile & 1;
    }
    __device__ __forceinline__ int turn(int part) const { return copies_of(part) == 3 ? threes >= 3 : tile >> 1 & 1; }
    __device__ __forceinline__ u32 place(int part) const { return place_of(part) + of(part) * part_bytes(part); }

    __device__ __forceinline__ void await(int part) const { barrier_wait(full(part, of(part)), turn(part)); }
    __device__ __forceinline__ void await_freed(int part) const { barrier_wait(freed(part, of(part)), turn(part) ^ 1); }
    // By a whole warpgroup, or by one thread for all of its warps.
    __device__ __forceinline__ void release(int part) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(freed(part, of(part)));
    }
    __device__ __forceinline__ void release_for_all(int part) const { barrier_arrive(freed(part, of(part)), 4); }
};

// The chunks of queries that scores take first, as operands.
struct Queries {
    u32 held[HELD][16];

    // Begins to load them: sixteen bytes a thread, one of the four that share a row. `settle` makes operands of them.
    __device__ __forceinline__ void fetch(const u16 *from, int rows) {
        from += own_row() * WIDTH + threadIdx.x % 4 * 8, rows -= own_row();
#pragma unroll
        for (int turn = 0; turn < HELD; turn++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (i % 2 * 8 < rows) x = read_once(from + i % 2 * 8 * WIDTH + chunk_at(turn) * 64 + i / 2 * 32);
                u32 *to = held[turn] + i / 2 * 8 + i % 2;
                to[0] = x.x, to[2] = x.y, to[4] = x.z, to[6] = x.w;
            }
    }
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int turn = 0; turn < HELD; turn++)
#pragma unroll
            for (int i = 0; i < 4; i++) exchange<2>(held[turn] + i / 2 * 8 + i % 2);
    }
};

// Scores by the chunks FROM up to TO of a tile.
template <int FROM, int TO>
__device__ __forceinline__ void issue_scores(float (&scores)[32], const Queries &queries, const Copies &copies) {
#pragma unroll
    for (int turn = FROM; turn < TO; turn++)
        if (begins_part(turn)) copies.await(part_at(turn));
    show_to_tensor_cores();  // to those of the other warpgroup as well, which waits for weights
    if (FROM == 0) hold(scores);
    begin_products();
#pragma unroll
    for (int turn = FROM; turn < TO; turn++) {
        int part = part_at(turn);
        // Descriptors count in 16 bytes.
        u64 keys = operand(shared + place_of(part) + (chunk_at(turn) - chunk_of(part)) * CHUNK, 16) +
                   copies.of(part) * (part_bytes(part) / 16);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (turn < HELD) multiply_keys(scores, queries.held[turn] + 4 * k, keys + 2 * k, turn + k > 0);
            else multiply_keys(scores, operand(shared + (turn - HELD) * CHUNK + k * 32, 16), keys + 2 * k, 1);
    }
    commit_products();
}

// The 128 channels of values that a part is.
__device__ __forceinline__ void issue_values(float *output, const u32 (&weights)[16], int part, const Copies &copies) {
    u64 values = operand(shared + place_of(part), CHUNK) + copies.of(part) * (part_bytes(part) / 16);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_values(output, weights + 4 * k, values + k * (2048 / 16));
    commit_products();
}

// Warpgroup 0 sends messages, one at a time: the weights of a tile, or what a task's sums are to be multiplied by.
__device__ __forceinline__ void await_read(int message) { barrier_wait(shared + STATE + READ, ~message & 1); }
__device__ __forceinline__ void send_message() { signal<2, 256>(); }
__device__ __forceinline__ void await_message() { meet<2, 256>(); }
__device__ __forceinline__ void tell_read() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared + STATE + READ);
}

// Weights, the registers of a bf16 operand: a thread's for the same thread of warpgroup 1.
__device__ __forceinline__ void pass_weights(const u32 (&weights)[16], int message) {
    await_read(message);
#pragma unroll
    for (int k = 0; k < 4; k++)
        store16(shared + WEIGHTS + k * 2048 + threadIdx.x * 16, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                weights[4 * k + 3]);
    send_message();
}

// Warpgroup 1 waits here for warpgroup 0 to have the scores of the tile behind `tile`.
template <bool WAIT> __device__ __forceinline__ void take_turns(int tile) {
    if (tile & 1) WAIT ? meet<8, 256>() : signal<8, 256>();
    else WAIT ? meet<7, 256>() : signal<7, 256>();
}

// From the scores of a tile, which have come, to those of the next one, if there are MORE.
template <bool MORE, typename Rows>
__device__ __forceinline__ void advance(float (&scores)[32], float (&next)[32], float (&output)[64], Queries &queries,
                                        Softmax &softmax, const Rows &rows, Copies &copies, int &message) {
    float scale[2] = {rows.p.scale, rows.p.scale};
    u32 weights[16];
    Copies own = copies;
    copies.next();
    if (ROPED) own.release(0);
    if (!MORE) rows.scored(queries);
    rows.hide(scores, own);
    softmax.glance(scores, scale);
    write_rows_of(factors(message), softmax.factor);
    rescale(output, softmax.factor[0], softmax.factor[1]);
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.total[r] *= softmax.factor[r], softmax.factor[r] = 1;  // two registers less
    hold(output);
    if (MORE) issue_scores<0, EARLY>(next, queries, copies);
    softmax.weigh(scores, scale);
#pragma unroll
    for (int j = 0; j < 16; j++) weights[j] = pair(scores[2 * j], scores[2 * j + 1]);
    pass_weights(weights, message++);
    issue_values(output, weights, 1, own);
    if (MORE) issue_scores<EARLY, CHUNKS>(next, queries, copies);
    await_products<MORE>();
    if (MORE) own.release(1);
    await_products<0>();
    hold(output);
    if (MORE) hold(next);
    take_turns<false>(own.tile);
}

// 384 channels of a tile, by warpgroup 1: those of parts 3, 4 and 2.
__device__ __forceinline__ void accumulate(float (&output)[192], const Copies &copies, int message, bool last) {
    u32 weights[16], factor = factors(message) + 4 * own_row();
    await_message();
    float first = read_float(factor), second = read_float(factor + 32);
#pragma unroll
    for (int k = 0; k < 4; k++) read16(shared + WEIGHTS + k * 2048 + threadIdx.x % 128 * 16, weights + 4 * k);
    tell_read();
    rescale(output, first, second);
    hold(output);
    issue_values(output, weights, 3, copies);
    await_products<0>();
    if (!last) copies.release(3);
    take_turns<true>(copies.tile);
    issue_values(output + 64, weights, 4, copies);
    issue_values(output + 128, weights, 2, copies);
    await_products<1>();
    if (!last) copies.release(4);
    await_products<0>();
    hold(output);
    if (!last) copies.release(2);
}
