// Just enough of CUDA to run one cluster of blocks after another on a CPU, its threads as coroutines. For kernels
// without assembly.
// Every warp operation takes all 32 threads of a warp, which must arrive at the same one.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define SHARED_MEMORY(name) uint4 *name = emulated::shared_of(emulated::current / emulated::count)

using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x, y, z; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static dim3 threadIdx, blockIdx;

alignas(128) static uint4 memory[SHARED_UNITS * CLUSTER_BLOCKS];

namespace emulated {
constexpr size_t STACK = 1 << 16;
struct Meeting { unsigned turn = 0, arrived = 0; uint64_t values[2][32]; };
static ucontext_t scheduler;
static std::vector<ucontext_t> threads;
static std::vector<bool> finished;
static std::vector<Meeting> warps, blocks;
static Meeting cluster;
static unsigned current, count, together;  // a thread of the cluster, threads of a block, blocks of a cluster
static bool moved;

static uint4 *shared_of(unsigned block) { return memory + (uint64_t)block * SHARED_UNITS; }

static void yield() { swapcontext(&threads[current], &scheduler); }

static void meet(Meeting &at, unsigned expected) {
    unsigned turn = at.turn;
    moved = true;
    if (++at.arrived == expected) at.arrived = 0, at.turn++;
    else while (at.turn == turn) yield();
}

// What every lane of this warp gives.
static const uint64_t *exchange(uint64_t value) {
    Meeting &warp = warps[current / 32];
    uint64_t *values = warp.values[warp.turn % 2];
    values[threadIdx.x % 32] = value;
    meet(warp, 32);
    return values;
}

template <typename T> static uint64_t bits(T value) { uint64_t found = 0; memcpy(&found, &value, sizeof value); return found; }
template <typename T> static T from(uint64_t value) { T found; memcpy(&found, &value, sizeof found); return found; }

static void enter(unsigned thread, unsigned first_block) {
    current = thread, threadIdx = {thread % count, 0, 0}, blockIdx = {first_block + thread / count, 0, 0};
}

// False where threads wait for each other for ever.
template <typename Body> static bool run(unsigned grid, unsigned size, unsigned shared, const Body &body) {
    static const Body *running;
    running = &body, count = size, together = shared;
    unsigned all = size * shared;
    char *stacks = (char *)malloc(all * STACK);
    bool ended = true;
    for (unsigned b = 0; b < grid && ended; b += shared) {
        threads.assign(all, {}), finished.assign(all, false);
        warps.assign(all / 32, {}), blocks.assign(shared, {}), cluster = {};
        for (unsigned t = 0; t < all; t++) {
            getcontext(&threads[t]);
            threads[t].uc_stack.ss_sp = stacks + t * STACK, threads[t].uc_stack.ss_size = STACK;
            threads[t].uc_link = &scheduler;
            makecontext(&threads[t], +[] { (*running)(); finished[current] = moved = true; }, 0);
        }
        for (unsigned left = all; left && ended;) {
            moved = false, left = 0;
            for (unsigned t = 0; t < all; t++) {
                if (finished[t]) continue;
                enter(t, b);
                swapcontext(&scheduler, &threads[t]);
                left += !finished[t];
            }
            ended = moved || !left;
        }
    }
    free(stacks);
    return ended;
}
}  // namespace emulated

static void __syncthreads() { emulated::meet(emulated::blocks[emulated::current / emulated::count], emulated::count); }
static void __cluster_barrier_arrive() {}
static void __cluster_barrier_wait() { emulated::meet(emulated::cluster, emulated::count * emulated::together); }
static void *__cluster_map_shared_rank(const void *mine, unsigned block) {
    char *own = (char *)emulated::shared_of(emulated::current / emulated::count);
    return (char *)emulated::shared_of(block) + ((char *)mine - own);
}
template <typename T> static T __shfl_sync(unsigned, T value, int lane) {
    return emulated::from<T>(emulated::exchange(emulated::bits(value))[lane & 31]);
}
template <typename T> static T __shfl_xor_sync(unsigned mask, T value, int with) {
    return __shfl_sync(mask, value, (threadIdx.x % 32) ^ with);
}
template <typename T> static T __shfl_up_sync(unsigned mask, T value, int step) {
    int lane = threadIdx.x % 32;
    return __shfl_sync(mask, value, lane >= step ? lane - step : lane);
}
static unsigned __ballot_sync(unsigned, bool value) {
    const uint64_t *all = emulated::exchange(value);
    unsigned found = 0;
    for (int i = 0; i < 32; i++) found |= (unsigned)all[i] << i;
    return found;
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
    const uint64_t *all = emulated::exchange(value);
    return (unsigned)*std::max_element(all, all + 32);
}
static unsigned __reduce_min_sync(unsigned, unsigned value) {
    const uint64_t *all = emulated::exchange(value);
    return (unsigned)*std::min_element(all, all + 32);
}
static unsigned atomicAdd(unsigned *to, unsigned value) { unsigned before = *to; *to += value; return before; }
static unsigned atomicOr(unsigned *to, unsigned value) { unsigned before = *to; *to |= value; return before; }
static unsigned atomicMin(unsigned *to, unsigned value) { unsigned before = *to; *to = min(*to, value); return before; }
static unsigned atomicMax(unsigned *to, unsigned value) { unsigned before = *to; *to = max(*to, value); return before; }
static unsigned __float_as_uint(float x) { return (unsigned)emulated::bits(x); }
static float __uint_as_float(unsigned x) { return emulated::from<float>(x); }
static float __int_as_float(int x) { return emulated::from<float>((unsigned)x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static int __ffs(unsigned x) { return __builtin_ffs((int)x); }
static int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static int __ffsll(unsigned long long x) { return __builtin_ffsll((long long)x); }
