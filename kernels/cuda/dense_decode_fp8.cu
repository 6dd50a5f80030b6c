// Dense MLA decode over FP8 records for Hopper (sm_90a): one block of threads takes 64 rows (heads of query tokens) of
// a sequence and a span of its keys, and multiplies in FP8 what is stored in FP8.
//
// Warpgroup 3 copies tiles of 64 records to shared memory (TMA) and transposes the 512 E4M3 channels that are values,
// as FP8 products want both operands along the sum. Warpgroup 0 takes scores: a product for every 128 channels, times
// the keys' scales, and bf16 for the 64 rotated ones. Its weights times the keys' scales, E4M3 once more, go to
// warpgroups 1 and 2, which accumulate 256 output channels each. Queries are E4M3 times a scale for each row.

#include "hopper.cuh"
#include "dense_decode_fp8_records.cuh"
#include "spans.cuh"

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

// output[64 x 128] += weights[64 x 32] (registers) . values[128 x 32]^T, E4M3, values K-major in shared memory.
__device__ __forceinline__ void multiply_values_e4m3(float *d, const u32 *a, u64 value) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(value));
}

template <int BUFFER> __device__ __forceinline__ void issue_group(float (&part)[32], int group) {
    hold(part);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 at = group * CHUNK + k * 32;
        multiply_codes(part, operand(shared + at, 16), operand(shared + KEYS + BUFFER * TILE_BYTES + at, 16), k > 0);
    }
    commit_products();
}

// scores += part times the keys' scales of a group.
template <int BUFFER> __device__ __forceinline__ void add_group(float (&scores)[32], float (&part)[32], int group) {
    u32 scales = state(SCALES + BUFFER * TILE * 16) + threadIdx.x % 4 * 32 + group * 4;
    hold(part);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float even = read_float(scales + j * 128), odd = read_float(scales + j * 128 + 16);
        scores[4 * j] += part[4 * j] * even, scores[4 * j + 1] += part[4 * j + 1] * odd;
        scores[4 * j + 2] += part[4 * j + 2] * even, scores[4 * j + 3] += part[4 * j + 3] * odd;
    }
}

template <int BUFFER> __device__ __forceinline__ void take_scores(float (&scores)[32], int tile) {
    float first[32], second[32];
#pragma unroll
    for (int i = 0; i < 32; i++) first[i] = second[i] = scores[i] = 0;
    barrier_wait(state(ARRIVED + 8 * BUFFER), tile / 2 & 1);
    hold(scores);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 at = GROUPS * CHUNK + k * 32;
        multiply_keys(scores, operand(shared + at, 16), operand(shared + KEYS + BUFFER * TILE_BYTES + at, 16), k > 0);
    }
    commit_products();
    issue_group<BUFFER>(first, 0);
    issue_group<BUFFER>(second, 1);
    await_products<1>();
    hold(scores);
    add_group<BUFFER>(scores, first, 0);
    issue_group<BUFFER>(first, 2);
    await_products<1>();
    add_group<BUFFER>(scores, second, 1);
    issue_group<BUFFER>(second, 3);
    await_products<1>();
    add_group<BUFFER>(scores, first, 2);
    await_products<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(state(READ + 8 * BUFFER));
    add_group<BUFFER>(scores, second, 3);
}

// Running softmax of the two rows a thread shares.
struct Softmax {
    float most[2], total[2], factor[2];
    int seen;  // keys that all rows see

    __device__ __forceinline__ void mask(float (&s)[32], const Task &task, int start) const {
        if (start + TILE <= seen) return;
        int column = start + threadIdx.x % 4 * 2, limit[2];
#pragma unroll
        for (int r = 0; r < 2; r++) limit[r] = min(task.end, seen + (task.row + own_row() + 8 * r) / task.p.heads);
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (column + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -INFINITE;
    }

    // Of a row's scores: its query's scale and the softmax's, times log2(e).
    static __device__ __forceinline__ float scale(const Parameters &p, int r) {
        return p.scale * read_float(state(QUERY + 4 * (own_row() + 8 * r)));
    }

    // Scores become weights; `factor` is what earlier sums are to be multiplied by.
    __device__ __forceinline__ void take(float (&s)[32], const Parameters &p) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float peak = most[r], scale = Softmax::scale(p, r);
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (i / 2 % 2 == r) peak = fmaxf(peak, s[i]);
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
            factor[r] = 1.0f;
            if ((peak - most[r]) * scale > LAG) {
                factor[r] = power((most[r] - peak) * scale);
                most[r] = peak;
            }
            float base = most[r] == -INFINITE ? 0.0f : most[r] * scale, sum = 0;
#pragma unroll
            for (int i = 0; i < 32; i++)
                if (i / 2 % 2 == r) sum += s[i] = power(s[i] * scale - base);
            total[r] = total[r] * factor[r] + sum;
        }
    }
};

// Of a power of two.
__device__ __forceinline__ float inverse_of(float x) { return __uint_as_float(0x7f000000 - __float_as_uint(x)); }

// Weights times scales, as operands of both k-steps of a group, for the same thread of the warpgroup that wants them.
template <int BUFFER>
__device__ __forceinline__ void pass_group(const float (&s)[32], int group, float reference) {
    u32 scales = state(SCALES + BUFFER * TILE * 16) + threadIdx.x % 4 * 32 + group * 4;
    float spread = reference > 0 ? SPREAD * inverse_of(reference) : 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        u32 words[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float f[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                f[i] = spread * read_float(scales + (4 * k + 2 * half + i / 2) * 128 + i % 2 * 16);
            const float *a = s + 4 * (4 * k + 2 * half);
            words[2 * half] = codes(a[0] * f[0], a[1] * f[1], a[4] * f[2], a[5] * f[3]);
            words[2 * half + 1] = codes(a[2] * f[0], a[3] * f[1], a[6] * f[2], a[7] * f[3]);
        }
        store16(shared + WEIGHTS + (group * 2 + k) * 2048 + threadIdx.x * 16, words[0], words[1], words[2], words[3]);
    }
}

// `LAST`: of each group the power of two that its weights are relative to, no smaller than any scale so far.
template <int BUFFER>
__device__ __forceinline__ void pass_weights(const float (&s)[32], Softmax &softmax, int tile) {
    barrier_wait(state(TURNED + 8 * BUFFER), tile / 2 & 1);
    if (tile) meet<3, 384>();  // the other warpgroups have read the weights of the tile before
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        u32 largest = state(LARGEST + BUFFER * 32 + g * 4);
        float most = fmaxf(read_float(largest), read_float(largest + 16));
        float before = read_float(state(LAST + 16 * (1 - BUFFER) + 4 * g)), reference = before;
        if (most > before) reference = __uint_as_float((__float_as_uint(most) + 0x7fffff) & 0x7f800000);  // seldom
        if (threadIdx.x == 0) {
            write_float(state(LAST + 16 * BUFFER + 4 * g), reference);
            write_float(state(RATIO + 4 * g), most > before ? before * inverse_of(reference) : 1.0f);
        }
        pass_group<BUFFER>(s, g, reference);
    }
    if (threadIdx.x % 4 == 0) {
        write_float(state(FACTOR + 4 * own_row()), softmax.factor[0]);
        write_float(state(FACTOR + 4 * own_row() + 32), softmax.factor[1]);
    }
    signal<2, 384>();
}

template <int BUFFER>
__device__ __forceinline__ void advance(float (&scores)[32], Softmax &softmax, const Task &task, int tile) {
    take_scores<BUFFER>(scores, tile);
    softmax.mask(scores, task, task.first + tile * TILE);
    softmax.take(scores, task.p);
    pass_weights<BUFFER>(scores, softmax, tile);
}

__device__ __forceinline__ void attend(const Task &task) {
    const Parameters &p = task.p;
    float scores[32];
    Softmax softmax;
    softmax.seen = task.length - p.rows / p.heads + 1;  // a query token sees those before it and itself
#pragma unroll
    for (int r = 0; r < 2; r++) softmax.most[r] = -INFINITE, softmax.total[r] = 0;
    for (int tile = 0; tile + 1 < task.tiles; tile += 2) {
        advance<0>(scores, softmax, task, tile);
        advance<1>(scores, softmax, task, tile + 1);
    }
    if (task.tiles % 2) advance<0>(scores, softmax, task, task.tiles - 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = softmax.total[r];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        int of = own_row() + 8 * r;
        float lse = softmax.most[r] * Softmax::scale(p, r) + __log2f(total);
        if (threadIdx.x % 4) continue;
        write_float(state(TOTAL + 4 * of), total != 0 ? 1.0f / (SPREAD * total) : 0.0f);
        if (task.row + of >= p.rows) continue;
        if (task.whole()) p.lse[task.at(of)] = total != 0 ? lse * 0.69314718f : INFINITE;
        else p.partial_lse[task.at(of)] = total != 0 ? lse : -INFINITE;
    }
    meet<4, 384>();
}

template <int HALF, int BUFFER>
__device__ __forceinline__ void accumulate(float (&output)[128], const Task &task, int tile) {
    barrier_wait(state(TURNED + 8 * BUFFER), tile / 2 & 1);
    meet<2, 384>();
    u32 weights[16];
    float first = read_float(state(FACTOR + 4 * own_row())), second = read_float(state(FACTOR + 4 * own_row() + 32));
    float2 ratio = read_floats(state(RATIO + 8 * HALF));
#pragma unroll
    for (int k = 0; k < 4; k++)
        read16(shared + WEIGHTS + (HALF * 4 + k) * 2048 + threadIdx.x % 128 * 16, weights + 4 * k);
    if (tile + 1 < task.tiles) signal<3, 384>();
    bool same = first == 1.0f && second == 1.0f && ratio.x == 1.0f && ratio.y == 1.0f;
    if (tile && !__all_sync(~0u, same))
#pragma unroll
        for (int i = 0; i < 128; i++) output[i] *= (i / 2 % 2 ? second : first) * (i < 64 ? ratio.x : ratio.y);
    hold(output);
    begin_products();
#pragma unroll
    for (int g = 0; g < 2; g++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            u32 values = shared + VALUES + (HALF * 2 + g) * 128 * 128 + BUFFER * 64 + k * 32;
            multiply_values_e4m3(output + 64 * g, weights + 8 * g + 4 * k, operand(values, 16));
        }
    commit_products();
    await_products<0>();
    hold(output);
    if (threadIdx.x % 32 == 0) barrier_arrive(state(SUMMED + 8 * BUFFER));
}

// Of 16 channels a thread holds four beside each other.
template <int HALF> __device__ __forceinline__ void write(const Task &task, const float (&o)[128]) {
    const Parameters &p = task.p;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int of = own_row() + 8 * r;
        if (task.row + of >= p.rows) continue;
        float factor = read_float(state(TOTAL + 4 * of));
        float2 last = read_floats(state(LAST + 16 * ((task.tiles + 1) % 2) + 8 * HALF));
        u64 to = task.at(of) * VALUE + HALF * 256 + threadIdx.x % 4 * 4;
#pragma unroll
        for (int m = 0; m < 16; m++) {
            float f = factor * (m < 8 ? last.x : last.y);
            const float *a = o + 8 * m + 2 * r;
            float4 four = make_float4(a[0] * f, a[4] * f, a[1] * f, a[5] * f);
            if (task.whole()) *(uint2 *)(p.output + to + 16 * m) = make_uint2(pair(four.x, four.y), pair(four.z, four.w));
            else *(float4 *)(p.partial + to + 16 * m) = four;
        }
    }
}

template <int HALF> __device__ __forceinline__ void follow(const Task &task) {
    float output[128];
#pragma unroll
    for (int i = 0; i < 128; i++) output[i] = 0;
    for (int tile = 0; tile + 1 < task.tiles; tile += 2) {
        accumulate<HALF, 0>(output, task, tile);
        accumulate<HALF, 1>(output, task, tile + 1);
    }
    if (task.tiles % 2) accumulate<HALF, 0>(output, task, task.tiles - 1);
    meet<4, 384>();
    write<HALF>(task, output);
}

// Queries become E4M3 times a scale of their row, which the rotated channels, in bf16, are divided by; a warp a row.
__device__ __forceinline__ void load_queries(const Task &task) {
    const Parameters &p = task.p;
    int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int row = threadIdx.x / 32; row < ROWS; row += 12) {
        uint4 found[3] = {};
        if (task.row + row < p.rows) {
            const uint4 *from = (const uint4 *)(p.query + ((u64)task.sequence * p.rows + task.row + row) * WIDTH);
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
    int group = threadIdx.x / 128;
    if (threadIdx.x < 8) write_float(state(LAST + 4 * threadIdx.x), 0);
    if (threadIdx.x == 384) {
        for (int buffer = 0; buffer < 2; buffer++) {
            barrier_init(state(ARRIVED + 8 * buffer), 1 + 4), barrier_init(state(READ + 8 * buffer), 8);
            barrier_init(state(TURNED + 8 * buffer), 4), barrier_init(state(SUMMED + 8 * buffer), 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        show_to_tensor_cores();
    }
    __syncthreads();
    if (group == 3) {  // warpgroup 0 keeps its 128 registers
        fewer_registers<32>();
        Task task(p);
        if (!task.idle()) produce(task);
    } else if (group == 0) {
        Task task(p);
        if (task.idle()) return;
        load_queries(task);
        attend(task);
    } else if (group == 1) {
        more_registers<176>();
        Task task(p);
        if (task.idle()) return;
        load_queries(task);
        follow<0>(task);
    } else {
        more_registers<176>();
        Task task(p);
        if (task.idle()) return;
        load_queries(task);
        follow<1>(task);
    }
}

// One block a row; sequences that were not split are left alone.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Parameters p) {
    int length = max(p.lengths[blockIdx.y], 0);
    if (length <= p.span) return;
    u64 row = (u64)blockIdx.y * p.rows + blockIdx.x;
    Sums sums = sum_spans(p.partial, p.partial_lse, (length + p.span - 1) / p.span, (u64)gridDim.y * p.rows, row);
    float inverse = sums.total != 0 ? 1.0f / sums.total : 0.0f;
    u32 low = pair(sums.values.x * inverse, sums.values.y * inverse);
    u32 high = pair(sums.values.z * inverse, sums.values.w * inverse);
    *(uint2 *)(p.output + row * VALUE + threadIdx.x * 4) = make_uint2(low, high);
    if (threadIdx.x == 0)
        p.lse[row] = sums.total != 0 ? (sums.most + __log2f(sums.total)) * 0.69314718f : INFINITE;
}
