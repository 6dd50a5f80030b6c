// Dense decode's operands in pages, and which keys and rows a block takes of them. Knows no format of keys.

constexpr int TILE = 64, ROWS = 64, WIDTH = 576, VALUE = 512;

struct Paged {
    const u16 *query;   // bf16 [batch, rows, WIDTH]
    u16 *output;        // bf16 [batch, rows, VALUE]
    float *lse;         // [batch, rows]
    const int *lengths; // [batch]
    const int *tables;  // [batch, table_stride]
    u16 *partial;       // bf16 [spans, batch, rows, VALUE], each divided by its own sum
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
    const Paged &p;
    int sequence, row, length, span, first, end, tiles;
    __device__ __forceinline__ Task(const Paged &p) : p(p) {
        row = blockIdx.x * ROWS, sequence = blockIdx.z, length = max(p.lengths[sequence], 0);
        span = p.span_of(length), first = blockIdx.y * span, end = min(length, first + span);
        tiles = (max(end - first, 0) + TILE - 1) / TILE;
    }

    __device__ __forceinline__ bool whole() const { return length <= span; }  // nothing is left to combine
    __device__ __forceinline__ bool idle() const { return blockIdx.y && !tiles; }
    __device__ __forceinline__ const u16 *query() const { return p.query + ((u64)sequence * p.rows + row) * WIDTH; }

    // Where a row goes: the output, or the sums of this block's span.
    __device__ __forceinline__ u64 at(int of) const {
        return ((u64)(whole() ? 0 : blockIdx.y) * gridDim.z + sequence) * p.rows + row + of;
    }
    __device__ __forceinline__ u16 *output(int of) const { return (whole() ? p.output : p.partial) + at(of) * VALUE; }

    // Keys that all rows see: a query token sees those before it and itself.
    __device__ __forceinline__ int seen() const { return min(end, length - p.rows / p.heads + 1); }

    // Hides the scores of keys that a row does not see.
    __device__ __forceinline__ void hide(float (&s)[32], int tile) const {
        int start = first + tile * TILE, limit[2];
        if (start + TILE <= seen()) return;
#pragma unroll
        for (int r = 0; r < 2; r++)
            limit[r] = min(end, length - p.rows / p.heads + 1 + (row + own_row() + 8 * r) / p.heads);
        hide_from(s, start, limit);
    }

    // Writes the lse of both rows a thread shares; `factor`: what their sums are to be multiplied by, whose values are
    // those of keys over `unit`.
    __device__ __forceinline__ void close(const Softmax &softmax, const float (&scale)[2], float (&factor)[2],
                                          float unit) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = softmax.whole(r), lse = softmax.most[r] * scale[r] + __log2f(total);
            int of = own_row() + 8 * r;
            factor[r] = total != 0 ? unit / total : 0.0f;
            if (threadIdx.x % 4 || row + of >= p.rows) continue;
            if (whole()) p.lse[at(of)] = total != 0 ? lse * 0.69314718f : INFINITE;
            else p.partial_lse[at(of)] = total != 0 ? lse : -INFINITE;
        }
    }
};

// Where a token lies; no page at or behind the end.
struct Place {
    int page, token;
    __device__ __forceinline__ void find(const Task &task, int key) {
        page = -1, token = 0;
        if (key >= task.end) return;
        int block = key / task.p.page_tokens;
        page = task.p.tables[(u64)task.sequence * task.p.table_stride + block];
        token = key - block * task.p.page_tokens;
    }
};

// One block of 128 threads a row; sequences that were not split are left alone.
__device__ __forceinline__ void combine_spans(const Paged &p) {
    await_launch_before();
    int length = max(p.lengths[blockIdx.y], 0), span = p.span_of(length);
    if (length <= span) return;
    u64 row = (u64)blockIdx.y * p.rows + blockIdx.x;
    Sums sums = sum_spans(p.partial, p.partial_lse, (length + span - 1) / span, (u64)gridDim.y * p.rows, row);
    sums.write(p.output + row * VALUE, p.lse + row, sums.total);
}
