// Dense MLA decode for Hopper (sm_90a): one block of threads takes 64 rows (heads of query tokens) of a sequence and a
// span of its keys.
//
// A warp copies tiles of keys from pages to shared memory (TMA); two warpgroups attend (latent.cuh). Two blocks of a
// sequence share tiles: each copies half of them to both. Sums of several spans go to memory and `combine` sums them.
// Compiled with CLUSTER: 2 where blocks share tiles, or 1.

#include "hopper.cuh"
#include "outputs.cuh"
#include "softmax.cuh"
#include "spans.cuh"
#include "paged.cuh"

constexpr bool COPIED_BY_THREADS = false, QUEUED = false;
#include "latent.cuh"

struct Parameters : Paged {
    TensorMap keys;  // bf16 [pages, page_tokens, WIDTH], read in boxes of `box` tokens and 64 channels
};

// A task whose keys lie in tiles of latents.
struct Latents : Task {
    static constexpr int before = 0;
    float scale;
    int visible;
    __device__ __forceinline__ Latents(const Paged &p) : Task(p), scale(p.scale), visible(seen()) {}

    template <int BUFFER> __device__ __forceinline__ void mask(float (&s)[32], int tile) const {
        if (first + tile * TILE + TILE > visible) hide(s, tile);
    }

    // Rows of a tile's 256 channels that lie behind the end become zero: whatever is there might be NaN.
    template <int BUFFER, int FIRST> __device__ __forceinline__ void clear(int tile) const {
        int keys = end - first - tile * TILE;
        if (keys >= TILE) return;
        for (int at = keys * 32 + threadIdx.x % 128; at < TILE * 32; at += 128) {
            int row = at / 32, unit = at % 32;
            u32 half = here() + KEYS + BUFFER * TILE_BYTES + FIRST;
            store16(half + unit / 8 * CHUNK + swizzled(row, unit % 8), 0, 0, 0, 0);
        }
        show_to_tensor_cores();
        meet<5 + FIRST / (4 * CHUNK), 128>();
    }

    __device__ __forceinline__ void close(const Softmax &softmax, float (&factor)[2]) const {
        float scales[2] = {scale, scale};
        Task::close(softmax, scales, factor, 1.0f);
    }

    template <int HALF> __device__ __forceinline__ void write(float (&o)[128], float first, float second) const {
        u32 room = here() + HALF * 4 * CHUNK;  // where queries lay
        write_rows<5 + HALF>(output(0) + HALF * 256, p.rows - row, room, o, first, second, AsTheyLie());
    }
};

__device__ __forceinline__ void copy_chunk(const Parameters &p, u32 to, int chunk, const Place &place, u32 arrived) {
    if (CLUSTER == 1) copy_box(to, &p.keys, chunk * 64, place.token, place.page, arrived);
    else copy_box(to, &p.keys, chunk * 64, place.token, place.page, arrived, (1 << CLUSTER) - 1);
}

// The blocks of a cluster share the boxes of a tile among them, and each copies its own to all.
__device__ __forceinline__ void produce(const Parameters &p, const Task &task) {
    int boxes = TILE / p.box, own = boxes / CLUSTER, mine = CLUSTER > 1 ? cluster_rank() * own : 0;
    int lane = threadIdx.x % 32;
    constexpr int turns = 2 / CLUSTER;  // of 32 boxes
    Place next[turns];
#pragma unroll
    for (int i = 0; i < turns; i++)
        next[i].find(task, lane + 32 * i < own ? task.first + (mine + lane + 32 * i) * p.box : task.end);
    for (int tile = 0; tile < task.tiles; tile++) {
        Place place[turns];
        int start = task.first + tile * TILE, buffer = tile % 2;
        int found = min((task.end - start + p.box - 1) / p.box, boxes);
#pragma unroll
        for (int i = 0; i < turns; i++) {
            place[i] = next[i];
            next[i].find(task, lane + 32 * i < own ? start + TILE + (mine + lane + 32 * i) * p.box : task.end);
        }
#pragma unroll
        for (int turn = 0; turn < CHUNKS; turn++) {
            int part = part_at(turn), chunk = chunk_at(turn);
            u32 arrived = full(buffer, part), to = here() + KEYS + buffer * TILE_BYTES + chunk * CHUNK;
            if (begins_part(turn)) {
                if (tile >= 2) barrier_wait(freed(buffer, part), (tile / 2 - 1) & 1);
                if (lane == 0) barrier_expect(arrived, found * p.box * 128 * (part ? 2 : 1));
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < turns; i++) {
                int at = mine + lane + 32 * i;
                if (lane + 32 * i < own && at < found) copy_chunk(p, to + at * p.box * 128, chunk, place[i], arrived);
            }
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(384, 1)
    dense_decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(1024) u8 memory[];
    if (address_of(memory) != here()) __trap();
    let_next_launch_start();
    int group = threadIdx.x / 128;
    if (threadIdx.x == 256) prepare_barriers(1, 0);
    __syncthreads();
    if (CLUSTER > 1) meet_cluster();
    if (group == 2) {  // registers of all three: three times what a thread begins with, 168
        fewer_registers<56>();
        if (threadIdx.x < 288) produce(p, Task(p));
    } else if (group == 0) {
        more_registers<240>();
        Latents task(p);
        if (!task.idle()) {
            load_queries(task.query(), p.rows - task.row);
            attend(task);
        }
    } else {
        more_registers<208>();
        Latents task(p);
        if (!task.idle()) {
            load_queries(task.query(), p.rows - task.row);
            follow(task);
        }
    }
    if (CLUSTER > 1) meet_cluster();  // the other block may still copy to this one
}

extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Parameters p) { combine_spans(p); }
