// Attention of 64 rows over tiles of 64 bf16 latents in shared memory: the two warpgroups that consume them, for any
// producer. Knows wgmma, the running softmax and who waits for whom; a `Task` knows which keys a row sees, where
// results go, and how many tiles (`before`, an even number) this block has taken for others.
//
// Two tiles are held, in parts that are freed singly. Warpgroup 0 multiplies queries by keys, keeps the softmax and
// accumulates output channels 0..255; warpgroup 1 accumulates channels 256..511 with the weights that warpgroup 0
// leaves in shared memory. The value of a key is its first 512 channels: one copy serves both products (K-major, then
// MN-major).
//
// Wants WIDTH (512 or 576 channels), COPIED_BY_THREADS (whether parts come by cp.async instead of the copy engine),
// CLUSTER (1, or 2 blocks that share their tiles: a part is free when both have read it) and QUEUED. Where that is
// true, the values of a tile and the scores of the next one follow each other in the tensor cores' queue without a
// pause, and the last quarter of the values waits to be multiplied beside the softmax. Otherwise values end, and their
// memory is free, before scores begin: better where memory or the L2 is what limits.

constexpr int CHUNKS = WIDTH / 64;
constexpr bool ROPED = WIDTH > VALUE;  // a last chunk that is no value
constexpr int PARTS = ROPED ? 5 : 4;
constexpr int LEFT = PARTS - (QUEUED ? 4 : 2), RIGHT = PARTS - (QUEUED ? 2 : 4);  // first parts of half the values
constexpr int CHUNK = TILE * 128;  // bytes of 64 rows of 64 channels: the unit of the 128-byte swizzle
constexpr int TILE_BYTES = TILE * WIDTH * 2;
constexpr int KEYS = ROWS * WIDTH * 2, WEIGHTS = KEYS + 2 * TILE_BYTES, STATE = WEIGHTS + ROWS * TILE * 2;
constexpr int FULL = 0, FREE = 80, FACTOR = 160, TOTAL = FACTOR + 4 * ROWS, VALID = TOTAL + 4 * ROWS;  // in the state
// Where dynamic shared memory starts: a constant, so that operands of products are constants as well. In all other
// addresses, the rank of a cluster's block lies above 24 bits.
constexpr u32 shared = 1024;
__device__ __forceinline__ u32 here() { return CLUSTER > 1 ? shared | cluster_rank() << 24 : shared; }

// Chunks of 64 channels in the order in which scores want them; those of one part are freed together.
__device__ constexpr int chunk_at(int turn) {
    return turn < ROPED ? 8 : QUEUED ? turn - ROPED : (turn - ROPED + 4) % 8;
}
__device__ constexpr int part_at(int turn) { return (turn + ROPED) / 2; }
__device__ constexpr bool begins_part(int turn) { return turn == 0 || part_at(turn) != part_at(turn - 1); }

__device__ __forceinline__ u32 full(int buffer, int part) { return here() + STATE + FULL + (buffer * 5 + part) * 8; }
__device__ __forceinline__ u32 freed(int buffer, int part) { return here() + STATE + FREE + (buffer * 5 + part) * 8; }

// By one thread, before a meeting of all; so many arrivals fill a part, and `more` a tile's first.
__device__ __forceinline__ void prepare_barriers(int arrivals, int more) {
    for (int i = 0; i < 10; i++)
        barrier_init(full(0, i), arrivals + (i % 5 ? 0 : more)), barrier_init(freed(0, i), 4 * CLUSTER);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    show_to_tensor_cores();
}

// `turn`: how often the buffer was filled before, modulo 2.
__device__ __forceinline__ void await_part(int buffer, int part, int turn) {
    barrier_wait(full(buffer, part), turn);
    if (COPIED_BY_THREADS) show_to_tensor_cores();
}

template <int BUFFER> __device__ __forceinline__ void release(int part) {
    if (threadIdx.x % 32 == 0) barrier_arrive(freed(BUFFER, part));
    if (CLUSTER > 1 && threadIdx.x % 32 == 1) barrier_arrive_at_peer(freed(BUFFER, part));
}

template <int BUFFER>
__device__ __forceinline__ void issue_scores(float (&scores)[32], int turn_of_buffer) {
    constexpr u32 keys = shared + KEYS + BUFFER * TILE_BYTES;
    hold(scores);
#pragma unroll
    for (int turn = 0; turn < CHUNKS; turn++) {
        if (begins_part(turn)) {
            await_part(BUFFER, part_at(turn), turn_of_buffer);
            begin_products();
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 at = chunk_at(turn) * CHUNK + k * 32;
            multiply_keys(scores, operand(shared + at, 16), operand(keys + at, 16), turn + k > 0);
        }
    }
    commit_products();
    hold(scores);
}

// 128 channels from FIRST bytes into a tile.
template <int BUFFER, int FIRST>
__device__ __forceinline__ void issue_values(float *output, const u32 (&weights)[16]) {
    constexpr u32 values = shared + KEYS + BUFFER * TILE_BYTES + FIRST;
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_values(output, weights + 4 * k, operand(values + k * 2048, CHUNK));
    commit_products();
}

// Weights, the registers of a bf16 operand, to shared memory: a thread's for the same thread of warpgroup 1.
__device__ __forceinline__ void pass_weights(const u32 (&weights)[16], const Softmax &softmax, bool later) {
    if (later) meet<3, 256>();  // the other warpgroup has read the weights of the tile before
#pragma unroll
    for (int k = 0; k < 4; k++)
        store16(here() + WEIGHTS + k * 2048 + threadIdx.x * 16, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                weights[4 * k + 3]);
    write_rows_of(here() + STATE + FACTOR, softmax.factor);
    signal<2, 256>();
}

// Scores that have come become the weights of `tile`, which lies in BUFFER.
template <int BUFFER, typename Task>
__device__ __forceinline__ void weigh_scores(float (&scores)[32], u32 (&weights)[16], Softmax &softmax,
                                             const Task &task, int tile) {
    hold(scores);
    if (QUEUED && tile) signal<8, 256>();  // the other warpgroup's last quarter of values may begin
    task.template mask<BUFFER>(scores, tile);
    if (ROPED) release<BUFFER>(0);
    float scale[2] = {task.scale, task.scale};
    softmax.look(scores, scale);
    softmax.weigh(scores, scale);
#pragma unroll
    for (int j = 0; j < 16; j++) weights[j] = pair(scores[2 * j], scores[2 * j + 1]);
}

// Values of `tile`, which lies in BUFFER; they are not awaited.
template <int BUFFER, typename Task>
__device__ __forceinline__ void begin_values(float (&output)[128], const u32 (&weights)[16], const Softmax &softmax,
                                             const Task &task, int tile) {
    if (!QUEUED) pass_weights(weights, softmax, tile > 0);
    if (tile) rescale(output, softmax.factor[0], softmax.factor[1]);
    task.template clear<BUFFER, 0>(tile);
    hold(output);
    issue_values<BUFFER, 0>(output, weights);
    issue_values<BUFFER, 2 * CHUNK>(output + 64, weights);
    if (QUEUED) pass_weights(weights, softmax, tile > 0);
}

template <int BUFFER, int PENDING> __device__ __forceinline__ void free_values(int part) {
    await_products<PENDING + 1>();
    release<BUFFER>(part);
    await_products<PENDING>();
    if (PENDING) release<BUFFER>(part + 1);
}

// From the weights of `tile`, which lies in BUFFER, to those of the next one.
template <int BUFFER, typename Task>
__device__ __forceinline__ void advance(float (&output)[128], float (&scores)[32], u32 (&weights)[16],
                                        Softmax &softmax, const Task &task, int tile) {
    begin_values<BUFFER>(output, weights, softmax, task, tile);
    if (QUEUED) {
        issue_scores<1 - BUFFER>(scores, (task.before + tile + 1) / 2 & 1);
        free_values<BUFFER, 1>(LEFT);
    } else {
        free_values<BUFFER, 0>(LEFT);
        hold(output);
        release<BUFFER>(LEFT + 1);
        issue_scores<1 - BUFFER>(scores, (task.before + tile + 1) / 2 & 1);
    }
    await_products<0>();
    hold(output);
    weigh_scores<1 - BUFFER>(scores, weights, softmax, task, tile + 1);
}

template <int BUFFER, typename Task>
__device__ __forceinline__ void finish(float (&output)[128], const u32 (&weights)[16], const Softmax &softmax,
                                       const Task &task, int tile) {
    begin_values<BUFFER>(output, weights, softmax, task, tile);
    await_products<0>();
    hold(output);
    release<BUFFER>(LEFT), release<BUFFER>(LEFT + 1);
}

// What sums are to be multiplied by, for both warpgroups.
template <typename Task>
__device__ __forceinline__ void close(const Task &task, const Softmax &softmax, float (&factor)[2]) {
    task.close(softmax, factor);
    write_rows_of(here() + STATE + TOTAL, factor);
    meet<4, 256>();
}

template <typename Task> __device__ __forceinline__ void attend(const Task &task) {
    float output[128], scores[32], factor[2];
    u32 weights[16];
    Softmax softmax;
    int last = task.tiles - 1;
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] = 0;
    if (task.tiles) {
        issue_scores<0>(scores, task.before / 2 & 1);
        await_products<0>();
        weigh_scores<0>(scores, weights, softmax, task, 0);
        int tile = 0;
        for (; tile + 1 < last; tile += 2) {
            advance<0>(output, scores, weights, softmax, task, tile);
            advance<1>(output, scores, weights, softmax, task, tile + 1);
        }
        if (tile < last) {
            advance<0>(output, scores, weights, softmax, task, tile);
            finish<1>(output, weights, softmax, task, last);
        } else {
            finish<0>(output, weights, softmax, task, last);
        }
    }
    close(task, softmax, factor);
    task.template write<0>(output, factor[0], factor[1]);
}

template <int BUFFER, typename Task>
__device__ __forceinline__ void accumulate(float (&output)[128], const Task &task, int tile) {
    await_part(BUFFER, RIGHT, (task.before + tile) / 2 & 1);
    await_part(BUFFER, RIGHT + 1, (task.before + tile) / 2 & 1);
    meet<2, 256>();
    u32 weights[16], factor = here() + STATE + FACTOR + 4 * own_row();
    float first = read_float(factor), second = read_float(factor + 32);
#pragma unroll
    for (int k = 0; k < 4; k++) read16(here() + WEIGHTS + k * 2048 + threadIdx.x % 128 * 16, weights + 4 * k);
    if (!QUEUED && tile + 1 < task.tiles) signal<3, 256>();
    if (tile) rescale(output, first, second);
    task.template clear<BUFFER, 4 * CHUNK>(tile);
    hold(output);
    issue_values<BUFFER, 4 * CHUNK>(output, weights);
    if (QUEUED) {
        await_products<0>();
        release<BUFFER>(RIGHT);
        if (tile + 1 < task.tiles) meet<8, 256>(), signal<3, 256>();
        issue_values<BUFFER, 6 * CHUNK>(output + 64, weights);
        await_products<0>();
    } else {
        issue_values<BUFFER, 6 * CHUNK>(output + 64, weights);
        free_values<BUFFER, 0>(RIGHT);
    }
    hold(output);
    release<BUFFER>(RIGHT + 1);
}

template <typename Task> __device__ __forceinline__ void follow(const Task &task) {
    float output[128];
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] = 0;
    for (int tile = 0; tile + 1 < task.tiles; tile += 2) {
        accumulate<0>(output, task, tile);
        accumulate<1>(output, task, tile + 1);
    }
    if (task.tiles % 2) accumulate<0>(output, task, task.tiles - 1);
    meet<4, 256>();
    u32 total = here() + STATE + TOTAL + 4 * own_row();
    task.template write<1>(output, read_float(total), read_float(total + 32));
}

// Rows of queries [rows, WIDTH] to shared memory, zeros behind them; by both warpgroups.
__device__ __forceinline__ void load_queries(const u16 *from, int rows) {
    constexpr int units = WIDTH / 8, turns = ROWS * units / 256;
    uint4 found[turns];  // all in flight at once
#pragma unroll
    for (int i = 0; i < turns; i++) {
        int at = i * 256 + threadIdx.x;
        found[i] = make_uint4(0, 0, 0, 0);
        if (at / units < rows) found[i] = *(const uint4 *)(from + at * 8);
    }
#pragma unroll
    for (int i = 0; i < turns; i++) {
        int at = i * 256 + threadIdx.x, row = at / units, unit = at % units;
        store16(here() + unit / 8 * CHUNK + swizzled(row, unit % 8), found[i].x, found[i].y, found[i].z, found[i].w);
    }
    show_to_tensor_cores();
    meet<1, 256>();
}
