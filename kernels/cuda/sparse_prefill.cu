// Sparse MLA prefill for Hopper (sm_90a): a block of threads takes one query token and 64 heads after another. The
// copies of one begin while the one before ends.
//
// A warpgroup copies the bf16 latents that a list names into tiles of shared memory, sixteen bytes a thread at a time;
// two others attend (latent.cuh). The queries of a task come when the last scores of the one before have, and outputs
// leave by the copy engine, from where the values of the task's last tile lay: with few tiles a task, both would
// otherwise take as long as the products. Compiled with WIDTH (512 or 576 channels).

#include "stream.cuh"
#include "outputs.cuh"
#include "softmax.cuh"

constexpr int TILE = 64, ROWS = 64, VALUE = 512;
constexpr int EARLY = WIDTH > VALUE ? 5 : 4;
#include "latent.cuh"

struct Parameters {
    const u16 *query;   // bf16 [queries, heads, WIDTH]
    const u8 *keys;     // bf16 [slots, WIDTH], rows `stride` bytes apart
    u16 *output;        // bf16 [queries, heads, VALUE]
    float *lse;         // [queries, heads]
    const int *indices; // [queries, listed]
    const int *lengths; // [queries], or null: every query has `listed` indices
    const float *sink;  // [heads], or null
    u64 stride;
    int queries, heads, slots, listed;
    float scale;        // softmax scale times log2(e)
    TensorMap asked, answered;  // queries and output, in boxes of 64 heads and 64 channels
};

// In the state, what latent.cuh leaves: a barrier of queries, and which keys of the last three tiles are named.
constexpr int ASKED = OWN, VALID = OWN + 8;

struct Task {
    const Parameters &p;
    int item, query, head, length, tiles;
    __device__ __forceinline__ Task(const Parameters &p, int item) : p(p), item(item) { find(); }

    __device__ __forceinline__ int blocks() const { return (p.heads + ROWS - 1) / ROWS; }
    __device__ __forceinline__ bool any() const { return item < p.queries * blocks(); }
    __device__ __forceinline__ void next() { item += gridDim.x, find(); }

    __device__ __forceinline__ void find() {
        if (!any()) return;
        query = item / blocks(), head = item % blocks() * ROWS;  // heads side by side: they read the same keys
        length = p.lengths ? min(max(p.lengths[query], 0), p.listed) : p.listed;
        tiles = (length + TILE - 1) / TILE;
    }

    __device__ __forceinline__ int rows() const { return p.heads - head; }
    __device__ __forceinline__ const u16 *queries() const { return p.query + ((u64)query * p.heads + head) * WIDTH; }

    __device__ __forceinline__ void close(const Softmax &softmax, float (&factor)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = softmax.whole(r), base = softmax.most[r] * p.scale;
            int of = head + own_row() + 8 * r;
            factor[r] = 0;
            if (of >= p.heads) continue;
            if (threadIdx.x % 4 == 0)
                p.lse[(u64)query * p.heads + of] = total != 0 ? (base + __log2f(total)) * 0.69314718f : INFINITE;
            float sink = p.sink ? power(p.sink[of] * 1.44269504f - base) : 0;
            factor[r] = total != 0 ? 1.0f / (total + sink) : 0;
        }
    }
};

// The queries of a task begin to come, by warpgroup 0.
__device__ __forceinline__ void ask(Queries &queries, const Task &task) {
    if (!task.any()) return;
    meet<5, 128>();  // nobody reads those of the task before any more
    if (threadIdx.x == 0) {
        barrier_expect(shared + STATE + ASKED, (CHUNKS - HELD) * CHUNK);
#pragma unroll
        for (int turn = HELD; turn < CHUNKS; turn++)
            read_box_once(shared + (turn - HELD) * CHUNK, &task.p.asked, chunk_at(turn) * 64, task.head, task.query,
                          shared + STATE + ASKED);
    }
    queries.fetch(task.queries(), task.rows());
}

struct Rows {
    const Parameters &p;
    int item;  // all else of the task is found again: registers are dear

    __device__ __forceinline__ void scored(Queries &queries) const { ask(queries, Task(p, item + gridDim.x)); }
    __device__ __forceinline__ void hide(float (&scores)[32], const Copies &copies) const {
        u64 valid;
        asm volatile("ld.shared.b64 %0, [%1];" : "=l"(valid) : "r"(shared + STATE + VALID + 8 * copies.of(1)));
        hide_all_but(scores, valid);
    }
};

// The 128 channels that a part has been the values of, from its place; by one thread.
__device__ __forceinline__ void answer(const Task &task, int part, u32 from) {
    write_box_once(&task.p.answered, chunk_of(part) * 64, task.head, task.query, from);
    write_box_once(&task.p.answered, chunk_of(part) * 64 + 64, task.head, task.query, from + CHUNK);
}

// Scores, softmax and 128 channels, by warpgroup 0.
__device__ __forceinline__ void lead(const Parameters &p) {
    Queries queries;
    Copies copies;
    int done = 0, item = blockIdx.x, message = 0;
    bool leaving = false;  // outputs of the task before, from where part 1 of its last tile lay
    ask(queries, Task(p, item));
    for (; Task(p, item).any(); done++, item += gridDim.x) {
        float scores[32], next[32], output[64], factor[2];
        Softmax softmax;
        int left = Task(p, item).tiles, tiles = left;
#pragma unroll
        for (int i = 0; i < 32; i++) scores[i] = next[i] = 0;
#pragma unroll
        for (int i = 0; i < 64; i++) output[i] = 0;
        barrier_wait(shared + STATE + ASKED, done & 1);
        queries.settle();
        if (tiles) {
            issue_scores<0, EARLY>(scores, queries, copies);
            issue_scores<EARLY, CHUNKS>(scores, queries, copies);
            if (threadIdx.x == 0 && leaving) await_boxes_read(), copies.before().release_for_all(1);
            __syncwarp();
            await_products<0>();
            hold(scores);
#pragma unroll 1
            for (; left > 1; left--) {
                advance<true>(scores, next, output, queries, softmax, Rows{p, item}, copies, message);
#pragma unroll
                for (int i = 0; i < 32; i++) scores[i] = next[i];
            }
            advance<false>(scores, next, output, queries, softmax, Rows{p, item}, copies, message);
        } else {
            Rows{p, item}.scored(queries);
        }
        asm volatile("" : "+r"(item));
        Task task(p, item);
        task.close(softmax, factor);
        await_read(message++);
        write_rows_of(shared + STATE + TOTAL, factor);
        send_message();
        if (!tiles) continue;
        u32 room = shared + copies.before().place(1);
        meet<5, 128>();  // all have taken the values that lie there
        stage_channels(room, output, factor[0], factor[1]);
        show_to_tensor_cores();  // to the copy engine as well
        meet<5, 128>();
        if (threadIdx.x == 0) answer(task, 1, room), commit_boxes();
        leaving = true;
    }
    if (threadIdx.x == 0) await_boxes();
}

// The output of a query that names nothing.
__device__ __forceinline__ void write_zeros(const Task &task) {
    uint4 *to = (uint4 *)(task.p.output + ((u64)task.query * task.p.heads + task.head) * VALUE);
    int units = min(task.rows(), ROWS) * VALUE / 8;
    for (int at = threadIdx.x % 128; at < units; at += 128) to[at] = make_uint4(0, 0, 0, 0);
}

// 384 channels, by warpgroup 1.
__device__ __forceinline__ void follow(const Parameters &p) {
    Copies copies;
    int message = 0;
    for (Task task(p, blockIdx.x); task.any(); task.next()) {
        float output[192];
#pragma unroll
        for (int i = 0; i < 192; i++) output[i] = 0;
#pragma unroll 1
        for (int tile = 0; tile < task.tiles; tile++, copies.next())
            accumulate(output, copies, message++, tile + 1 == task.tiles);
        await_message();
        u32 total = shared + STATE + TOTAL + 4 * own_row();
        float first = read_float(total), second = read_float(total + 32);
        tell_read(), message++;
        if (!task.tiles) {
            write_zeros(task);
            continue;
        }
        Copies last = copies.before();
        stage_channels(shared + last.place(3), output, first, second);
        stage_channels(shared + last.place(4), output + 64, first, second);
        stage_channels(shared + last.place(2), output + 128, first, second);
        show_to_tensor_cores();
        meet<6, 128>();
        if (threadIdx.x == 128) {
#pragma unroll
            for (int part = 2; part < PARTS; part++) answer(task, part, shared + last.place(part));
            commit_boxes();
            await_boxes_read();
#pragma unroll
            for (int part = 2; part < PARTS; part++) last.release_for_all(part);
        }
        __syncwarp();
    }
    if (threadIdx.x == 128) await_boxes();
}

// Sixteen bytes, or zeros.
__device__ __forceinline__ void copy16(u32 to, const u8 *from, bool any) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(any ? 16 : 0)
                 : "memory");
}

// The slot that the key of a tile names which this thread looks up, or -1.
__device__ __forceinline__ int slot_of(const Task &task, int tile) {
    int at = tile * TILE + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
    if (at >= task.length) return -1;
    int slot = task.p.indices[(u64)task.query * task.p.listed + at];
    return slot >= 0 && slot < task.p.slots ? slot : -1;
}

// The queries of the task behind this one begin their way to the L2: all blocks ask for theirs at about the same time.
__device__ __forceinline__ void fetch_queries_behind(const Task &task) {
    Task behind(task.p, task.item + gridDim.x);
    if (!behind.any()) return;
    u32 bytes = min(behind.rows(), ROWS) * WIDTH * 2;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(behind.queries()), "r"(bytes) : "memory");
}

// Each warp copies sixteen keys of a tile, eight threads one of four at a time.
__device__ __forceinline__ void produce(const Task &task, Copies &copies) {
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, first = warp * 16 + lane / 8;
    u32 even = shared + swizzled(first, lane % 8), odd = shared + swizzled(first + 4, lane % 8);
    int next = slot_of(task, 0);
    for (int tile = 0; tile < task.tiles; tile++, copies.next()) {
        const u8 *from[4];
        u32 valid = __ballot_sync(~0u, next >= 0) & 0xffff;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int slot = max(__shfl_sync(~0u, next, i * 4 + lane / 8), 0);
            from[i] = task.p.keys + slot * task.p.stride + lane % 8 * 16;
        }
        next = slot_of(task, tile + 1);
        if (tile == max(task.tiles - 2, 0) && threadIdx.x % 128 == 0) fetch_queries_behind(task);
#pragma unroll
        for (int part = FIRST; part < PARTS; part++) {
            copies.await_freed(part);
            if (part == 1 && lane == 0) {
                u32 at = shared + STATE + VALID + 8 * copies.of(1) + 2 * warp;
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((u16)valid) : "memory");
                barrier_arrive(full(1, copies.of(1)));
            }
            u32 place = copies.place(part);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int chunk = 0; chunk < (part ? 2 : 1); chunk++)
                    copy16((i % 2 ? odd : even) + i / 2 * 1024 + place + chunk * CHUNK,
                           from[i] + (chunk_of(part) + chunk) * 128, valid >> (i * 4 + lane / 8) & 1);
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full(part, copies.of(part)))
                         : "memory");
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) sparse_prefill(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != shared) __trap();
    int group = threadIdx.x / 128;
    if (threadIdx.x == 256) barrier_init(shared + STATE + ASKED, 1), prepare_barriers(128, 4);
    __syncthreads();
    if (group == 2) {  // registers of all three: three times what a thread begins with, 168
        fewer_registers<40>();
        Copies copies;
        for (Task task(p, blockIdx.x); task.any(); task.next()) produce(task, copies);
    } else if (group == 0) {
        more_registers<224>();
        lead(p);
    } else {
        more_registers<240>();
        follow(p);
    }
}
