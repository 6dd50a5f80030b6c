// Sparse MLA prefill for Hopper (sm_90a): a block of threads takes one query token and 64 heads after another. The
// copies of one begin while the one before ends.
//
// A warpgroup copies the bf16 latents that a list names into tiles of shared memory, sixteen bytes a thread at a time;
// two others attend (latent.cuh). Compiled with WIDTH (512 or 576 channels).

#include "hopper.cuh"
#include "outputs.cuh"
#include "softmax.cuh"

constexpr bool COPIED_BY_THREADS = true, QUEUED = true;
constexpr int TILE = 64, ROWS = 64, VALUE = 512, CLUSTER = 1;
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
    int early;          // whether a task's queries come to the L2 before it begins
};

struct Task {
    const Parameters &p;
    int item, before, query, head, length, tiles;
    float scale;
    __device__ __forceinline__ Task(const Parameters &p) : p(p), item(blockIdx.x), before(0), scale(p.scale) { find(); }

    __device__ __forceinline__ int blocks() const { return (p.heads + ROWS - 1) / ROWS; }
    __device__ __forceinline__ bool any() const { return item < p.queries * blocks(); }
    __device__ __forceinline__ void next() { before += tiles, item += gridDim.x, find(); }

    __device__ __forceinline__ void find() {
        if (!any()) return;
        query = item / blocks(), head = item % blocks() * ROWS;  // heads side by side: they read the same keys
        length = p.lengths ? min(max(p.lengths[query], 0), p.listed) : p.listed;
        tiles = (length + 2 * TILE - 1) / (2 * TILE) * 2;  // buffers take turns: the last tile may hold nothing
    }

    template <int BUFFER> __device__ __forceinline__ void mask(float (&s)[32], int) const {
        u64 valid;
        asm volatile("ld.shared.b64 %0, [%1];" : "=l"(valid) : "r"(shared + STATE + VALID + 8 * BUFFER));
        hide_all_but(s, valid);
    }

    template <int BUFFER, int FIRST> __device__ __forceinline__ void clear(int) const {}  // what is not named is zero

    __device__ __forceinline__ void close(const Softmax &softmax, float (&factor)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = softmax.whole(r), base = softmax.most[r] * scale;
            int of = head + own_row() + 8 * r;
            factor[r] = 0;
            if (of >= p.heads) continue;
            if (threadIdx.x % 4 == 0)
                p.lse[(u64)query * p.heads + of] = total != 0 ? (base + __log2f(total)) * 0.69314718f : INFINITE;
            float sink = p.sink ? power(p.sink[of] * 1.44269504f - base) : 0;
            factor[r] = total != 0 ? 1.0f / (total + sink) : 0;
        }
    }

    template <int HALF> __device__ __forceinline__ void write(float (&o)[128], float first, float second) const {
        u16 *to = p.output + ((u64)query * p.heads + head) * VALUE + HALF * 256;
        write_rows<5 + HALF>(to, p.heads - head, here() + HALF * 4 * CHUNK, o, first, second, AsTheyLie());
    }
};

// Sixteen bytes, or zeros where there is no source.
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

// The queries of the task behind this one begin their way to the L2.
__device__ __forceinline__ void fetch_queries_after(Task task) {
    task.next();
    if (!task.any()) return;
    const u16 *from = task.p.query + ((u64)task.query * task.p.heads + task.head) * WIDTH;
    u32 bytes = min(task.p.heads - task.head, ROWS) * WIDTH * 2;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Each warp copies sixteen keys of a tile, eight threads one of four at a time.
__device__ __forceinline__ void produce(const Task &task) {
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    int next = slot_of(task, 0);
    for (int tile = 0; tile < task.tiles; tile++) {
        int slot = next, buffer = tile % 2, turn_of_buffer = (task.before + tile) / 2;
        const u8 *from[4];
        u32 valid = __ballot_sync(~0u, slot >= 0) & 0xffff, keys = shared + KEYS + buffer * TILE_BYTES, to[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = i * 4 + lane / 8, found = __shfl_sync(~0u, slot, row);
            from[i] = found < 0 ? nullptr : task.p.keys + found * task.p.stride + lane % 8 * 16;
            to[i] = keys + swizzled(warp * 16 + row, lane % 8);
        }
        next = slot_of(task, tile + 1);
        if (task.p.early && tile + 2 == task.tiles && threadIdx.x % 128 == 0) fetch_queries_after(task);
#pragma unroll
        for (int turn = 0; turn < CHUNKS; turn++) {
            int part = part_at(turn), chunk = chunk_at(turn);
            if (begins_part(turn) && turn_of_buffer) barrier_wait(freed(buffer, part), (turn_of_buffer - 1) & 1);
            if (turn == 0 && lane == 0) {
                u32 at = shared + STATE + VALID + 8 * buffer + 2 * warp;
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((u16)valid) : "memory");
                barrier_arrive(full(buffer, 0));
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool any = from[i];
                copy16(to[i] + chunk * CHUNK, any ? from[i] + chunk * 128 : task.p.keys, any);
            }
            if (turn + 1 == CHUNKS || begins_part(turn + 1))
                asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full(buffer, part))
                             : "memory");
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) sparse_prefill(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != shared) __trap();
    int group = threadIdx.x / 128;
    if (threadIdx.x == 256) prepare_barriers(128, 4);
    __syncthreads();
    if (group == 2) {  // registers of all three: three times what a thread begins with, 168
        fewer_registers<72>();
        for (Task task(p); task.any(); task.next()) produce(task);
    } else if (group == 0) {
        more_registers<240>();
        for (Task task(p); task.any(); task.next()) {
            if (task.item >= gridDim.x) meet<9, 256>();  // both have written what lay where queries go
            load_queries(p.query + ((u64)task.query * p.heads + task.head) * WIDTH, p.heads - task.head);
            attend(task);
        }
    } else {
        more_registers<192>();
        for (Task task(p); task.any(); task.next()) {
            if (task.item >= gridDim.x) meet<9, 256>();
            load_queries(p.query + ((u64)task.query * p.heads + task.head) * WIDTH, p.heads - task.head);
            follow(task);
        }
    }
}
