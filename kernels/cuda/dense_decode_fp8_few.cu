// Dense MLA decode over FP8 records for Hopper (sm_90a), up to 16 rows (heads of query tokens) a sequence: one block of
// threads takes all of them and a span of keys.
//
// A warp copies tiles of 64 whole records to shared memory, four tiles deep. Two warpgroups take every second tile and
// know nothing of each other until the end, when their sums become one: while one waits, the other works. Keys are the
// long side of all products, and come to them through registers. Scores [keys x rows]: codes as they are, in FP8, times
// queries as the sum of two E4M3, which is exact; a product for every 128 channels, times the keys' scales; and bf16
// for the 64 rotated channels. Values [channels x rows]: codes across keys, made bf16 in registers, times weights that
// the keys' scales are part of.

#include "hopper.cuh"
#include "softmax.cuh"
#include "spans.cuh"
#include "paged.cuh"
#include "dense_decode_fp8_records.cuh"
#include "dense_decode_fp8_products.cuh"
#include "dense_decode_fp8_whole.cuh"

constexpr int CONSUMERS = WORKERS * 128, SUMS = 64;

// Whether any thread of a warpgroup says so; all have met.
__device__ __forceinline__ bool any_of_group(int group, bool mine) {
    u32 any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\nbar.red.or.pred p, %2, 128, q;\nselp.u32 %0, 1, 0, p;\n"
                 "}\n" : "=r"(any) : "r"((u32)mine), "r"(group + 1) : "memory");
    return any;
}

__device__ __forceinline__ void meet_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// What a warpgroup knows of its rows; a thread shares rows 2c, 2c + 1, 8 + 2c and 9 + 2c, where c is its lane modulo 4.
struct Rows {
    float scale[4], base[4], total[4];  // base: logarithm (base 2) of what weights are divided by
};
__device__ __forceinline__ int row_of(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// 128 bytes of a warp's sixteen keys, from byte AT of a record.
template <int AT> __device__ __forceinline__ void read_keys(u32 (&keys)[16], u32 tile) {
    int lane = threadIdx.x % 32;
    u32 from = tile + (threadIdx.x % 128 / 32 * 16 + lane % 16) * RECORD + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < 4; k++) read_matrices(keys + 4 * k, from + AT + 32 * k);
}

template <int GROUP> __device__ __forceinline__ void issue_group(float (&part)[16], const u32 (&keys)[16]) {
    hold(part);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++)
        multiply_codes(part, keys + 4 * k, operand(shared + GROUP * FEW_CHUNK + k * 32, 16), k > 0);
    commit_products();
}

// Both halves of queries, times the keys' scales.
template <int GROUP>
__device__ __forceinline__ void add_group(float (&s)[8], float (&part)[16], const float (&scale)[2][4]) {
    hold(part);
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] += (part[i] + part[i + 8]) * scale[i / 2 % 2][GROUP];
}

// Scores of a tile [keys x rows]: of keys lane / 4 (first) and 8 below it; s[4 * (row / 8) + 2 * (key / 8) + row % 2].
__device__ __forceinline__ void take_scores(float (&s)[8], const float (&scale)[2][4], u32 tile) {
    float part[16];
    u32 keys[2][16];
#pragma unroll
    for (int i = 0; i < 16; i++) part[i] = s[i % 8] = 0;
    read_keys<RECORD - 128>(keys[0], tile);
    hold(s);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++)
        multiply_few(s, keys[0] + 4 * k, operand(shared + GROUPS * FEW_CHUNK + k * 32, 16), k > 0);
    commit_products();
    read_keys<0>(keys[1], tile);
    issue_group<0>(part, keys[1]);
    await_products<1>();
    hold(s);
    read_keys<128>(keys[0], tile);
    await_products<0>();
    add_group<0>(s, part, scale);
    issue_group<1>(part, keys[0]);
    read_keys<256>(keys[1], tile);
    await_products<0>();
    add_group<1>(s, part, scale);
    issue_group<2>(part, keys[1]);
    read_keys<384>(keys[0], tile);
    await_products<0>();
    add_group<2>(s, part, scale);
    issue_group<3>(part, keys[0]);
    await_products<0>();
    add_group<3>(s, part, scale);
}

// Hides the scores of keys that a row does not see, and zeros scales where there is no key: whatever lies there.
__device__ __forceinline__ void hide_keys(float (&s)[8], float (&scale)[2][4], const Task &task, int tile) {
    int start = task.first + tile * TILE;
    int key = start + own_row();
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (key + i / 4 * 8 >= task.end) scale[i / 4][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = row_of(i / 4 * 2 + i % 2);
        int limit = min(task.end, task.length - task.p.rows / task.p.heads + 1 + (task.row + row) / task.p.heads);
        if (key + i / 2 % 2 * 8 >= limit) s[i] = -INFINITE;
    }
}

// Scores become weights; those of each group of channels, times the keys' scales, go to shared memory. Returns whether
// all of a tile's stay below 2**LAG.
__device__ __forceinline__ bool weigh(const float (&s)[8], float (&weight)[8], const float (&scale)[2][4],
                                      const Rows &rows, u32 to) {
    int lane = threadIdx.x % 32;
    u32 at = to + swizzled(lane % 16, threadIdx.x % 128 / 32 * 2 + lane / 16);
    float most = -INFINITE;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int r = i / 4 * 2 + i % 2;
        float x = s[i] * rows.scale[r] - rows.base[r];
        most = fmaxf(most, x);
        weight[i] = power(x);
    }
    const float folded = 309485009821345068724781056.0f;  // 2**88: codes are read as bf16 2**-120 times their value
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float a = scale[0][g] * folded, b = scale[1][g] * folded;
        store_across(at + g * FEW_WEIGHTS, pair(weight[0] * a, weight[1] * a), pair(weight[4] * a, weight[5] * a),
                     pair(weight[2] * b, weight[3] * b), pair(weight[6] * b, weight[7] * b));
    }
    show_to_tensor_cores();
    return most <= LAG;
}

// The base of rows whose peak is 2**LAG above it becomes that peak.
__device__ __forceinline__ void follow_peak(const float (&s)[8], Rows &rows, float (&sums)[SUMS], int group) {
    float peak[4], factor[4];
    u32 peaks = state(PEAKS + group * 256);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int i = r / 2 * 4 + r % 2;
        peak[r] = fmaxf(s[i], s[i + 2]) * rows.scale[r];
#pragma unroll
        for (int lane = 4; lane < 32; lane *= 2) peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], lane));
        if (threadIdx.x % 32 < 4) write_float(peaks + threadIdx.x % 128 / 32 * 64 + row_of(r) * 4, peak[r]);
    }
    meet_group(group);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float most = -INFINITE;
#pragma unroll
        for (int warp = 0; warp < 4; warp++) most = fmaxf(most, read_float(peaks + warp * 64 + row_of(r) * 4));
        bool behind = most - rows.base[r] > LAG;
        factor[r] = behind ? power(rows.base[r] - most) : 1.0f;
        rows.base[r] = behind ? most : rows.base[r];
        rows.total[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] *= factor[i / 4 % 2 * 2 + i % 2];
}

// Codes of 16 channels and 32 keys: each word has two channels beside each other of two keys beside each other.
__device__ __forceinline__ void read_codes(u32 (&word)[4], u32 tile, int step) {
    u32 from = tile + threadIdx.x % 32 * RECORD + threadIdx.x % 128 / 32 * 16;
    read_across(word, from + step % 2 * 32 * RECORD + step / 2 * 64);
}

// As operands of two products: even channels are rows 0 to 7 of a warp's sixteen, odd ones the others.
__device__ __forceinline__ void spread(const u32 (&word)[4], u32 (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[2 * i] = (word[i] << 8 & 0x80008000) | (word[i] << 4 & 0x07f007f0);
        values[2 * i + 1] = (word[i] & 0x80008000) | (word[i] >> 4 & 0x07f007f0);
    }
}

__device__ __forceinline__ void add_values(float (&sums)[SUMS], int stage, u32 from) {
    constexpr int held = 4;  // operands that products may be reading
    u32 tile = shared + KEYS + stage * TILE_BYTES, word[2][4], values[held][8];
    u64 weights = operand(from, 16);
    read_codes(word[0], tile, 0);
    hold(sums);
#pragma unroll
    for (int step = 0; step < 16; step++) {  // 64 channels by 32 keys
        if (step < 15) read_codes(word[(step + 1) % 2], tile, step + 1);
        if (step >= held) await_products<held - 1>();
        spread(word[step % 2], values[step % held]);
        begin_products();
#pragma unroll
        for (int k = 0; k < 2; k++)
            multiply_few(sums + step / 2 * 8, values[step % held] + 4 * k,
                         weights + (step / 4 * FEW_WEIGHTS + step % 2 * 64 + k * 32) / 16, 1);
        commit_products();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(state(FREED + 8 * stage));
    await_products<0>();
    hold(sums);
}

__device__ __forceinline__ void take_tile(const Task &task, Rows &rows, float (&sums)[SUMS], int group, int tile,
                                          int seen) {
    int stage = tile % STAGES, turn = tile / WORKERS;
    u32 to = shared + WEIGHTS + group * GROUPS * FEW_WEIGHTS, from = shared + KEYS + stage * TILE_BYTES;
    float scale[2][4], s[8], weight[8];
    barrier_wait(full(group, turn), turn / 2 & 1);
#pragma unroll
    for (int i = 0; i < 2; i++)
        read16(from + (own_row() + 8 * i) * RECORD + 512, (u32 *)scale[i]);
    take_scores(s, scale, from);
    if (tile >= seen) hide_keys(s, scale, task, tile);
    if (turn) barrier_wait(state(TAKEN + 8 * group), (turn - 1) & 1);
#pragma unroll 1
    while (any_of_group(group, !weigh(s, weight, scale, rows, to))) follow_peak(s, rows, sums, group);
#pragma unroll
    for (int i = 0; i < 8; i++) rows.total[i / 4 * 2 + i % 2] += weight[i];
    add_values(sums, stage, to);
    if (threadIdx.x % 32 == 0) barrier_arrive(state(TAKEN + 8 * group));
}

// Of all warpgroups together: logarithm (base 2) of a row's weights, and what this one's sums are to be multiplied by.
__device__ __forceinline__ void join(Rows &rows, float (&lse)[4], float (&factor)[4], int group) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int lane = 4; lane < 32; lane *= 2) rows.total[r] += __shfl_xor_sync(~0u, rows.total[r], lane);
        if (threadIdx.x % 32 < 4) write_float(state(TOTALS + threadIdx.x / 32 * 64 + row_of(r) * 4), rows.total[r]);
        if (threadIdx.x % 128 < 4) write_float(state(BASES + group * 64 + row_of(r) * 4), rows.base[r]);
    }
    meet<4, CONSUMERS>();
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float base[WORKERS], most = LOWEST, total = 0;
#pragma unroll
        for (int i = 0; i < WORKERS; i++) {
            base[i] = read_float(state(BASES + i * 64 + row_of(r) * 4));
            most = fmaxf(most, base[i]);
        }
#pragma unroll
        for (int i = 0; i < 4 * WORKERS; i++)
            total += power(base[i / 4] - most) * read_float(state(TOTALS + i * 64 + row_of(r) * 4));
        lse[r] = total != 0 ? most + __log2f(total) : -INFINITE;
        factor[r] = total != 0 ? power(rows.base[r] - most) * (4294967296.0f / total) : 0.0f;
    }
}

__device__ __forceinline__ void write(const Task &task, const float (&sums)[SUMS], const float (&lse)[4]) {
    u16 *to = task.output(0) + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int of = row_of(r);
        if (of >= task.p.rows) continue;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const float *s = sums + m * 8 + r / 2 * 4 + r % 2;
            *(u32 *)(to + of * VALUE + 64 * m) = pair(s[0], s[2]);
        }
        if (threadIdx.x >= 4) continue;
        if (task.whole()) task.p.lse[task.at(of)] = lse[r] == -INFINITE ? INFINITE : lse[r] * 0.69314718f;
        else task.p.partial_lse[task.at(of)] = lse[r];
    }
}

// Sums of other warpgroups come to the first through shared memory where tiles were.
__device__ __forceinline__ void gather(float (&sums)[SUMS], int group) {
    u32 at = shared + KEYS + threadIdx.x % 128 * 4;
    if (group)
#pragma unroll
        for (int i = 0; i < SUMS; i++) write_float(at + ((group - 1) * SUMS + i) * 512, sums[i]);
    meet<4, CONSUMERS>();
    if (group) return;
#pragma unroll
    for (int i = 0; i < SUMS * (WORKERS - 1); i++) sums[i % SUMS] += read_float(at + i * 512);
}

__device__ __forceinline__ void attend(const Task &task) {
    int group = threadIdx.x / 128;
    float sums[SUMS], lse[4], factor[4];
    int seen = (task.seen() - task.first) / TILE;  // tiles whose keys all rows see
    Rows rows;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        rows.scale[r] = task.p.scale * read_float(state(QUERY + 4 * row_of(r)));
        rows.base[r] = LOWEST, rows.total[r] = 0;
    }
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
#pragma unroll 1
    for (int tile = group; tile < task.tiles; tile += WORKERS) take_tile(task, rows, sums, group, tile, seen);
    join(rows, lse, factor, group);
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] *= factor[i / 4 % 2 * 2 + i % 2];
    gather(sums, group);
    if (!group) write(task, sums, lse);
}

// Four numbers as E4M3, and four more that are what is missing.
__device__ __forceinline__ void split_codes(const float *x, u32 &most, u32 &rest) {
    float left[4];
    most = codes(x[0], x[1], x[2], x[3]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)(most >> 16 * i)));
        float low, high;
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}\n"
            : "=f"(low), "=f"(high) : "r"(halves));
        left[2 * i] = x[2 * i] - low, left[2 * i + 1] = x[2 * i + 1] - high;
    }
    rest = codes(left[0], left[1], left[2], left[3]);
}

// Queries over a power of two, so that the largest of a row lies between 128 and 256, become sums of two E4M3, rotated
// channels bf16; a warp a row.
__device__ __forceinline__ void load_queries(const Task &task) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < FEW; row += 4 * WORKERS) {
        uint4 found[3] = {};
        if (row < task.p.rows) {
            const uint4 *from = (const uint4 *)(task.query() + row * WIDTH);
            found[0] = from[2 * lane], found[1] = from[2 * lane + 1];
            if (lane < 8) found[2] = from[64 + lane];
        }
        const u32 *words = (const u32 *)found;
        float x[24], most = 0;
#pragma unroll
        for (int i = 0; i < 12; i++) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        u32 scale = min(max(__float_as_uint(most) & 0x7f800000, 8u << 23), 250u << 23) - (7u << 23);
        if (most == 0) scale = 127u << 23;
        float inverse = __uint_as_float(0x7f000000 - scale);
        u32 high[4], low[4];
#pragma unroll
        for (int i = 0; i < 24; i++) x[i] *= inverse;
#pragma unroll
        for (int i = 0; i < 4; i++) split_codes(x + 4 * i, high[i], low[i]);
        u32 to = shared + lane / 8 * FEW_CHUNK;
        store16(to + swizzled(row, lane % 8), high[0], high[1], high[2], high[3]);
        store16(to + swizzled(row + FEW, lane % 8), low[0], low[1], low[2], low[3]);
        if (lane < 8)
            store16(shared + GROUPS * FEW_CHUNK + swizzled(row, lane), pair(x[16], x[17]), pair(x[18], x[19]),
                    pair(x[20], x[21]), pair(x[22], x[23]));
        if (lane == 0) write_float(state(QUERY + 4 * row), __uint_as_float(scale));
    }
    show_to_tensor_cores();
    meet<4, CONSUMERS>();
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
dense_decode_fp8_few(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != shared) __trap();
    let_next_launch_start();
    if (threadIdx.x == CONSUMERS) {
        // The first copies wait for a length, then for a page.
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.tables + (u64)blockIdx.z * p.table_stride));
        for (int group = 0; group < WORKERS; group++) barrier_init(full(group, 0), 1), barrier_init(full(group, 1), 1);
        for (int stage = 0; stage < STAGES; stage++) barrier_init(state(FREED + 8 * stage), 4);
        for (int group = 0; group < WORKERS; group++) barrier_init(state(TAKEN + 8 * group), 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        show_to_tensor_cores();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        fewer_registers<24>();
        if (threadIdx.x < CONSUMERS + 32) produce(p, Task(p));
    } else {
        more_registers<232>();
        Task task(p);
        if (task.idle()) return;
        load_queries(task);
        attend(task);
    }
}

extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Parameters p) { combine_spans(p); }
