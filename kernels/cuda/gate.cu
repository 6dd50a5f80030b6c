// Expert choice from router logits: one warp takes one row. Definition: kernels/reference/gate.py.
//
// Compiled with EXPERTS, TOPK, SCORE (0 softmax, 1 sigmoid, 2 square root of softplus), GROUPS, KEPT and BEST (groups,
// groups kept, experts that rank a group), NORMALIZED and HASHED (experts come from a table by token).

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int EACH = (EXPERTS + 31) / 32, SIZE = EXPERTS / GROUPS, WARPS = 4;
constexpr u32 EXPERT_MASK = EXPERTS > 512 ? 1023 : EXPERTS > 256 ? 511 : 255;
constexpr float LOG2_E = 1.44269504f;

#ifdef __CUDACC__
__device__ __forceinline__ float power_of_2(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
__device__ __forceinline__ float inverse(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
__device__ __forceinline__ float root(float x) {
    asm("sqrt.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
#else
static float power_of_2(float x) { return exp2f(x); }
static float inverse(float x) { return 1.0f / x; }
static float root(float x) { return sqrtf(x); }
#endif

struct Parameters {
    const float *logits;          // [rows, EXPERTS]
    const float *bias;            // [EXPERTS], or null
    const int *table;             // [vocabulary, TOPK], or null
    const long long *tokens;      // [rows], or null
    const int *replicas;          // [EXPERTS, replica_stride] physical experts, or null
    const int *replica_counts;    // [EXPERTS]
    int *experts;                 // [rows, TOPK]
    float *weights;               // [rows, TOPK]
    int rows, replica_stride;
    float scaling;
};

// NaN above all, both zeros equal; never 0.
__device__ __forceinline__ u32 ordered(float score) {
    u32 bits = __float_as_uint(score + 0.0f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return ~0u;
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
__device__ __forceinline__ float unordered(u32 key) {
    return __uint_as_float(key == ~0u ? 0x7fffffffu : key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ float sum_of(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Of one row: this lane has experts lane, lane + 32, ...
struct Scores {
    float score[EACH];

    __device__ __forceinline__ void read(const float *logits, int lane) {
        float most = -__int_as_float(0x7f800000), total = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            score[i] = i * 32 + lane < EXPERTS ? logits[i * 32 + lane] : -__int_as_float(0x7f800000);
            most = fmaxf(most, score[i]);
        }
        if (SCORE == 0) most = unordered(__reduce_max_sync(~0u, ordered(most)));
#pragma unroll
        for (int i = 0; i < EACH; i++) total += score[i] = single(score[i], most);
        if (SCORE) return;
        total = inverse(sum_of(total));
#pragma unroll
        for (int i = 0; i < EACH; i++) score[i] *= total;
    }

    static __device__ __forceinline__ float single(float x, float most) {
        if (SCORE == 0) return power_of_2((x - most) * LOG2_E);
        if (SCORE == 1) return inverse(1.0f + power_of_2(-LOG2_E * x));
        // softplus(x) = max(x, 0) + log(1 + t), t = e**-|x| = half**2. Below zero t is taken out of the root, so that
        // small scores keep their precision; the root is never of a number below log(2). No branch: a row takes eight
        // scores a lane.
        float half = power_of_2(fabsf(x) * (-0.5f * LOG2_E)), t = half * half, log = logarithm(t);
        return root(x >= 0 ? fmaf(t, log, x) : log) * (x >= 0 ? 1.0f : half);
    }

    // log(1 + t) / t for t from 0 to 1, by interpolation at Chebyshev's points: within 1e-7 of its value.
    static __device__ __forceinline__ float logarithm(float t) {
        float y = fmaf(t, -0.00317605701f, 0.0195425283f);
        y = fmaf(t, y, -0.0563736148f), y = fmaf(t, y, 0.105436236f), y = fmaf(t, y, -0.152696669f);
        y = fmaf(t, y, 0.196632743f), y = fmaf(t, y, -0.249516159f), y = fmaf(t, y, 0.333297104f);
        return fmaf(t, fmaf(t, y, -0.499998927f), 1.0f);
    }

    // Of an expert that every lane names for itself.
    __device__ __forceinline__ float of(int expert) const {
        float found = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float other = __shfl_sync(~0u, score[i], expert & 31);
            if (expert >> 5 == i) found = other;
        }
        return found;
    }
};

// The keys of choice; 0: not to be chosen.
struct Choice {
    u32 key[EACH];

    // The best expert from `first` to `end`, the lower of equal ones, and its key; it is not found again.
    __device__ __forceinline__ int take(int lane, int first, int end, u32 &best) {
        u32 mine = 0, at = ~0u;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (i * 32 + lane >= first && i * 32 + lane < end && key[i] > mine) mine = key[i], at = i * 32 + lane;
        best = __reduce_max_sync(~0u, mine);
        u32 expert = __reduce_min_sync(~0u, mine == best ? at : ~0u);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (i * 32 + lane == expert) key[i] = 0;
        return expert;
    }

    // Groups are ranked by the sum of their BEST best scores; experts outside the KEPT best lose their keys.
    __device__ __forceinline__ void keep_groups(int lane) {
        Choice copy = *this;
        u32 rank = 0;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {  // of 32 experts: one register, known when compiled
            float sum = 0;
            for (int i = 0; i < BEST; i++) {
                u32 best;
                copy.take(lane, group * SIZE, group * SIZE + SIZE, best);
                sum += unordered(best);
            }
            if (lane == group) rank = ordered(sum);
        }
        u32 kept = 0;
        for (int i = 0; i < KEPT; i++) {
            u32 best = __reduce_max_sync(~0u, rank);
            u32 group = __reduce_min_sync(~0u, rank == best ? lane : ~0u);
            kept |= 1u << group;
            if (lane == group) rank = 0;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (!(kept >> (i * 32 + lane) / SIZE & 1)) key[i] = 0;
    }
};

// A lane's experts, best first, a word each: the upper bits of the key, then the complement of the expert, so that the
// lower of equal ones leads.
struct Ranked {
    u32 found[EACH];

    __device__ __forceinline__ Ranked(const Choice &choice, int lane) {
#pragma unroll
        for (int i = 0; i < EACH; i++) found[i] = (choice.key[i] & ~EXPERT_MASK) | (EXPERT_MASK - i * 32 - lane);
        merge<1, 1>();
    }

    // Batcher's odd-even merge sort (Knuth, volume 3, 5.2.2, algorithm M).
    template <int P, int K> __device__ __forceinline__ void merge() {
#pragma unroll
        for (int i = K % P; i + K < EACH; i++)
            if ((i - K % P) / K % 2 == 0 && i / (2 * P) == (i + K) / (2 * P)) order(i, i + K);
        if constexpr (K > 1) merge<P, K / 2>();
        else if constexpr (2 * P < EACH) merge<2 * P, 2 * P>();
    }

    __device__ __forceinline__ void order(int i, int j) {
        u32 a = found[i], b = found[j];
        found[i] = max(a, b), found[j] = min(a, b);
    }

    // Lane i's expert is the i-th best. False where words do not tell: a lower bit of a key may decide.
    __device__ __forceinline__ bool choose(int lane, int &mine) {
        u32 before = 0;
        bool told = true;
#pragma unroll
        for (int i = 0; i < min(TOPK + 1, EXPERTS); i++) {
            u32 best = __reduce_max_sync(~0u, found[0]);
            told = told && (best ^ before) > EXPERT_MASK;
            if (lane == i) mine = EXPERT_MASK - (best & EXPERT_MASK);
            if (found[0] == best) {
#pragma unroll
                for (int j = 0; j + 1 < EACH; j++) found[j] = found[j + 1];
                found[EACH - 1] = 0;
            }
            before = best;
        }
        return told;
    }
};

// Of this lane's experts. Read along with the logits: behind the scores, another trip to memory would begin.
struct Bias {
    float of[EACH];
    __device__ __forceinline__ Bias(const float *bias, int lane) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            of[i] = !HASHED && bias && i * 32 + lane < EXPERTS ? bias[i * 32 + lane] : 0.0f;
    }
};

__device__ __forceinline__ int choose(const Parameters &p, const Scores &scores, const Bias &bias, int row, int lane) {
    if (HASHED) return lane < TOPK ? p.table[p.tokens[row] * TOPK + lane] : 0;
    Choice choice;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int expert = i * 32 + lane;
        choice.key[i] = expert < EXPERTS ? ordered(scores.score[i] + bias.of[i]) : 0;
    }
    if (KEPT < GROUPS) choice.keep_groups(lane);
    int mine = 0;
    if (Ranked(choice, lane).choose(lane, mine)) return mine;
#pragma unroll 1
    for (int i = 0; i < TOPK; i++) {
        u32 best;
        int expert = choice.take(lane, 0, EXPERTS, best);
        if (lane == i) mine = expert;
    }
    return mine;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) gate(const __grid_constant__ Parameters p) {
    int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= p.rows) return;
    Bias bias(p.bias, lane);
    Scores scores;
    scores.read(p.logits + (u64)row * EXPERTS, lane);
    int expert = choose(p, scores, bias, row, lane);
    float weight = scores.of(expert);
    if (NORMALIZED) weight *= inverse(sum_of(lane < TOPK ? weight : 0.0f) + 1e-20f);
    if (lane >= TOPK) return;
    if (p.replicas) expert = p.replicas[(u64)expert * p.replica_stride + row % p.replica_counts[expert]];
    p.experts[(u64)row * TOPK + lane] = expert;
    p.weights[(u64)row * TOPK + lane] = weight * p.scaling;
}
