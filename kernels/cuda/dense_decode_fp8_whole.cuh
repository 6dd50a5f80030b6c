// Whole records in shared memory, one after another, and all that lies beside them. Knows no product. A record is an
// odd number of 16 bytes long: eight of them beside each other are read without bank conflicts.

constexpr int STAGES = 4, WORKERS = 2, FEW = 16;
constexpr int TILE_BYTES = TILE * RECORD;
// Queries: for every 128 channels both halves of all rows, then rotated channels. Weights: for every group and 64 keys.
constexpr int FEW_CHUNK = 2 * FEW * 128, FEW_WEIGHTS = FEW * 128;
constexpr int WEIGHTS = GROUPS * FEW_CHUNK + FEW_WEIGHTS;
constexpr int KEYS = (WEIGHTS + WORKERS * GROUPS * FEW_WEIGHTS + 1023) / 1024 * 1024;
constexpr int STATE = KEYS + STAGES * TILE_BYTES;
// In the state: barriers of every stage and warpgroup, then numbers by row.
constexpr int FULL = 0, FREED = 64, TAKEN = 128, QUERY = 160, PEAKS = QUERY + 64, BASES = PEAKS + WORKERS * 256;
constexpr int TOTALS = BASES + WORKERS * 64, STATE_BYTES = TOTALS + WORKERS * 256;

__device__ __forceinline__ u32 state(int offset) { return shared + STATE + offset; }
// Says that a warpgroup's tile is there, and nobody else's: who waits for a barrier must await all of its phases, for a
// wait for the phase behind the next one ends at once.
__device__ __forceinline__ u32 full(int group, int turn) { return state(FULL + 8 * (group * 2 + turn % 2)); }

// Bytes that lie beside each other.
__device__ __forceinline__ void copy_bytes(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// By one warp: tiles of records, as many at once as lie in one page; no key behind the end.
__device__ __forceinline__ void produce(const Parameters &p, const Task &task) {
    int lane = threadIdx.x % 32, box = p.box, boxes = TILE / box;
    Place next[2];
    next[0].find(task, task.first + lane * box), next[1].find(task, task.first + (lane + 32) * box);
    for (int tile = 0, group = 0, turn = 0; tile < task.tiles; tile++) {
        int stage = tile % STAGES, left = task.end - task.first - tile * TILE;
        u32 to = shared + KEYS + stage * TILE_BYTES;
        Place place[2] = {next[0], next[1]};
        int start = task.first + (tile + 1) * TILE;
        next[0].find(task, start + lane * box), next[1].find(task, start + (lane + 32) * box);
        if (tile >= STAGES) barrier_wait(state(FREED + 8 * stage), (tile / STAGES - 1) & 1);
        if (lane == 0) barrier_expect(full(group, turn), min(left, TILE) * RECORD);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int key = (lane + 32 * i) * box;
            if (lane + 32 * i < boxes && key < left)
                copy_bytes(to + key * RECORD, p.pages + place[i].page * p.page_bytes + place[i].token * RECORD,
                           min(box, left - key) * RECORD, full(group, turn));
        }
        if (++group == WORKERS) group = 0, turn++;
    }
}
