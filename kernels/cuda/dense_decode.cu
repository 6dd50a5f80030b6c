// Dense MLA decode for Hopper (sm_90a): one block of threads takes 64 rows (heads of query tokens) of a sequence and a
// span of its keys.
//
// A warp copies tiles of 64 keys from pages to shared memory (TMA), two tiles deep, in five parts each that are freed
// singly. Warpgroup 0 multiplies queries by keys, keeps the running softmax and accumulates output channels 0..255;
// warpgroup 1 accumulates channels 256..511 with the weights that warpgroup 0 leaves in shared memory. The value of a
// key is its first 512 channels: one copy of a tile serves both products (K-major, then MN-major).
//
// Compiled with AHEAD: 1 issues a tile's scores before the values of the tile before it, so that its softmax runs
// beside products; 0 issues values first, so that their memory is free sooner (where memory is what limits).

#include "hopper.cuh"

constexpr int TILE = 64, ROWS = 64, WIDTH = 576, VALUE = 512, PARTS = 5;
constexpr int CHUNK = TILE * 128;  // bytes of 64 rows of 64 channels: the unit of the 128-byte swizzle
constexpr int TILE_BYTES = TILE * WIDTH * 2;
constexpr int KEYS = ROWS * WIDTH * 2, WEIGHTS = KEYS + 2 * TILE_BYTES, STATE = WEIGHTS + ROWS * TILE * 2;
constexpr int FULL = 0, FREE = 2 * PARTS * 8, FACTOR = 2 * FREE, TOTAL = FACTOR + 4 * ROWS;  // offsets in the state
constexpr float LAG = 8;
// Where dynamic shared memory starts: a constant, so that operands of products are constants as well.
constexpr u32 shared = 1024;

struct Parameters {
    TensorMap keys;     // bf16 [pages, page_tokens, WIDTH], read in boxes of `box` tokens and 64 channels
    const u16 *query;   // bf16 [batch, rows, WIDTH]
    u16 *output;        // bf16 [batch, rows, VALUE]
    float *lse;         // [batch, rows]
    const int *lengths; // [batch]
    const int *tables;  // [batch, table_stride]
    float *partial;     // [splits, batch, rows, VALUE], each divided by its own sum
    float *partial_lse; // [splits, batch, rows], base 2
    int rows, heads, page_tokens, box, table_stride, span, splits;
    float scale;        // softmax scale times log2(e)
};

// What this block does: tiles from key `first` up to key `end`.
struct Work {
    int sequence, split, row, length, first, end, tiles;
    bool whole;  // nothing is left to combine
    __device__ __forceinline__ Work(const Parameters &p) {
        row = blockIdx.x * ROWS, split = blockIdx.y, sequence = blockIdx.z;
        length = max(p.lengths[sequence], 0);
        first = split * p.span, end = min(length, first + p.span);
        tiles = (max(end - first, 0) + TILE - 1) / TILE;
        whole = length <= p.span;
    }
    __device__ __forceinline__ u64 at(const Parameters &p, int of) const {
        return ((u64)(whole ? 0 : split) * gridDim.z + sequence) * p.rows + of;
    }
};

// Chunks of 64 channels in the order in which scores want them; those of one part are freed together.
__device__ constexpr int chunk_at(int turn) { return turn == 0 ? 8 : turn < 5 ? turn + 3 : turn - 5; }
__device__ constexpr int part_at(int turn) { return (turn + 1) / 2; }
enum { ROPE = 0, RIGHT = 1, LEFT = 3 };  // the first part of each

__device__ __forceinline__ u32 full(int buffer, int part) { return shared + STATE + FULL + (buffer * PARTS + part) * 8; }
__device__ __forceinline__ u32 freed(int buffer, int part) { return shared + STATE + FREE + (buffer * PARTS + part) * 8; }

// Where box `j` of a tile lies; none at or behind the end.
struct Box {
    int page, token;
    __device__ __forceinline__ void find(const Parameters &p, const Work &work, int key) {
        page = -1, token = 0;
        if (key >= work.end) return;
        int block = key / p.page_tokens;
        page = p.tables[(u64)work.sequence * p.table_stride + block];
        token = key - block * p.page_tokens;
    }
};

__device__ __forceinline__ void produce(const Parameters &p, const Work &work) {
    int lane = threadIdx.x % 32, boxes = TILE / p.box;
    Box next[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int j = lane + 32 * i;
        next[i].page = -1;
        if (j < boxes) next[i].find(p, work, work.first + j * p.box);
    }
    for (int tile = 0; tile < work.tiles; tile++) {
        Box box[2] = {next[0], next[1]};
        int start = work.first + tile * TILE, buffer = tile % 2;
        int found = min((work.end - start + p.box - 1) / p.box, boxes);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int j = lane + 32 * i;
            next[i].page = -1;
            if (j < boxes) next[i].find(p, work, start + TILE + j * p.box);
#ifdef PREFETCH
            if (next[i].page >= 0)
                for (int chunk = 0; chunk < 9; chunk++)
                    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&p.keys),
                                 "r"(chunk * 64), "r"(next[i].token), "r"(next[i].page) : "memory");
#endif
        }
#pragma unroll
        for (int turn = 0; turn < 9; turn++) {
            int part = part_at(turn), chunk = chunk_at(turn);
            u32 arrived = full(buffer, part), to = shared + KEYS + buffer * TILE_BYTES + chunk * CHUNK;
            if (turn == 0 || part != part_at(turn - 1)) {
                if (tile >= 2) barrier_wait(freed(buffer, part), (tile / 2 - 1) & 1);
                if (lane == 0) barrier_expect(arrived, found * p.box * 128 * (part ? 2 : 1));
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (lane + 32 * i < found)
                    copy_box(to + (lane + 32 * i) * p.box * 128, &p.keys, chunk * 64, box[i].token, box[i].page, arrived);
        }
    }
}

template <int BUFFER> __device__ __forceinline__ void issue_scores(float (&scores)[32], int tile) {
    constexpr u32 keys = shared + KEYS + BUFFER * TILE_BYTES;
    hold(scores);
#pragma unroll
    for (int turn = 0; turn < 9; turn++) {
        if (turn == 0 || part_at(turn) != part_at(turn - 1)) {
            barrier_wait(full(BUFFER, part_at(turn)), tile / 2 & 1);
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

// Both halves of the 256 channels from FIRST bytes into a tile, each a group of its own.
template <int BUFFER, int FIRST>
__device__ __forceinline__ void issue_values(float (&output)[128], const u32 (&weights)[16]) {
    constexpr u32 values = shared + KEYS + BUFFER * TILE_BYTES + FIRST;
    hold(output);
    begin_products();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            multiply_values(output + 64 * half, weights + 4 * k, operand(values + k * 2048 + half * 2 * CHUNK, CHUNK));
        commit_products();
    }
}

template <int BUFFER> __device__ __forceinline__ void release(int part) {
    if (threadIdx.x % 32 == 0) barrier_arrive(freed(BUFFER, part));
}

// Waits for what `issue_values` issued and frees it, half by half; `between` runs when one is done.
template <int BUFFER, int PART, typename Between>
__device__ __forceinline__ void finish_values(float (&output)[128], const Between &between) {
    await_products<1>();
    release<BUFFER>(PART);
    between();
    await_products<0>();
    hold(output);
    release<BUFFER>(PART + 1);
}

// Rows of a tile's 256 channels that lie behind the end become zero: whatever is there might be NaN.
template <int BUFFER, int FIRST> __device__ __forceinline__ void clear_tail(int keys) {
    int thread = threadIdx.x % 128;
    for (int at = keys * 32 + thread; at < TILE * 32; at += 128) {
        int row = at / 32, unit = at % 32;
        store16(shared + KEYS + BUFFER * TILE_BYTES + FIRST + unit / 8 * CHUNK + swizzled(row, unit % 8), 0, 0, 0, 0);
    }
    show_to_tensor_cores();
    meet<5 + FIRST / (4 * CHUNK), 128>();
}

// Running softmax of the two rows a thread shares: rows `warp * 16 + lane / 4` and eight below.
struct Softmax {
    float most[2], total[2], factor[2];
    int limit[2];  // keys each row sees

    // Scores of keys from `start` that a row does not see become minus infinity.
    __device__ __forceinline__ void mask(float (&s)[32], int start) const {
        int column = start + threadIdx.x % 4 * 2;
        if (start + TILE <= min(limit[0], limit[1])) return;
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (column + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -__int_as_float(0x7f800000);
    }

    // Scores of one of both rows become weights; `factor` is what earlier sums are to be multiplied by.
    template <int R> __device__ __forceinline__ void take(float (&s)[32], float scale) {
        float peak = most[R];
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i / 2 % 2 == R) peak = fmaxf(peak, s[i]);
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
        // The base follows the peak only when it falls 2**8 behind: weights stay far from overflow, and the sums of
        // earlier tiles are seldom rescaled.
        factor[R] = 1.0f;
        if ((peak - most[R]) * scale > LAG) {
            factor[R] = power((most[R] - peak) * scale);
            most[R] = peak;
        }
        float base = most[R] == -__int_as_float(0x7f800000) ? 0.0f : most[R] * scale;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i / 2 % 2 == R) sum += s[i] = power(s[i] * scale - base);
        total[R] = total[R] * factor[R] + sum;
        // Never true: without a branch the assembler moves exponentials behind products that are to run beside them.
        if (sum < 0) asm volatile("trap;");
    }
};

__device__ __forceinline__ void rescale(float (&output)[128], float first, float second) {
    if (!__any_sync(~0u, first != 1.0f || second != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] *= i / 2 % 2 ? second : first;
}

__device__ __forceinline__ float read_float(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}
__device__ __forceinline__ void write_float(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// Weights as the registers of a bf16 operand, and in shared memory, a thread's for the same thread of warpgroup 1.
__device__ __forceinline__ void pass_weights(const float (&s)[32], u32 (&weights)[16], const Softmax &softmax) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 16; j++) weights[j] = pair(s[2 * j], s[2 * j + 1]);
#pragma unroll
    for (int k = 0; k < 4; k++)
        store16(shared + WEIGHTS + k * 2048 + threadIdx.x * 16, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                weights[4 * k + 3]);
    if (lane % 4 == 0) {
        write_float(shared + STATE + FACTOR + 4 * row, softmax.factor[0]);
        write_float(shared + STATE + FACTOR + 4 * (row + 8), softmax.factor[1]);
    }
    signal<2, 256>();
}

template <int BUFFER>
__device__ __forceinline__ void take_scores(float (&scores)[32], Softmax &softmax, const Work &work, int tile,
                                            float scale) {
    issue_scores<BUFFER>(scores, tile);
    await_products<0>();
    hold(scores);
    release<BUFFER>(ROPE);
    softmax.mask(scores, work.first + tile * TILE);
    softmax.take<0>(scores, scale);
    softmax.take<1>(scores, scale);
}

// From the weights of tile - 1 to those of `tile`, which lies in BUFFER.
template <int BUFFER>
__device__ __forceinline__ void advance(float (&output)[128], float (&scores)[32], u32 (&weights)[16],
                                        Softmax &softmax, const Work &work, int tile, float scale) {
    if (AHEAD) {
        issue_scores<BUFFER>(scores, tile);
        issue_values<1 - BUFFER, 0>(output, weights);
        await_products<2>();
        hold(scores);
        release<BUFFER>(ROPE);
        softmax.mask(scores, work.first + tile * TILE);
        softmax.take<0>(scores, scale);
        finish_values<1 - BUFFER, LEFT>(output, [&] { softmax.take<1>(scores, scale); });
    } else {
        issue_values<1 - BUFFER, 0>(output, weights);
        finish_values<1 - BUFFER, LEFT>(output, [] {});
        take_scores<BUFFER>(scores, softmax, work, tile, scale);
    }
    meet<3, 256>();  // the other warpgroup has read the weights of the tile before
    pass_weights(scores, weights, softmax);
    rescale(output, softmax.factor[0], softmax.factor[1]);
}

// bf16 rows of 256 channels to memory, by way of the shared memory in which the queries lay.
template <int HALF>
__device__ __forceinline__ void write_whole(const Parameters &p, const Work &work, float (&o)[128], float first,
                                            float second) {
    int thread = threadIdx.x % 128, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    u32 base = shared + HALF * 4 * CHUNK;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        u32 at = base + j / 8 * CHUNK + lane % 4 * 4;
        store4(at + swizzled(row, j % 8), pair(o[4 * j] * first, o[4 * j + 1] * first));
        store4(at + swizzled(row + 8, j % 8), pair(o[4 * j + 2] * second, o[4 * j + 3] * second));
    }
    meet<5 + HALF, 128>();
    for (int r = thread / 32; r < ROWS && work.row + r < p.rows; r += 4) {
        u32 found[4];
        read16(base + lane / 8 * CHUNK + swizzled(r, lane % 8), found);
        u16 *to = p.output + work.at(p, work.row + r) * VALUE + HALF * 256 + lane * 8;
        *(uint4 *)to = make_uint4(found[0], found[1], found[2], found[3]);
    }
}

// fp32 rows of 256 channels to memory, for `combine`.
template <int HALF>
__device__ __forceinline__ void write_partial(const Parameters &p, const Work &work, float (&o)[128], float first,
                                              float second) {
    int lane = threadIdx.x % 32, row = work.row + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= p.rows) continue;
        float *to = p.partial + work.at(p, row + 8 * r) * VALUE + HALF * 256 + lane % 4 * 2, factor = r ? second : first;
#pragma unroll
        for (int j = 0; j < 32; j++)
            *(float2 *)(to + 8 * j) = make_float2(o[4 * j + 2 * r] * factor, o[4 * j + 2 * r + 1] * factor);
    }
}

template <int HALF>
__device__ __forceinline__ void write(const Parameters &p, const Work &work, float (&o)[128], float first, float second) {
    if (work.whole) write_whole<HALF>(p, work, o, first, second);
    else write_partial<HALF>(p, work, o, first, second);
}

__device__ __forceinline__ void load_queries(const Parameters &p, const Work &work) {
    constexpr int units = WIDTH / 8, turns = ROWS * units / 256;
    const u16 *from = p.query + ((u64)work.sequence * p.rows + work.row) * WIDTH;
    uint4 found[turns];  // all in flight at once
#pragma unroll
    for (int i = 0; i < turns; i++) {
        int at = i * 256 + threadIdx.x;
        found[i] = make_uint4(0, 0, 0, 0);
        if (work.row + at / units < p.rows) found[i] = *(const uint4 *)(from + at * 8);
    }
#pragma unroll
    for (int i = 0; i < turns; i++) {
        int at = i * 256 + threadIdx.x, row = at / units, unit = at % units;
        store16(shared + unit / 8 * CHUNK + swizzled(row, unit % 8), found[i].x, found[i].y, found[i].z, found[i].w);
    }
    show_to_tensor_cores();
    meet<1, 256>();
}

// The last sums of a row: to memory, and to the other warpgroup.
__device__ __forceinline__ void close(const Parameters &p, const Work &work, const Softmax &softmax, float scale,
                                      float (&inverse)[2]) {
    const float infinity = __int_as_float(0x7f800000);
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = softmax.total[r];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        inverse[r] = total != 0 ? 1.0f / total : 0.0f;
        if (lane % 4) continue;
        write_float(shared + STATE + TOTAL + 4 * (row + 8 * r), inverse[r]);
        int of = work.row + row + 8 * r;
        if (of >= p.rows) continue;
        float lse = softmax.most[r] * scale + __log2f(total);
        if (work.whole) p.lse[work.at(p, of)] = total != 0 ? lse * 0.69314718f : infinity;
        else p.partial_lse[work.at(p, of)] = total != 0 ? lse : -infinity;
    }
    meet<4, 256>();
}

__device__ __forceinline__ void attend(const Parameters &p, const Work &work) {
    float output[128], scores[32], inverse[2];
    u32 weights[16];
    Softmax softmax;
    int row = work.row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, last = work.tiles - 1;
    int tail = work.end - work.first - last * TILE, tokens = p.rows / p.heads;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        softmax.most[r] = -__int_as_float(0x7f800000), softmax.total[r] = 0;
        // A query token sees those before it and itself.
        softmax.limit[r] = min(work.end, work.length - tokens + 1 + (row + 8 * r) / p.heads);
    }
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] = 0;
    if (work.tiles) {
        take_scores<0>(scores, softmax, work, 0, p.scale);
        pass_weights(scores, weights, softmax);
        int tile = 1;
        for (; tile < last; tile += 2) {
            advance<1>(output, scores, weights, softmax, work, tile, p.scale);
            advance<0>(output, scores, weights, softmax, work, tile + 1, p.scale);
        }
        if (tile == last) {
            advance<1>(output, scores, weights, softmax, work, tile, p.scale);
            if (tail < TILE) clear_tail<1, 0>(tail);
            issue_values<1, 0>(output, weights);
        } else {
            if (tail < TILE) clear_tail<0, 0>(tail);
            issue_values<0, 0>(output, weights);
        }
        await_products<0>();
        hold(output);
    }
    close(p, work, softmax, p.scale, inverse);
    write<0>(p, work, output, inverse[0], inverse[1]);
}

template <int BUFFER>
__device__ __forceinline__ void accumulate(float (&output)[128], const Work &work, int row, int tile) {
    int tail = work.end - work.first - tile * TILE;
    barrier_wait(full(BUFFER, RIGHT), tile / 2 & 1);
    barrier_wait(full(BUFFER, RIGHT + 1), tile / 2 & 1);
    meet<2, 256>();
    u32 weights[16], factor = shared + STATE + FACTOR + 4 * row;
    float first = read_float(factor), second = read_float(factor + 32);
#pragma unroll
    for (int k = 0; k < 4; k++) read16(shared + WEIGHTS + k * 2048 + threadIdx.x % 128 * 16, weights + 4 * k);
    if (tile + 1 < work.tiles) signal<3, 256>();
    if (tile) rescale(output, first, second);
    if (tail < TILE) clear_tail<BUFFER, 4 * CHUNK>(tail);
    issue_values<BUFFER, 4 * CHUNK>(output, weights);
    finish_values<BUFFER, RIGHT>(output, [] {});
}

__device__ __forceinline__ void follow(const Parameters &p, const Work &work) {
    float output[128];
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] = 0;
    for (int tile = 0; tile + 1 < work.tiles; tile += 2) {
        accumulate<0>(output, work, row, tile);
        accumulate<1>(output, work, row, tile + 1);
    }
    if (work.tiles % 2) accumulate<0>(output, work, row, work.tiles - 1);
    meet<4, 256>();
    u32 total = shared + STATE + TOTAL + 4 * row;
    write<1>(p, work, output, read_float(total), read_float(total + 32));
}

extern "C" __global__ void __launch_bounds__(384, 1) dense_decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != shared) __trap();
    Work work(p);
    if (work.split && !work.tiles) return;
    int group = threadIdx.x / 128;
    if (threadIdx.x == 256) {
        for (int i = 0; i < 2 * PARTS; i++) barrier_init(full(0, i), 1), barrier_init(freed(0, i), 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        show_to_tensor_cores();
    }
    __syncthreads();
    if (group == 2) {
        fewer_registers<56>();
        if (threadIdx.x < 288) produce(p, work);
    } else if (group == 0) {
        more_registers<240>();
        load_queries(p, work);
        attend(p, work);
    } else {
        more_registers<216>();
        load_queries(p, work);
        follow(p, work);
    }
}

// One block of 128 threads a row; sequences that were not split are left alone.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Parameters p) {
    __shared__ float factors[128];
    int row = blockIdx.x, sequence = blockIdx.y, length = p.lengths[sequence];
    if (length <= p.span) return;
    int count = (length + p.span - 1) / p.span, step = gridDim.y * p.rows, first = sequence * p.rows + row;
    float most = -__int_as_float(0x7f800000), total = 0;
    for (int i = 0; i < count; i++) most = fmaxf(most, p.partial_lse[(u64)i * step + first]);
    if (most == -__int_as_float(0x7f800000)) most = 0;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int start = 0; start < count; start += 128) {
        int taken = min(count - start, 128);
        __syncthreads();
        if (threadIdx.x < taken)
            factors[threadIdx.x] = power(p.partial_lse[(u64)(start + threadIdx.x) * step + first] - most);
        __syncthreads();
        const float4 *from = (const float4 *)(p.partial + ((u64)start * step + first) * VALUE) + threadIdx.x;
#pragma unroll 8
        for (int i = 0; i < taken; i++) {
            float4 part = from[(u64)i * step * (VALUE / 4)];
            float factor = factors[i];
            total += factor;
            sum.x += factor * part.x, sum.y += factor * part.y, sum.z += factor * part.z, sum.w += factor * part.w;
        }
    }
    float inverse = total != 0 ? 1.0f / total : 0.0f;
    u32 low = pair(sum.x * inverse, sum.y * inverse), high = pair(sum.z * inverse, sum.w * inverse);
    *(uint2 *)(p.output + (u64)first * VALUE + threadIdx.x * 4) = make_uint2(low, high);
    if (threadIdx.x == 0)
        p.lse[first] = total != 0 ? (most + __log2f(total)) * 0.69314718f : __int_as_float(0x7f800000);
}
