// A kernel for tests: the best of given scores by way of indexer_candidates.cuh, a row for each block of threads.
// Compiled with TEAM (threads of a block) and ROOM.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#include "../cuda/indexer_candidates.cuh"

struct Parameters {
    const float *scores;  // [rows, columns]
    int *indices;         // [rows, count]
    int columns, count, first;  // the first score has this index
};

struct Block {
    static __device__ __forceinline__ int thread() { return threadIdx.x; }
    static __device__ __forceinline__ void meet() { __syncthreads(); }
};

extern "C" __global__ void select_best(const __grid_constant__ Parameters p) {
    SHARED_MEMORY(memory);
    Desk &desk = *(Desk *)memory;
    Candidates mine = {(u64 *)(memory + (sizeof(Desk) + 31) / 16), (u32 *)(memory + (sizeof(Desk) + 15) / 16)};
    const float *scores = p.scores + (u64)blockIdx.x * p.columns;
    if (threadIdx.x == 0) *mine.filled = 0;
    Block::meet();
    u32 admitted = 0;
    for (int at = 0; at < p.columns; at += TEAM) {
        if (*mine.filled + TEAM > ROOM) admitted = admitted_after(cut<Block>(desk, mine, p.count));
        int place = at + threadIdx.x;
        Block::meet();
        if (place < p.columns && ordered(scores[place]) > admitted) mine.add(ordered(scores[place]), p.first + place);
        Block::meet();
    }
    if (*mine.filled > p.count) cut<Block>(desk, mine, p.count);
    int *to = p.indices + (u64)blockIdx.x * p.count;
    write_indices<Block>(desk, mine, p.count, p.first, p.first + p.columns, to);
}
