// Records in shared memory as operands of products, their scales apart, and all that lies beside them. Knows no
// product.

constexpr int STAGES = 4;
constexpr int CHUNK = TILE * 128;                 // bytes of 64 rows of 128 bytes: the unit of the 128-byte swizzle
constexpr int TILE_BYTES = (GROUPS + 1) * CHUNK;  // four groups of 128 channels, and 64 in bf16
constexpr int KEYS = (GROUPS + 1) * CHUNK, WEIGHTS = KEYS + STAGES * TILE_BYTES, FOLDED = WEIGHTS + 2 * CHUNK;
// Of a tile's scales, those of a group together, of these the sixteen that a thread wants.
constexpr int OF_THREAD = 80, OF_GROUP = 4 * OF_THREAD, OF_TILE = GROUPS * OF_GROUP;
constexpr int SCALES = FOLDED + STAGES * 512, STATE = SCALES + STAGES * OF_TILE;
// In the state: barriers of every stage and of both buffers of weights, then numbers by row.
constexpr int FULL = 0, FREED = 32, READY = 64, TAKEN = 80, BEHIND = 96, FACTOR = BEHIND + 32;
constexpr int TOTAL = FACTOR + 2 * 4 * ROWS, QUERY = TOTAL + 4 * ROWS, STATE_BYTES = QUERY + 4 * ROWS;

// Addresses of shared memory that are no operands of products: in a cluster, the block's rank lies above 24 bits.
__device__ __forceinline__ u32 here() { return CLUSTER > 1 ? shared | cluster_rank() << 24 : shared; }
__device__ __forceinline__ u32 state(int offset) { return here() + STATE + offset; }
// Scales of keys 16i + 2c, 16i + 2c + 1, 16i + 2c + 8 and 16i + 2c + 9, where c is the lane modulo 4.
__device__ __forceinline__ u32 own_scales(int stage, int group, int i) {
    return here() + SCALES + stage * OF_TILE + group * OF_GROUP + threadIdx.x % 4 * OF_THREAD + i * 16;
}
__device__ __forceinline__ void store2(u32 address, u32 x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((u16)x) : "memory");
}
__device__ __forceinline__ float4 load_scales(const Parameters &p, const Place &place) {
    if (place.page < 0) return make_float4(0, 0, 0, 0);
    return *(const float4 *)(p.pages + place.page * p.page_bytes + place.token * RECORD + 512);
}

// By two warps: a tile's scales, one key a lane; zeros where there is no key.
__device__ __forceinline__ void produce_scales(const Parameters &p, const Task &task) {
    int key = threadIdx.x % 64;
    u32 from = here() + SCALES + key % 8 / 2 * OF_THREAD + (key / 8 * 2 + key % 2) * 4;
    Place place;
    place.find(task, task.first + key);
    float4 next = load_scales(p, place);
    place.find(task, task.first + TILE + key);
#pragma unroll 1
    for (int tile = 0; tile < task.tiles; tile++) {
        int stage = tile % STAGES;
        float4 own = next;
        next = load_scales(p, place);
        place.find(task, task.first + (tile + 2) * TILE + key);
        if (tile >= STAGES) barrier_wait(state(FREED + 8 * stage), (tile / STAGES - 1) & 1);
        u32 to = from + stage * OF_TILE;
        write_float(to, own.x), write_float(to + OF_GROUP, own.y);
        write_float(to + 2 * OF_GROUP, own.z), write_float(to + 3 * OF_GROUP, own.w);
        // 2**88 times the scale: codes are read as bf16 2**-120 times their value; 2**-32, which is left, comes last.
        const float fold = 309485009821345068724781056.0f;
        u32 folded = here() + FOLDED + stage * 512 + key % 8 / 2 * 32 + key / 8 * 4 + key % 2 * 2;
        u32 low = pair(own.x * fold, own.y * fold), high = pair(own.z * fold, own.w * fold);
        store2(folded, low), store2(folded + 128, low >> 16);
        store2(folded + 256, high), store2(folded + 384, high >> 16);
        __syncwarp();
        if (key % 32 == 0) barrier_arrive(state(FULL + 8 * stage));
    }
}

// Sixty-four pairs of bytes of a box of tokens.
__device__ __forceinline__ void copy_pairs(const Parameters &p, u32 to, int pair, const Place &place, u32 full) {
    if (CLUSTER == 1) copy_box(to, &p.records, pair, place.token, place.page, full);
    else copy_box(to, &p.records, pair, place.token, place.page, full, (1 << CLUSTER) - 1);
}

// By one warp: tiles of codes by the copy engine. The blocks of a cluster share the boxes of a tile among them, and each
// copies its own to all.
__device__ __forceinline__ void produce(const Parameters &p, const Task &task) {
    constexpr int turns = 2 / CLUSTER;  // of 32 boxes
    int boxes = TILE / p.box, own = boxes / CLUSTER, mine = CLUSTER > 1 ? cluster_rank() * own : 0;
    int lane = threadIdx.x % 32;
    Place next[turns];
#pragma unroll
    for (int i = 0; i < turns; i++)
        next[i].find(task, lane + 32 * i < own ? task.first + (mine + lane + 32 * i) * p.box : task.end);
    for (int tile = 0; tile < task.tiles; tile++) {
        Place place[turns];
        int stage = tile % STAGES, start = task.first + tile * TILE;
        int found = min((task.end - start + p.box - 1) / p.box, boxes);
        u32 full = state(FULL + 8 * stage), to = here() + KEYS + stage * TILE_BYTES;
#pragma unroll
        for (int i = 0; i < turns; i++) {
            place[i] = next[i];
            next[i].find(task, lane + 32 * i < own ? start + TILE + (mine + lane + 32 * i) * p.box : task.end);
        }
        if (tile >= STAGES) barrier_wait(state(FREED + 8 * stage), (tile / STAGES - 1) & 1);
        if (lane == 0) barrier_expect(full, found * p.box * (GROUPS + 1) * 128);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < turns; i++) {
            int at = mine + lane + 32 * i;
            if (lane + 32 * i >= own || at >= found) continue;
#pragma unroll 1
            for (int chunk = 0; chunk <= GROUPS; chunk++)
                copy_pairs(p, to + chunk * CHUNK + at * p.box * 128, chunk * 64 + (chunk == GROUPS ? 8 : 0), place[i],
                           full);
        }
        __syncwarp();
    }
}
