// mHC's projection to 24 coefficients and the sum of squares (reference/mhc.py), x read once, its weight once a block.
//
// A block keeps its columns' weight in shared memory, as what rounding to bf16 gives and what that left beside each
// other, and takes tiles of rows in turns. One thread fetches BOXES of 64 columns of a tile at a time; two warpgroups
// multiply on tensor cores, and square, every other box, and one adds what the other found. Macros: STEPS of 64 columns
// of a part; TILE rows, 32 or 64; BOXES; STAGES of so many boxes on their way.

#include "mhc_products.cuh"
#include "scales.cuh"

#define BOX_BYTES (TILE * 128)
#define HELD_BYTES (64 * 128)  // of a box: products take 64 rows
#define STAGE_BYTES (BOXES * HELD_BYTES)
#define WEIGHTS 48
#define HEAD_BYTES 512  // before all else
#define WEIGHT_BYTES (WEIGHTS * 128)
#define FILLED 1
#define FREE 2
#define TURNED 3
static_assert(STEPS % BOXES == 0 && BOXES % 2 == 0, "whole stages, and both warpgroups have as much to do");

struct Parameters {
    TensorMap x, weight;
    float *z, *squares;
    int rows, parts;
};

struct Head {
    u64 full[STAGES], empty[STAGES];
};
static_assert(sizeof(Head) <= HEAD_BYTES, "fewer stages");

__device__ __forceinline__ float squared(float sum, u32 word) {
    return fmaf(high_half(word), high_half(word), fmaf(low_half(word), low_half(word), sum));
}

// The product and the squares of one box: 64 columns of rows, and of the weight.
__device__ __forceinline__ void take_box(float (&d)[24], float (&sum)[2], u32 box, u32 weight, int row, int half) {
    u64 a = operand(box, 16), b = operand(weight, 16);
    hold(d);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply(d, further(a, 32 * k), further(b, 32 * k), 1);
    commit_products();
    if (row < TILE) {
        u32 seen[16];
#pragma unroll
        for (int k = 0; k < 4; k++) read16(box + swizzled(row, half * 4 + k), seen + 4 * k);
#pragma unroll
        for (int k = 0; k < 16; k++) sum[k % 2] = squared(sum[k % 2], seen[k]);
    }
    await_products<0>();
    hold(d);
}

extern "C" __global__ void __launch_bounds__(288, 1) mhc_project(const __grid_constant__ Parameters p) {
    SHARED_MEMORY(memory);
    Head &head = *(Head *)memory;
    u64 *full = head.full, *empty = head.empty;
    u32 weights = address_of(memory) + HEAD_BYTES + 1023 & ~1023, ring = weights + STEPS * WEIGHT_BYTES;
    u32 other = ring + STAGES * STAGE_BYTES, found = other + 13 * 128 * 4;  // of the second warpgroup, and of both
    int thread = threadIdx.x, lane = thread % 32, group = thread / 128;
    int part = blockIdx.x % p.parts, first = blockIdx.x / p.parts * TILE, stride = gridDim.x / p.parts * TILE;
    if (thread == 0) {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) barrier_init(address_of(full + i), 1), barrier_init(address_of(empty + i), 8);
        show_barriers();
    }
    __syncthreads();
    int slot = 0, parity = 0;
    if (group == 2) {
        if (lane) return;
        int turn = 0;
#pragma unroll 1
        for (int row = first; row < p.rows; row += stride) {
#pragma unroll 1
            for (int i = 0; i < STEPS; i += BOXES, turn++) {
                if (turn >= STAGES) barrier_wait(address_of(empty + slot), parity ^ 1);
                bool once = turn < STEPS / BOXES;  // the weight comes with the first tile
                barrier_expect(address_of(full + slot), BOXES * (BOX_BYTES + once * WEIGHT_BYTES));
#pragma unroll
                for (int j = 0; j < BOXES; j++)
                    copy_box_once(ring + slot * STAGE_BYTES + j * HELD_BYTES, &p.x, (part * STEPS + i + j) * 64, row, 0,
                                  address_of(full + slot));
                for (int j = 0; j < BOXES && once; j++)
                    copy_box(weights + (i + j) * WEIGHT_BYTES, &p.weight, (part * STEPS + i + j) * 64, 0, 0,
                             address_of(full + slot));
                if (++slot == STAGES) slot = 0, parity ^= 1;
            }
        }
        return;
    }
    int mine = thread % 128, row_of_squares = mine / 2, half = mine % 2;
#pragma unroll 1
    for (int row = first; row < p.rows; row += stride) {
        float d[24], sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 24; i++) d[i] = 0;
#pragma unroll 1
        for (int i = 0; i < STEPS; i += BOXES) {
            barrier_wait(address_of(full + slot), parity);
#pragma unroll
            for (int j = 0; j < BOXES; j += 2)
                take_box(d, sum, ring + slot * STAGE_BYTES + (j + group) * HELD_BYTES,
                         weights + (i + j + group) * WEIGHT_BYTES, row_of_squares, half);
            __syncwarp();
            if (lane == 0) barrier_arrive(address_of(empty + slot));
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
        float z[13];  // the products of a coefficient's two weights belong together
#pragma unroll
        for (int i = 0; i < 12; i++) z[i] = d[2 * i] + d[2 * i + 1];
        z[12] = sum[0] + sum[1];
        z[12] += __shfl_xor_sync(~0u, z[12], 1);
        if (group == 1) {
            if (row != first) meet<FREE, 256>();
#pragma unroll
            for (int i = 0; i < 13; i++) store4(other + (i * 128 + mine) * 4, __float_as_uint(z[i]));
            signal<FILLED, 256>();
            continue;
        }
        meet<FILLED, 256>();
#pragma unroll
        for (int i = 0; i < 13; i++) z[i] += read_float(other + (i * 128 + mine) * 4);
        if (row + stride < p.rows) signal<FREE, 256>();
        u64 start = (u64)part * p.rows + row;
        int left = min(p.rows - row, TILE), low = mine / 32 * 16 + lane / 4;
        if (half == 0 && row_of_squares < left) p.squares[start + row_of_squares] = z[12];
#pragma unroll
        for (int j = 0; j < 6; j++) {  // into the order of memory, to be written in whole lines
            store4(found + (low * 24 + 4 * j + lane % 4) * 4, __float_as_uint(z[2 * j]));
            store4(found + ((low + 8) * 24 + 4 * j + lane % 4) * 4, __float_as_uint(z[2 * j + 1]));
        }
        meet<TURNED, 128>();
        uint4 *to = (uint4 *)(p.z + start * 24);
#pragma unroll
        for (int i = 0; i < 3; i++) {
            u32 words[4];
            read16(found + (i * 128 + mine) * 16, words);
            if (i * 128 + mine < left * 6) to[i * 128 + mine] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}
