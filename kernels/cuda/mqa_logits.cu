// Index scores written to memory. Definition: kernels/reference/mqa_logits.py; how they come about: mqa_logits.cuh.

#include "mqa_logits.cuh"

constexpr u32 SCRATCH = SCORING_END;

struct Parameters {
    Scoring scoring;
    float *logits;  // [tokens, stride]; what a token does not see is left alone
    u64 stride;
};

// The tokens of which this lane has scores: the keys they see, and where these scores go.
struct Writer {
    const Parameters &p;
    int lower[SUMS], upper[SUMS];
    float *to[SUMS];

    __device__ __forceinline__ void begin(u32 bounds, int offset) {
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            int at = offset + first_token() + i;
            lower[i] = read_int(bounds + 16 + 8 * at), upper[i] = has_scores() ? read_int(bounds + 20 + 8 * at) : 0;
            to[i] = p.logits + (u64)(read_int(bounds + 8) + at) * p.stride;
        }
    }
    __device__ __forceinline__ void take(int tile, const Scores &scores) {
        int key = tile * TILE + scores.key;
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (key >= lower[i] && key < upper[i]) to[i][key] = scores.of[i];
    }
    __device__ __forceinline__ void end() {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) mqa_logits(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != shared) __trap();
    prepare_barriers();
    Piece piece(p.scoring, (u32 *)(memory + SCRATCH - shared));
    if (piece.left <= 0) return;
    if (threadIdx.x >= MULTIPLIERS) {
        fewer_registers<40>();
        if (threadIdx.x < MULTIPLIERS + 32) Copier{p.scoring}.run(piece);
    } else {
        more_registers<232>();
        Writer writer{p};
        Multiplier<Writer>{writer}.run(piece.left);
    }
}
