// Expert choice from router logits: one warp takes one row. Definition: kernels/reference/gate.py.
//
// Compiled with EXPERTS, TOPK, SCORE (0 softmax, 1 sigmoid, 2 square root of softplus), GROUPS, KEPT and BEST (groups,
// groups kept, experts that rank a group), NORMALIZED, HASHED (experts come from a table by token) and SORTED (each lane
// sorts its experts once, so that a choice looks at the first of each lane alone).

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int EACH = (EXPERTS + 31) / 32, SIZE = EXPERTS / GROUPS, WARPS = 4;

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
        total = sum_of(total);
#pragma unroll
        for (int i = 0; i < EACH; i++) score[i] /= total;
    }

    static __device__ __forceinline__ float single(float x, float most) {
        if (SCORE == 0) return expf(x - most);
        if (SCORE == 1) return 1.0f / (1.0f + expf(-x));
        return x != x ? x : sqrtf(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
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
        for (int group = 0; group < GROUPS; group++) {
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

// The experts of a lane, best first: key above, complement of the expert below, so that the lower of equal ones leads.
struct Sorted {
    u64 found[EACH];

    __device__ __forceinline__ Sorted(const Choice &choice, int lane) {
#pragma unroll
        for (int i = 0; i < EACH; i++) found[i] = (u64)choice.key[i] << 32 | (u32)~(i * 32 + lane);
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
        u64 a = found[i], b = found[j];
        found[i] = a > b ? a : b, found[j] = a > b ? b : a;
    }

    // The best expert of all lanes; it is not found again.
    __device__ __forceinline__ int take() {
        u32 mine = (u32)(found[0] >> 32), best = __reduce_max_sync(~0u, mine);
        u32 expert = __reduce_min_sync(~0u, mine == best ? ~(u32)found[0] : ~0u);
        if (~(u32)found[0] == expert) {
#pragma unroll
            for (int i = 0; i + 1 < EACH; i++) found[i] = found[i + 1];
            found[EACH - 1] = ~0u;  // key 0, of no expert
        }
        return expert;
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
#if SORTED
    Sorted sorted(choice, lane);
#pragma unroll
    for (int i = 0; i < TOPK; i++) {
        int expert = sorted.take();
        if (lane == i) mine = expert;
    }
#else
#pragma unroll
    for (int i = 0; i < TOPK; i++) {
        u32 best;
        int expert = choice.take(lane, 0, EXPERTS, best);
        if (lane == i) mine = expert;
    }
#endif
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
    if (NORMALIZED) weight /= sum_of(lane < TOPK ? weight : 0.0f) + 1e-20f;
    if (lane >= TOPK) return;
    if (p.replicas) expert = p.replicas[(u64)expert * p.replica_stride + row % p.replica_counts[expert]];
    p.experts[(u64)row * TOPK + lane] = expert;
    p.weights[(u64)row * TOPK + lane] = weight * p.scaling;
}
