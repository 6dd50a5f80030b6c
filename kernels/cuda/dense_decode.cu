// Dense MLA decode for Hopper (sm_90a): one block of threads takes 64 rows (heads of query tokens) of a sequence and a
// span of its keys.
//
// A warp copies tiles of keys from pages to shared memory (TMA); two warpgroups attend (latent.cuh). Sums of several
// spans go to memory and `combine` sums them.

#include "hopper.cuh"

constexpr int WIDTH = 576;
constexpr bool COPIED_BY_THREADS = false, QUEUED = false;
#include "latent.cuh"
#include "spans.cuh"

struct Parameters {
    TensorMap keys;     // bf16 [pages, page_tokens, WIDTH], read in boxes of `box` tokens and 64 channels
    const u16 *query;   // bf16 [batch, rows, WIDTH]
    u16 *output;        // bf16 [batch, rows, VALUE]
    float *lse;         // [batch, rows]
    const int *lengths; // [batch]
    const int *tables;  // [batch, table_stride]
    float *partial;     // [spans, batch, rows, VALUE], each divided by its own sum
    float *partial_lse; // [spans, batch, rows], base 2
    int rows, heads, page_tokens, box, table_stride, span, most;
    float scale;        // softmax scale times log2(e)

    // Keys of one span: of a sequence that is longer than `most` spans of `span`, an equal share.
    __device__ __forceinline__ int span_of(int length) const {
        return max(span, (length + most * TILE - 1) / (most * TILE) * TILE);
    }
};

// Keys `first` up to `end` of a sequence, for 64 rows from `row`.
struct Task {
    const Parameters &p;
    static constexpr int before = 0;
    int sequence, row, length, span, first, end, tiles, limit[2];
    float scale;
    __device__ __forceinline__ Task(const Parameters &p) : p(p), scale(p.scale) {
        row = blockIdx.x * ROWS, sequence = blockIdx.z, length = max(p.lengths[sequence], 0);
        span = p.span_of(length), first = blockIdx.y * span, end = min(length, first + span);
        tiles = (max(end - first, 0) + TILE - 1) / TILE;
        int tokens = p.rows / p.heads;
#pragma unroll
        for (int r = 0; r < 2; r++)  // a query token sees those before it and itself
            limit[r] = min(end, length - tokens + 1 + (row + own_row() + 8 * r) / p.heads);
    }

    __device__ __forceinline__ bool whole() const { return length <= span; }  // nothing is left to combine
    __device__ __forceinline__ bool idle() const { return blockIdx.y && !tiles; }

    template <int BUFFER> __device__ __forceinline__ void mask(float (&s)[32], int tile) const {
        int column = first + tile * TILE + threadIdx.x % 4 * 2;
        if (first + tile * TILE + TILE <= min(limit[0], limit[1])) return;
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (column + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -INFINITE;
    }

    // Rows of a tile's 256 channels that lie behind the end become zero: whatever is there might be NaN.
    template <int BUFFER, int FIRST> __device__ __forceinline__ void clear(int tile) const {
        int keys = end - first - tile * TILE;
        if (keys >= TILE) return;
        for (int at = keys * 32 + threadIdx.x % 128; at < TILE * 32; at += 128) {
            int row = at / 32, unit = at % 32;
            u32 half = shared + KEYS + BUFFER * TILE_BYTES + FIRST;
            store16(half + unit / 8 * CHUNK + swizzled(row, unit % 8), 0, 0, 0, 0);
        }
        show_to_tensor_cores();
        meet<5 + FIRST / (4 * CHUNK), 128>();
    }

    __device__ __forceinline__ u64 at(int of) const {
        return ((u64)(whole() ? 0 : blockIdx.y) * gridDim.z + sequence) * p.rows + row + of;
    }

    __device__ __forceinline__ float close(int of, float base, float total) const {
        float lse = base + __log2f(total);
        if (threadIdx.x % 4 == 0 && row + of < p.rows) {
            if (whole()) p.lse[at(of)] = total != 0 ? lse * 0.69314718f : INFINITE;
            else p.partial_lse[at(of)] = total != 0 ? lse : -INFINITE;
        }
        return total != 0 ? 1.0f / total : 0.0f;
    }

    template <int HALF> __device__ __forceinline__ void write(float (&o)[128], float first, float second) const {
        if (whole()) write_rows<HALF>(p.output + at(0) * VALUE, p.rows - row, o, first, second);
        else write_sums<HALF>(p.partial + at(0) * VALUE, p.rows - row, o, first, second);
    }
};

// Where a box of a tile lies; no page at or behind the end.
struct Box {
    int page, token;
    __device__ __forceinline__ void find(const Task &task, int key) {
        page = -1, token = 0;
        if (key >= task.end) return;
        int block = key / task.p.page_tokens;
        page = task.p.tables[(u64)task.sequence * task.p.table_stride + block];
        token = key - block * task.p.page_tokens;
    }
};

__device__ __forceinline__ void produce(const Task &task) {
    const Parameters &p = task.p;
    int lane = threadIdx.x % 32, boxes = TILE / p.box;
    Box next[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        next[i].find(task, lane + 32 * i < boxes ? task.first + (lane + 32 * i) * p.box : task.end);
    for (int tile = 0; tile < task.tiles; tile++) {
        Box box[2] = {next[0], next[1]};
        int start = task.first + tile * TILE, buffer = tile % 2;
        int found = min((task.end - start + p.box - 1) / p.box, boxes);
#pragma unroll
        for (int i = 0; i < 2; i++)
            next[i].find(task, lane + 32 * i < boxes ? start + TILE + (lane + 32 * i) * p.box : task.end);
#pragma unroll
        for (int turn = 0; turn < CHUNKS; turn++) {
            int part = part_at(turn), chunk = chunk_at(turn);
            u32 arrived = full(buffer, part), to = shared + KEYS + buffer * TILE_BYTES + chunk * CHUNK;
            if (begins_part(turn)) {
                if (tile >= 2) barrier_wait(freed(buffer, part), (tile / 2 - 1) & 1);
                if (lane == 0) barrier_expect(arrived, found * p.box * 128 * (part ? 2 : 1));
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 rows = to + (lane + 32 * i) * p.box * 128;
                if (lane + 32 * i < found) copy_box(rows, &p.keys, chunk * 64, box[i].token, box[i].page, arrived);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) dense_decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != shared) __trap();
    int group = threadIdx.x / 128;
    if (threadIdx.x == 256) prepare_barriers(1, 0);
    __syncthreads();
    if (group == 2) {  // registers of all three: three times what a thread begins with, 168
        fewer_registers<56>();
        if (threadIdx.x < 288) produce(Task(p));
    } else if (group == 0) {
        more_registers<240>();
        Task task(p);
        if (task.idle()) return;
        load_queries(p.query + ((u64)task.sequence * p.rows + task.row) * WIDTH, p.rows - task.row);
        attend(task);
    } else {
        more_registers<208>();
        Task task(p);
        if (task.idle()) return;
        load_queries(p.query + ((u64)task.sequence * p.rows + task.row) * WIDTH, p.rows - task.row);
        follow(task);
    }
}

// One block a row; sequences that were not split are left alone.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Parameters p) {
    int length = max(p.lengths[blockIdx.y], 0);
    int span = p.span_of(length);
    if (length <= span) return;
    u64 row = (u64)blockIdx.y * p.rows + blockIdx.x;
    Sums sums = sum_spans(p.partial, p.partial_lse, (length + span - 1) / span, (u64)gridDim.y * p.rows, row);
    float inverse = sums.total != 0 ? 1.0f / sums.total : 0.0f;
    u32 low = pair(sums.values.x * inverse, sums.values.y * inverse);
    u32 high = pair(sums.values.z * inverse, sums.values.w * inverse);
    *(uint2 *)(p.output + row * VALUE + threadIdx.x * 4) = make_uint2(low, high);
    if (threadIdx.x == 0)
        p.lse[row] = sums.total != 0 ? (sums.most + __log2f(sums.total)) * 0.69314718f : __int_as_float(0x7f800000);
}
