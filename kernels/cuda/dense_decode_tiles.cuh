// Tiles of dense decode: 64 latents in five parts, where they lie in shared memory, who waits for them and who copies
// them there. Knows no product.
//
// Part 0 is the 64 rotated channels, the others are 128 channels each, which are values too. Scores take the parts in
// the order of their numbers. Of parts 1 and 2, which scores want first and values leave last, there are three in
// shared memory, of the others two. Warpgroup 0 frees part 0 and one of values, warpgroup 1 the others.

// Whether warpgroup 1 keeps two thirds of its values back until warpgroup 0 has the next scores: better where memory is
// not the limit. Warpgroup 0 takes the values of part OWN, the other those of OTHER too.
constexpr bool KEPT = CLUSTER > 1;
constexpr int OWN = KEPT ? 4 : 1, OTHER = 5 - OWN;
constexpr int PARTS = 5, CHUNKS = WIDTH / 64, HELD = 4;
constexpr int CHUNK = TILE * 128;  // bytes of 64 rows of 64 channels: the unit of the 128-byte swizzle
// In shared memory: the chunks of queries that are not held in registers, parts, weights, and the state.
constexpr int TILES = (CHUNKS - HELD) * CHUNK, WEIGHTS = TILES + 22 * CHUNK, STATE = WEIGHTS + ROWS * TILE * 2;
constexpr int FULL = 0, FREED = 120, FACTOR = 240, TOTAL = FACTOR + 4 * ROWS;  // in the state
// Where dynamic shared memory starts: a constant, so that operands of products are constants as well. In all other
// addresses, the rank of a cluster's block lies above 24 bits.
constexpr u32 shared = 1024;
__device__ __forceinline__ u32 here() { return CLUSTER > 1 ? shared | cluster_rank() << 24 : shared; }

__device__ constexpr int copies_of(int part) { return part == 1 || part == 2 ? 3 : 2; }
__device__ constexpr int part_bytes(int part) { return part ? 2 * CHUNK : CHUNK; }
// Behind `shared`, the first of a part's copies.
__device__ constexpr u32 place_of(int part) {
    return TILES + (part == 0 ? 20 : part == 1 ? 0 : part == 2 ? 6 : part == 3 ? 12 : 16) * CHUNK;
}
// The first chunk of 64 channels of a part, and the chunks of a tile in the order in which scores take them.
__device__ constexpr int chunk_of(int part) {
    return part == 0 ? 8 : part == OWN ? 0 : part == 2 ? 6 : part == 3 ? 2 : 4;
}
__device__ constexpr int part_at(int turn) { return (turn + 1) / 2; }
__device__ constexpr int chunk_at(int turn) { return chunk_of(part_at(turn)) + (turn > 0 && turn % 2 == 0); }

__device__ __forceinline__ u32 full(int part, int copy) { return here() + STATE + FULL + (part * 3 + copy) * 8; }
__device__ __forceinline__ u32 freed(int part, int copy) { return here() + STATE + FREED + (part * 3 + copy) * 8; }

// By one thread, before a meeting of all.
__device__ __forceinline__ void prepare_barriers() {
#pragma unroll 1
    for (int i = 0; i < PARTS * 3; i++) barrier_init(full(0, i), 1), barrier_init(freed(0, i), 4 * CLUSTER);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    show_to_tensor_cores();
}

// Which copies of the parts a tile has, and how often they were filled before, modulo 2.
struct Copies {
    int of_two = 0, of_three = 0, turn_of_two = 0, turn_of_three = 0;

    __device__ __forceinline__ void next() {
        if (++of_two == 2) of_two = 0, turn_of_two ^= 1;
        if (++of_three == 3) of_three = 0, turn_of_three ^= 1;
    }
    __device__ __forceinline__ int of(int part) const { return copies_of(part) == 3 ? of_three : of_two; }
    __device__ __forceinline__ u32 place(int part) const { return place_of(part) + of(part) * part_bytes(part); }

    __device__ __forceinline__ void await(int part) const {
        barrier_wait(full(part, of(part)), copies_of(part) == 3 ? turn_of_three : turn_of_two);
    }
    // By a whole warpgroup; in a cluster, blocks copy to each other.
    __device__ __forceinline__ void release(int part) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(freed(part, of(part)));
        if (CLUSTER > 1 && threadIdx.x % 32 == 1) barrier_arrive_at_peer(freed(part, of(part)));
    }
    // Keys from `keys` on become zero: what lies behind the end might be NaN. Others must be shown it.
    __device__ __forceinline__ void clear(int part, int keys) const {
        for (int at = keys * 16 + threadIdx.x % 128; at < TILE * 16; at += 128)
            store16(here() + place(part) + at % 16 / 8 * CHUNK + swizzled(at / 16, at % 8), 0, 0, 0, 0);
    }
};

struct Parameters : Paged {
    TensorMap keys;  // bf16 [pages, page_tokens, WIDTH], read in boxes of `box` tokens and 64 channels
};

__device__ __forceinline__ void copy_chunk(const Parameters &p, u32 to, int chunk, const Place &place, u32 arrived) {
    if (CLUSTER == 1) copy_box(to, &p.keys, chunk * 64, place.token, place.page, arrived);
    else copy_box(to, &p.keys, chunk * 64, place.token, place.page, arrived, (1 << CLUSTER) - 1);
}

// By one warp. The blocks of a cluster share the boxes of a tile among them, and each copies its own to all.
__device__ __forceinline__ void produce(const Parameters &p, const Task &task) {
    int boxes = TILE / p.box, own = boxes / CLUSTER, mine = CLUSTER > 1 ? cluster_rank() * own : 0;
    int lane = threadIdx.x % 32;
    constexpr int turns = 2 / CLUSTER;  // of 32 boxes
    Copies copies;
    Place next[turns];
#pragma unroll
    for (int i = 0; i < turns; i++)
        next[i].find(task, lane + 32 * i < own ? task.first + (mine + lane + 32 * i) * p.box : task.end);
    for (int tile = 0; tile < task.tiles; tile++, copies.next()) {
        Place place[turns];
        int start = task.first + tile * TILE, found = min((task.end - start + p.box - 1) / p.box, boxes);
#pragma unroll
        for (int i = 0; i < turns; i++) {
            place[i] = next[i];
            next[i].find(task, lane + 32 * i < own ? start + TILE + (mine + lane + 32 * i) * p.box : task.end);
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            int copy = copies.of(part), count = copies_of(part);
            u32 arrived = full(part, copy), to = here() + copies.place(part);
            if (tile >= count) barrier_wait(freed(part, copy), (tile / count - 1) & 1);
            if (lane == 0) barrier_expect(arrived, found * p.box * 128 * (part ? 2 : 1));
            __syncwarp();
#pragma unroll
            for (int i = 0; i < turns; i++) {
                int at = mine + lane + 32 * i;
                if (lane + 32 * i >= own || at >= found) continue;
                copy_chunk(p, to + at * p.box * 128, chunk_of(part), place[i], arrived);
                if (part) copy_chunk(p, to + CHUNK + at * p.box * 128, chunk_of(part) + 1, place[i], arrived);
            }
        }
    }
}
