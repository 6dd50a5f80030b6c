// Records of dense decode in FP8: how they come to shared memory and lie there. Knows no product.

constexpr int RECORD = 656, GROUPS = 4, STAGES = 4;
constexpr int CHUNK = TILE * 128;                 // bytes of 64 rows of 128 bytes: the unit of the 128-byte swizzle
constexpr int TILE_BYTES = (GROUPS + 1) * CHUNK;  // four groups of 128 channels, and 64 in bf16
constexpr int KEYS = (GROUPS + 1) * CHUNK, WEIGHTS = KEYS + STAGES * TILE_BYTES;
constexpr int SCALES = WEIGHTS + 2 * ROWS * TILE * 2, FOLDED = SCALES + STAGES * TILE * 16, STATE = FOLDED + 2 * 512;
// In the state: barriers of every stage and of both buffers of weights, then numbers by row.
constexpr int FULL = 0, FREED = 32, READY = 64, TAKEN = 80, BEHIND = 96, FACTOR = BEHIND + 32;
constexpr int TOTAL = FACTOR + 2 * 4 * ROWS, QUERY = TOTAL + 4 * ROWS, SCORED = QUERY + 4 * ROWS;
constexpr u32 shared = 1024;  // where dynamic shared memory starts: operands of products are constants

struct Parameters : Paged {
    const u8 *pages;
    u64 page_bytes;
    TensorMap records;  // pairs of bytes [pages, page_tokens, RECORD / 2], read in boxes of `box` tokens and 64 pairs
};

__device__ __forceinline__ u32 state(int offset) { return shared + STATE + offset; }
__device__ __forceinline__ float2 read_floats(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void store2(u32 address, u32 x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((u16)x) : "memory");
}
// Four E4M3 codes, the first lowest.
__device__ __forceinline__ u32 codes(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (u32)high << 16 | low;
}
// The sixteen bytes of a key's scales, zeros where there is none: its values then count as zero, whatever lies there.
__device__ __forceinline__ void copy_scales(const Parameters &p, const Place &place, u32 to) {
    const u8 *from = p.pages + (place.page < 0 ? 0 : place.page * p.page_bytes + place.token * RECORD + 512);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(place.page < 0 ? 0 : 16)
                 : "memory");
}

// By one warp: tiles of codes by the copy engine, scales by its lanes, two keys each.
__device__ __forceinline__ void produce(const Parameters &p, const Task &task) {
    int lane = threadIdx.x % 32, boxes = TILE / p.box;
    Place next[2];
    next[0].find(task, task.first + lane), next[1].find(task, task.first + lane + 32);
    for (int tile = 0; tile < task.tiles; tile++) {
        Place place[2] = {next[0], next[1]};
        int stage = tile % STAGES, start = task.first + tile * TILE;
        int found = min((task.end - start + p.box - 1) / p.box, boxes);
        u32 full = state(FULL + 8 * stage), to = shared + KEYS + stage * TILE_BYTES;
        next[0].find(task, start + TILE + lane), next[1].find(task, start + TILE + lane + 32);
        if (tile >= STAGES) barrier_wait(state(FREED + 8 * stage), (tile / STAGES - 1) & 1);
        if (lane == 0) barrier_expect(full, found * p.box * (GROUPS + 1) * 128);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int box = lane + 32 * i, key = box * p.box;
            int low = __shfl_sync(~0u, place[0].page, key % 32), high = __shfl_sync(~0u, place[1].page, key % 32);
            int low_token = __shfl_sync(~0u, place[0].token, key % 32);
            int high_token = __shfl_sync(~0u, place[1].token, key % 32);
            if (box >= found) continue;
#pragma unroll 1
            for (int chunk = 0; chunk <= GROUPS; chunk++)
                copy_box(to + chunk * CHUNK + key * 128, &p.records, chunk * 64 + (chunk == GROUPS ? 8 : 0),
                         key < 32 ? low_token : high_token, key < 32 ? low : high, full);
        }
        __syncwarp();
        copy_scales(p, place[0], shared + SCALES + (stage * TILE + lane) * 16);
        copy_scales(p, place[1], shared + SCALES + (stage * TILE + lane + 32) * 16);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
    }
}
