// Index scores written to memory. Definition: kernels/reference/mqa_logits.py; how they come about: mqa_logits.cuh.

#include "mqa_logits.cuh"

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
            u32 from = bounds + TOKEN_BOUNDS + 8 * at;
            lower[i] = read_int(from), upper[i] = has_scores() ? read_int(from + 4) : 0;
            to[i] = p.logits + (u64)(read_int(bounds + 8) + at) * p.stride;
            asm volatile("" : "+l"(to[i]));  // computed once, not for every tile
        }
    }
    __device__ __forceinline__ void take(int tile, const Scores &scores) {
        int key = tile * TILE + scores.key;
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (key >= lower[i] && key < upper[i]) to[i][key] = scores.of[i];
    }
    __device__ __forceinline__ int room() const { return 1 << 30; }
    __device__ __forceinline__ void end() {}
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) mqa_logits(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != shared) __trap();
    prepare_barriers();
    Piece piece(p.scoring, (u32 *)(memory + SCRATCH - shared));
    if (piece.left <= 0) return;
    if (threadIdx.x >= MULTIPLIERS) {
        fewer_registers<WARPGROUPS == 2 ? 40 : 32>();
        if (threadIdx.x < MULTIPLIERS + 32) Copier{p.scoring}.run(piece);
    } else {
        more_registers<WARPGROUPS == 2 ? 232 : 160>();
        Writer writer{p};
        Multiplier<Writer>{writer}.run(piece.left);
    }
}
