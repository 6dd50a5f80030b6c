// Records of dense decode in FP8: how they come to shared memory and lie there. Knows no product.

constexpr int TILE = 64, ROWS = 64, WIDTH = 576, VALUE = 512, RECORD = 656, GROUPS = 4;
constexpr int CHUNK = TILE * 128;                 // bytes of 64 rows of 128 bytes: the unit of the 128-byte swizzle
constexpr int TILE_BYTES = (GROUPS + 1) * CHUNK;  // four groups of 128 channels, and 64 in bf16
constexpr int KEYS = (GROUPS + 1) * CHUNK, VALUES = KEYS + 2 * TILE_BYTES, WEIGHTS = VALUES + 2 * TILE * VALUE;
constexpr int STATE = WEIGHTS + GROUPS * ROWS * TILE;
constexpr int ARRIVED = 0, READ = 16, TURNED = 32, SUMMED = 48;  // barriers of both buffers
constexpr int SCALES = 64, LARGEST = SCALES + 2 * TILE * 16, FACTOR = LARGEST + 2 * 32, RATIO = FACTOR + 4 * ROWS;
constexpr int TOTAL = RATIO + 16, LAST = TOTAL + 4 * ROWS, QUERY = LAST + 32;
// A weight is at most 2**LAG, and what is rounded to E4M3 2**LAG * SPREAD: below its largest, 448.
constexpr float LAG = 2, SPREAD = 64;
#define INFINITE __int_as_float(0x7f800000)
constexpr u32 shared = 1024;  // where dynamic shared memory starts: operands of products are constants

struct Parameters {
    TensorMap records;  // pairs of bytes [pages, page_tokens, RECORD / 2], read in boxes of `box` tokens and 64 pairs
    const u8 *pages;    // the same
    const u16 *query;   // bf16 [batch, rows, WIDTH]
    u16 *output;        // bf16 [batch, rows, VALUE]
    float *lse;         // [batch, rows]
    const int *lengths; // [batch]
    const int *tables;  // [batch, table_stride]
    float *partial;     // [spans, batch, rows, VALUE], each divided by its own sum
    float *partial_lse; // [spans, batch, rows], base 2
    u64 page_bytes;
    int rows, heads, page_tokens, box, table_stride, span;
    float scale;        // softmax scale times log2(e)
};

__device__ __forceinline__ u32 state(int offset) { return shared + STATE + offset; }
__device__ __forceinline__ float read_float(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ float2 read_floats(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void write_float(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
// Four E4M3 codes, the first lowest.
__device__ __forceinline__ u32 codes(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return (u32)high << 16 | low;
}
__device__ __forceinline__ int own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// Keys `first` up to `end` of a sequence, for 64 rows from `row`.
struct Task {
    const Parameters &p;
    int sequence, row, length, first, end, tiles;
    __device__ __forceinline__ Task(const Parameters &p) : p(p) {
        row = blockIdx.x * ROWS, sequence = blockIdx.z, length = max(p.lengths[sequence], 0);
        first = blockIdx.y * p.span, end = min(length, first + p.span);
        tiles = (max(end - first, 0) + TILE - 1) / TILE;
    }
    __device__ __forceinline__ bool whole() const { return length <= p.span; }  // nothing is left to combine
    __device__ __forceinline__ bool idle() const { return blockIdx.y && !tiles; }
    __device__ __forceinline__ u64 at(int of) const {
        return ((u64)(whole() ? 0 : blockIdx.y) * gridDim.z + sequence) * p.rows + row + of;
    }
};

// Where a token lies; no page at or behind the end.
struct Place {
    int page, token;
    __device__ __forceinline__ void find(const Task &task, int key) {
        page = -1, token = 0;
        if (key >= task.end) return;
        int block = key / task.p.page_tokens;
        page = task.p.tables[(u64)task.sequence * task.p.table_stride + block];
        token = key - block * task.p.page_tokens;
    }
};

__device__ __forceinline__ void copy_tile(const Task &task, int tile) {
    const Parameters &p = task.p;
    int lane = threadIdx.x % 32, start = task.first + tile * TILE, buffer = tile % 2;
    int found = min((task.end - start + p.box - 1) / p.box, TILE / p.box);
    u32 arrived = state(ARRIVED + 8 * buffer), to = shared + KEYS + buffer * TILE_BYTES;
    if (lane == 0) barrier_expect(arrived, found * p.box * (GROUPS + 1) * 128);
    __syncwarp();
    for (int j = lane; j < found; j += 32) {
        Place place;
        place.find(task, start + j * p.box);
#pragma unroll 1
        for (int chunk = 0; chunk <= GROUPS; chunk++)
            copy_box(to + chunk * CHUNK + j * p.box * 128, &p.records, chunk * 64 + (chunk == GROUPS ? 8 : 0),
                     place.token, place.page, arrived);
    }
}

// The four scales of this thread's key of a tile; zeros at or behind the end.
__device__ __forceinline__ uint4 scales_of(const Task &task, int tile) {
    Place place;
    place.find(task, task.first + tile * TILE + threadIdx.x % 128);
    if (threadIdx.x % 128 >= TILE || place.page < 0) return make_uint4(0, 0, 0, 0);
    return *(const uint4 *)(task.p.pages + place.page * task.p.page_bytes + place.token * RECORD + 512);
}

// A tile's scales, and the largest of each group and warp.
__device__ __forceinline__ void keep_scales(const uint4 &scales, int buffer) {
    int thread = threadIdx.x % 128;
    if (thread >= TILE) return;
    store16(state(SCALES + (buffer * TILE + thread) * 16), scales.x, scales.y, scales.z, scales.w);
    u32 most[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) most[g] = __reduce_max_sync(~0u, most[g]);  // as integers: none is negative
    if (thread % 32 == 0) store16(state(LARGEST + buffer * 32 + thread / 2), most[0], most[1], most[2], most[3]);
}

// Codes behind the end become zero: whatever is there might be NaN.
__device__ __forceinline__ void clear_tail(int keys, int buffer) {
    for (int at = keys * 32 + threadIdx.x % 128; at < TILE * 32; at += 128)
        store16(shared + KEYS + buffer * TILE_BYTES + at % 32 / 8 * CHUNK + swizzled(at / 32, at % 8), 0, 0, 0, 0);
    meet<6, 128>();
}

// A tile's 64 keys x 512 channels become 512 channels x 64 keys, beside those of the tile before in rows of 128 bytes.
// Of 16 channels the even ones come first; of 32 keys, four beside each other are 2t, 2t + 1, 8 + 2t and 9 + 2t, as
// scores leave them in a thread's registers.
__device__ __forceinline__ void transpose(int buffer) {
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    u32 keys = shared + KEYS + buffer * TILE_BYTES + warp * CHUNK;
    u32 values = shared + VALUES + (warp * 128 + lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int key = half * 32 + lane, to = buffer * 4 + half * 2 + lane / 8 % 2;
#pragma unroll 4
        for (int unit = 0; unit < 8; unit++) {
            u32 r[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                         : "r"(keys + swizzled(key, unit)) : "memory");
            u32 even = __byte_perm(r[0], r[1], 0x6420), odd = __byte_perm(r[0], r[1], 0x7531);
            u32 even2 = __byte_perm(r[2], r[3], 0x6420), odd2 = __byte_perm(r[2], r[3], 0x7531);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             values + unit * 2048 + ((to ^ lane % 8) << 4)),
                         "r"(even), "r"(even2), "r"(odd), "r"(odd2) : "memory");
        }
    }
}

__device__ __forceinline__ void produce(const Task &task) {
    int thread = threadIdx.x % 128;
    if (thread < 32)
        for (int tile = 0; tile < min(task.tiles, 2); tile++) copy_tile(task, tile);
    uint4 scales = scales_of(task, 0);
    for (int tile = 0; tile < task.tiles; tile++) {
        int buffer = tile % 2, keys = task.end - task.first - tile * TILE;
        if (tile >= 2) barrier_wait(state(SUMMED + 8 * buffer), (tile / 2 - 1) & 1);
        keep_scales(scales, buffer);
        scales = scales_of(task, tile + 1);
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(state(ARRIVED + 8 * buffer));
        barrier_wait(state(ARRIVED + 8 * buffer), tile / 2 & 1);
        if (keys < TILE) clear_tail(keys, buffer);
        transpose(buffer);
        show_to_tensor_cores();
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(state(TURNED + 8 * buffer)), barrier_arrive(state(READ + 8 * buffer));
        if (thread < 32 && tile + 2 < task.tiles) {
            barrier_wait(state(READ + 8 * buffer), tile / 2 & 1);
            copy_tile(task, tile + 2);
        }
    }
}
