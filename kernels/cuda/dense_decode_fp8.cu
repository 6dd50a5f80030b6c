// Dense MLA decode over FP8 records for Hopper (sm_90a): one block of threads takes 64 rows (heads of query tokens) of
// a sequence and a span of its keys.
//
// A warp copies tiles of 64 records to shared memory, four tiles deep. Warpgroup 0 takes scores, in FP8: a product for
// every 128 channels, times the keys' scales, and bf16 for the 64 rotated ones; queries are E4M3 times a scale for each
// row. Its weights, in bf16, go to warpgroups 1 and 2, which accumulate 256 output channels each, transposed: a thread
// reads E4M3 codes across keys, makes bf16 of them in registers and multiplies. Scores run a tile or two ahead.
//
// Compiled with COLUMNS: 16 where no block has more rows, or 64.

#include "hopper.cuh"
#include "softmax.cuh"
#include "spans.cuh"
#include "paged.cuh"
#include "dense_decode_fp8_records.cuh"

// Where rows are few, sums leave registers for more of scores and values at a time.
constexpr int SUMS = COLUMNS * 2, PARTS = COLUMNS == 16 ? 4 : 1;
constexpr int FOR_SCORES = COLUMNS == 16 ? 232 : 136, FOR_VALUES = COLUMNS == 16 ? 128 : 176;

// scores[64 x 64] (+)= queries[64 x 32] . keys[64 x 32]^T, E4M3, both K-major in shared memory.
__device__ __forceinline__ void multiply_codes(float (&d)[32], u64 query, u64 key, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(query), "l"(key), "r"(accumulate));
}

// The same for 16 rows of weights.
__device__ __forceinline__ void multiply_few(float *d, const u32 *a, u64 weight) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
        "%12, p, 1, 1, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(weight));
}

// sums[64 channels x COLUMNS] += values[64 x 16] (registers) . weights[16 x COLUMNS], K-major in shared memory.
__device__ __forceinline__ void multiply_weights(float *sums, const u32 *values, u64 weights) {
    if constexpr (COLUMNS == 16) multiply_few(sums, values, weights);
    else multiply_keys(sums, values, weights, 1);
}

__device__ __forceinline__ void issue_group(float (&part)[32], u64 keys, int group) {
    hold(part);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 at = group * CHUNK + k * 32;
        multiply_codes(part, operand(shared + at, 16), keys + at / 16, k > 0);
    }
    commit_products();
}

// scores += part times the keys' scales of a group.
__device__ __forceinline__ void add_group(float (&scores)[32], float (&part)[32], int stage, int group) {
    u32 scales = shared + SCALES + stage * TILE * 16 + threadIdx.x % 4 * 32 + group * 4;
    hold(part);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float even = read_float(scales + j * 128), odd = read_float(scales + j * 128 + 16);
        scores[4 * j] += part[4 * j] * even, scores[4 * j + 1] += part[4 * j + 1] * odd;
        scores[4 * j + 2] += part[4 * j + 2] * even, scores[4 * j + 3] += part[4 * j + 3] * odd;
    }
}

// Rotated channels into `scores`, the first groups into `parts`; not awaited.
__device__ __forceinline__ void begin_scores(float (&scores)[32], float (&parts)[PARTS][32], int stage) {
    u64 keys = operand(shared + KEYS, 16) + stage * (TILE_BYTES / 16);
    hold(scores);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 at = GROUPS * CHUNK + k * 32;
        multiply_keys(scores, operand(shared + at, 16), keys + at / 16, k > 0);
    }
#pragma unroll
    for (int group = 0; group < PARTS; group++) issue_group(parts[group], keys, group);
}

// The other groups, in turns with `other`, and all of them times their scales.
__device__ __forceinline__ void end_scores(float (&scores)[32], float (&parts)[PARTS][32], float (&other)[32],
                                           int stage) {
    u64 keys = operand(shared + KEYS, 16) + stage * (TILE_BYTES / 16);
    if constexpr (PARTS == 4) {
        await_products<0>();
        hold(scores);
#pragma unroll
        for (int group = 0; group < 4; group++) add_group(scores, parts[group], stage, group);
    } else {
        issue_group(other, keys, 1);
        await_products<1>();
        hold(scores);
        add_group(scores, parts[0], stage, 0);
        issue_group(parts[0], keys, 2);
        await_products<1>();
        add_group(scores, other, stage, 1);
        issue_group(other, keys, 3);
        await_products<1>();
        add_group(scores, parts[0], stage, 2);
        await_products<0>();
        add_group(scores, other, stage, 3);
    }
}

// A key's scales in bf16, for both warpgroups that want values: by group, then in the order in which their threads hold
// keys. 2**88 times the scale; codes are read as bf16 2**-120 times their value, and what is left, 2**-32, comes last.
__device__ __forceinline__ void fold_scales(int stage, int buffer) {
    int key = threadIdx.x / 2, half = threadIdx.x % 2;
    float2 scale = read_floats(shared + SCALES + (stage * TILE + key) * 16 + half * 8);
    const float folded = 309485009821345068724781056.0f;
    u32 both = pair(scale.x * folded, scale.y * folded);
    u32 to = shared + FOLDED + buffer * 512 + half * 256 + key % 8 / 2 * 32 + key / 8 * 4 + key % 2 * 2;
    store2(to, both), store2(to + 128, both >> 16);
}

// Weights [rows x keys] to shared memory, and what sums of earlier tiles are to be multiplied by.
__device__ __forceinline__ void pass_weights(const float (&s)[32], const Softmax &softmax, int buffer) {
    u32 to = shared + WEIGHTS + buffer * ROWS * TILE * 2 + threadIdx.x % 4 * 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        store4(to + swizzled(own_row(), j), pair(s[4 * j], s[4 * j + 1]));
        store4(to + swizzled(own_row() + 8, j), pair(s[4 * j + 2], s[4 * j + 3]));
    }
    write_rows_of(state(FACTOR + buffer * 4 * ROWS), softmax.factor);
    bool behind = __any_sync(~0u, softmax.factor[0] != 1.0f || softmax.factor[1] != 1.0f);
    if (threadIdx.x % 32 == 0) store4(state(BEHIND + 16 * buffer + threadIdx.x / 32 * 4), behind);
    show_to_tensor_cores();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(state(READY + 8 * buffer));
}

// Of the scores of both rows that a thread shares: of its query and of the softmax, times log2(e).
__device__ __forceinline__ void read_scales(float (&scale)[2], const Paged &p) {
#pragma unroll
    for (int r = 0; r < 2; r++) scale[r] = p.scale * read_float(state(QUERY + 4 * (own_row() + 8 * r)));
}

// Scores that have come become weights.
__device__ __forceinline__ void finish(float (&scores)[32], Softmax &softmax, const Task &task, int tile) {
    int buffer = tile % 2;
    float scale[2];
    task.hide(scores, tile);
    read_scales(scale, task.p);
    softmax.look(scores, scale);
    softmax.weigh(scores, scale);
    if (tile >= 2) barrier_wait(state(TAKEN + 8 * buffer), (tile / 2 - 1) & 1);
    fold_scales(tile % STAGES, buffer);
    pass_weights(scores, softmax, buffer);
    if (threadIdx.x % 32 == 0) barrier_arrive(state(FREED + 8 * (tile % STAGES)));
}

// The same, while those of the next tile come.
__device__ __forceinline__ void advance(float (&scores)[32], float (&next)[32], float (&parts)[PARTS][32],
                                        Softmax &softmax, const Task &task, int tile) {
    int stage = (tile + 1) % STAGES;
    barrier_wait(state(FULL + 8 * stage), (tile + 1) / STAGES & 1);
    begin_scores(next, parts, stage);
    finish(scores, softmax, task, tile);
    end_scores(next, parts, scores, stage);
    if (threadIdx.x % 32 == 0) barrier_arrive(state(SCORED + 8 * ((tile + 1) % 2)));
}

__device__ __forceinline__ void attend(const Task &task) {
    float even[32], odd[32], parts[PARTS][32], scale[2], factor[2];
    int tile = 0, last = task.tiles - 1;
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        even[i] = odd[i] = 0;
#pragma unroll
        for (int group = 0; group < PARTS; group++) parts[group][i] = 0;
    }
    if (task.tiles) {
        barrier_wait(state(FULL), 0);
        begin_scores(even, parts, 0);
        end_scores(even, parts, odd, 0);
        if (threadIdx.x % 32 == 0) barrier_arrive(state(SCORED));
#pragma unroll 1
        for (; tile + 1 < last; tile += 2) {
            advance(even, odd, parts, softmax, task, tile);
            advance(odd, even, parts, softmax, task, tile + 1);
        }
        if (tile < last) {
            advance(even, odd, parts, softmax, task, tile);
            finish(odd, softmax, task, last);
        } else {
            finish(even, softmax, task, last);
        }
    }
    read_scales(scale, task.p);
    task.close(softmax, scale, factor, 4294967296.0f);
    write_rows_of(state(TOTAL), factor);
    meet<4, 384>();
}

// Codes of 16 channels and 32 keys: each word has two channels beside each other of two keys beside each other.
__device__ __forceinline__ void read_codes(u32 (&word)[4], u32 tile, int half, int step) {
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    u32 at = tile + (half * 2 + step / 4) * CHUNK + swizzled(step % 2 * 32 + lane, step / 2 % 2 * 4 + warp);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(at) : "memory");
}

// As operands of two products: even channels are rows 0 to 7 of a warp's sixteen, odd ones the others.
__device__ __forceinline__ void decode(const u32 (&word)[4], const u32 (&scales)[4], u32 (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 even = (word[i] << 8 & 0x80008000) | (word[i] << 4 & 0x07f007f0);
        u32 odd = (word[i] & 0x80008000) | (word[i] >> 4 & 0x07f007f0);
        values[2 * i] = times(even, scales[i]), values[2 * i + 1] = times(odd, scales[i]);
    }
}

// Sums of four times 64 channels; a thread has, of every eight rows, two, and two channels of them.
__device__ __forceinline__ void rescale(float (&sums)[SUMS], int buffer) {
    u32 behind[4];
    read16(state(BEHIND + 16 * buffer), behind);
    if (!(behind[0] | behind[1] | behind[2] | behind[3])) return;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
        float2 factor = read_floats(state(FACTOR + buffer * 4 * ROWS + j * 32 + threadIdx.x % 4 * 8));
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float *s = sums + m * (SUMS / 4) + 4 * j;
            s[0] *= factor.x, s[1] *= factor.y, s[2] *= factor.x, s[3] *= factor.y;
        }
    }
}

template <int HALF> __device__ __forceinline__ void accumulate(float (&sums)[SUMS], int tile, bool more) {
    constexpr int held = COLUMNS == 16 ? 4 : 2;  // operands that products may be reading
    int stage = tile % STAGES, buffer = tile % 2;
    u32 keys = shared + KEYS + stage * TILE_BYTES, folded = shared + FOLDED + buffer * 512 + threadIdx.x % 4 * 32;
    u64 weights = operand(shared + WEIGHTS, 16) + buffer * (ROWS * TILE * 2 / 16);
    u32 word[2][4], scales[4], values[held][8];
    barrier_wait(state(FULL + 8 * stage), tile / STAGES & 1);
    read_codes(word[0], keys, HALF, 0);
    barrier_wait(state(READY + 8 * buffer), tile / 2 & 1);
    if (tile) rescale(sums, buffer);
    // Scores of the next tile first: they would take three times as long beside values, and everybody waits for them.
    if (more) barrier_wait(state(SCORED + 8 * ((tile + 1) % 2)), (tile + 1) / 2 & 1);
    hold(sums);
#pragma unroll
    for (int step = 0; step < 8; step++) {  // 64 channels by 32 keys
        read16(folded + (HALF * 2 + step / 4) * 128 + step % 2 * 16, scales);
        if (step < 7) read_codes(word[(step + 1) % 2], keys, HALF, step + 1);
        if (step >= held) await_products<held - 1>();
        decode(word[step % 2], scales, values[step % held]);
        begin_products();
#pragma unroll
        for (int k = 0; k < 2; k++)
            multiply_weights(sums + step / 2 * (SUMS / 4), values[step % held] + 4 * k, weights + step % 2 * 4 + k * 2);
        commit_products();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(state(FREED + 8 * stage));
    await_products<0>();
    hold(sums);
    if (threadIdx.x % 32 == 0) barrier_arrive(state(TAKEN + 8 * buffer));
}

template <int HALF> __device__ __forceinline__ void write(const Task &task, const float (&sums)[SUMS]) {
    u16 *to = task.output(0) + HALF * 256 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * 2;
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) {
        int of = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (task.row + of >= task.p.rows) continue;
        float factor = read_float(state(TOTAL + 4 * of));
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const float *s = sums + m * (SUMS / 4) + i / 2 * 4 + i % 2;
            *(u32 *)(to + of * VALUE + 64 * m) = pair(s[0] * factor, s[2] * factor);
        }
    }
}

template <int HALF> __device__ __forceinline__ void follow(const Parameters &p, int tiles) {
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) accumulate<HALF>(sums, tile, tile + 1 < tiles);
    meet<4, 384>();
    write<HALF>(Task(p), sums);
}

// Queries become E4M3 times a scale of their row, which the rotated channels, in bf16, are divided by; a warp a row.
__device__ __forceinline__ void load_queries(const Task &task) {
    int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int row = threadIdx.x / 32; row < ROWS; row += 12) {
        uint4 found[3] = {};
        if (task.row + row < task.p.rows) {
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
        float scale = most > 0 ? most / 448.0f : 1.0f, inverse = 1.0f / scale;
#pragma unroll
        for (int i = 0; i < 24; i++) x[i] *= inverse;
        store16(shared + lane / 8 * CHUNK + swizzled(row, lane % 8), codes(x[0], x[1], x[2], x[3]),
                codes(x[4], x[5], x[6], x[7]), codes(x[8], x[9], x[10], x[11]), codes(x[12], x[13], x[14], x[15]));
        if (lane < 8)
            store16(shared + GROUPS * CHUNK + swizzled(row, lane), pair(x[16], x[17]), pair(x[18], x[19]),
                    pair(x[20], x[21]), pair(x[22], x[23]));
        if (lane == 0) write_float(state(QUERY + 4 * row), scale);
    }
    show_to_tensor_cores();
    meet<1, 384>();
}

extern "C" __global__ void __launch_bounds__(512, 1) dense_decode_fp8(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != shared) __trap();
    let_next_launch_start();
    int group = threadIdx.x / 128;
    if (threadIdx.x == 384) {
        for (int stage = 0; stage < STAGES; stage++)
            barrier_init(state(FULL + 8 * stage), 1 + 32), barrier_init(state(FREED + 8 * stage), 12);
        for (int buffer = 0; buffer < 2; buffer++)
            barrier_init(state(READY + 8 * buffer), 4), barrier_init(state(TAKEN + 8 * buffer), 8),
                barrier_init(state(SCORED + 8 * buffer), 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        show_to_tensor_cores();
    }
    __syncthreads();
    if (group == 3) {  // registers of all four: four times what a thread begins with, 128
        fewer_registers<24>();
        if (threadIdx.x < 416) produce(p, Task(p));
    } else if (group == 0) {
        more_registers<FOR_SCORES>();
        Task task(p);
        if (task.idle()) return;
        load_queries(task);
        attend(task);
    } else if (group == 1) {
        if (FOR_VALUES > 128) more_registers<FOR_VALUES>();
        Task task(p);
        if (task.idle()) return;
        load_queries(task);
        follow<0>(p, task.tiles);
    } else {
        if (FOR_VALUES > 128) more_registers<FOR_VALUES>();
        Task task(p);
        if (task.idle()) return;
        load_queries(task);
        follow<1>(p, task.tiles);
    }
}

extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Parameters p) { combine_spans(p); }
