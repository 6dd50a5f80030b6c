// What gemm_*.cu take from their headers, as plain C++ for `emulated.cuh`: barriers that count bytes, boxes laid down
// with the 128-byte swizzle, FP8 products read through their descriptors. Copies and products are done when they begin.

#include <map>

#define __align__(x)

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

struct float2 { float x, y; };
struct alignas(64) TensorMap { u64 words[16]; };  // address, then extents, strides in bytes of y and z, box
static dim3 gridDim = {GRID, 1, 1};
extern uint4 memory[];

namespace emulated {
struct Barrier { int count, pending; long bytes; unsigned phase; };
static std::map<u32, Barrier> barriers;
static std::map<u32, Meeting> meetings;
static u32 arrived;  // threads at the barrier of their cluster, of all clusters so far

static u32 block() { return current / count; }  // within the cluster

static u8 *at(u32 address) { return (u8 *)memory + address; }
template <typename T> static T &value(u32 address) { return *(T *)at(address); }
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

static void settle(Barrier &barrier) {
    moved = true;
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = barrier.count, barrier.phase++;
}

static float e4m3(u8 code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    if ((code & 127) == 127) size = NAN;
    return code & 128 ? -size : size;
}
}  // namespace emulated

// Addresses name the block of the cluster too.
static u32 address_of(const void *p) {
    return (u32)((const u8 *)p - (const u8 *)memory) + emulated::block() * SHARED_UNITS * 16;
}
static void barrier_init(u32 barrier, u32 count) {
    emulated::barriers[barrier] = {(int)count, (int)count, 0, 0};
}
static void barrier_arrive(u32 barrier) {
    emulated::barriers[barrier].pending--;
    emulated::settle(emulated::barriers[barrier]);
}
static void barrier_expect(u32 barrier, u32 bytes) {
    emulated::barriers[barrier].bytes += bytes;
    barrier_arrive(barrier);
}
static void barrier_wait(u32 barrier, u32 parity) {
    while ((emulated::barriers[barrier].phase & 1) == parity) emulated::yield();
}
static void landed(u32 barrier, u32 bytes) {
    emulated::barriers[barrier].bytes -= bytes;
    emulated::settle(emulated::barriers[barrier]);
}
static void show_barriers() {}
static void prefetch_map(const void *) {}
static emulated::Meeting &meeting(u32 id) { return emulated::meetings[emulated::block() * 16 + id]; }
template <int ID, int THREADS> static void meet() { emulated::meet(meeting(ID), THREADS); }
template <int ID, int THREADS> static void signal() {
    emulated::Meeting &at = meeting(ID);
    emulated::moved = true;
    if (++at.arrived == THREADS) at.arrived = 0, at.turn++;
}
static void __syncwarp() { emulated::exchange(0); }
template <int N> static void hold(float (&)[N]) {}
static void begin_products() {}
static void commit_products() {}
template <int PENDING> static void await_products() {}
template <int COUNT> static void more_registers() {}
template <int COUNT> static void fewer_registers() {}
static void arrive_cluster() { emulated::arrived++, emulated::moved = true; }
static void await_cluster() {
    u32 all = emulated::count * emulated::together * (blockIdx.x / emulated::together + 1);
    while (emulated::arrived < all) emulated::yield();
}
static u32 address_in(u32 address, u32 rank) {
    return address % (SHARED_UNITS * 16) + rank * SHARED_UNITS * 16;
}

constexpr u64 READ_ONCE = 0, READ_AGAIN = 0;
static void copy_bytes(u32 to, const void *from, u32 bytes, u32 barrier, u64) {
    memcpy(emulated::at(to), from, bytes);
    landed(barrier, bytes);
}
static void copy_box(u32 to, const TensorMap *map, int x, int y, int z, u32 barrier, u64) {
    const u64 *w = map->words;
    for (u64 row = 0; row < w[7]; row++)
        for (u64 column = 0; column < w[6]; column++) {
            bool inside = x + column < w[1] && y + row < w[2] && (u64)z < w[3];
            const u8 *from = (const u8 *)w[0] + z * w[5] + (y + row) * w[4] + x + column;
            *emulated::at(emulated::swizzled(to + row * w[6] + column)) = inside ? *from : 0;
        }
    landed(barrier, w[6] * w[7]);
}

static u64 operand(u32 address, u32) { return address; }
static u64 further(u64 operand, int bytes) { return operand + bytes; }

template <int COLUMNS> struct Product {
    static void add(float (&d)[COLUMNS / 2], const float (&a)[2][32], u64 b, int accumulate) {
        for (int i = 0; i < COLUMNS / 2; i++) {
            float sum = accumulate ? d[i] : 0;
            u32 column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            for (int k = 0; k < 32; k++)
                sum += a[i / 2 % 2][k] * emulated::e4m3(*emulated::at(emulated::swizzled(b + column * 128 + k)));
            d[i] = sum;
        }
    }
    static void run(float (&d)[COLUMNS / 2], u64 a, u64 b, int accumulate) {
        float rows[2][32];
        u32 row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        for (int i = 0; i < 64; i++)
            rows[i / 32][i % 32] =
                emulated::e4m3(*emulated::at(emulated::swizzled(a + (row + i / 32 * 8) * 128 + i % 32)));
        add(d, rows, b, accumulate);
    }
    static void run(float (&d)[COLUMNS / 2], const u32 *a, u64 b, int accumulate) {
        float rows[2][32];
        for (int i = 0; i < 16; i++) {
            u32 word = __shfl_sync(~0u, a[i / 4], threadIdx.x / 4 * 4 + i % 4);
            for (int byte = 0; byte < 4; byte++)
                rows[i / 4 % 2][i / 8 * 16 + i % 4 * 4 + byte] = emulated::e4m3(word >> 8 * byte & 255);
        }
        add(d, rows, b, accumulate);
    }
};

template <typename T> static T __ldg(const T *from) { return *from; }
static u32 pick_bytes(u32 x, u32 y, u32 selector) {
    u64 bytes = (u64)y << 32 | x;
    u32 found = 0;
    for (int i = 0; i < 4; i++) found |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
static void store16(u32 to, u32 a, u32 b, u32 c, u32 d) {
    u32 words[4] = {a, b, c, d};
    memcpy(emulated::at(to), words, 16);
}
static void read16(u32 address, u32 *to) { memcpy(to, emulated::at(address), 16); }
static float2 read_pair(u32 address) { return emulated::value<float2>(address); }
static u32 read_word(u32 address) { return emulated::value<u32>(address); }
static void store_float(u32 address, float x) { emulated::value<float>(address) = x; }
static void send_float(u32 address, float x, u32 barrier) {
    store_float(address, x);
    landed(barrier, 4);
}
static void send_sums(u32 to, const float *x, u32 barrier) {
    memcpy(emulated::at(to), x, 16);
    landed(barrier, 16);
}
static void load16(const u8 *from, u32 (&to)[4]) { memcpy(to, from, 16); }
static void store4(u32 to, u32 x) { emulated::value<u32>(to) = x; }
static void show_to_tensor_cores() {}
static void await_launch_before() {}
static u32 transpose(u32 x) {
    u32 lane = threadIdx.x % 32, found = 0;
    for (u32 i = 0; i < 2; i++) {
        u32 word = __shfl_sync(~0u, x, (lane % 4 * 2 + i) * 4 + lane / 8);
        found |= (word >> lane / 4 % 2 * 16 & 0xffff) << 16 * i;
    }
    return found;
}
static void store_squares(u32 to, u32 a, u32 b, u32 c, u32 d) {
    u32 words[4] = {a, b, c, d}, lane = threadIdx.x % 32;
    for (int i = 0; i < 8; i++) {
        u32 row = __shfl_sync(~0u, to, i / 2 * 8 + lane % 4 * 2 + i % 2);
        emulated::value<u16>(row + lane / 4 * 2) = (u16)(words[i / 2] >> i % 2 * 16);
    }
}
static void write16(void *to, u32 a, u32 b, u32 c, u32 d) {
    u32 words[4] = {a, b, c, d};
    memcpy(to, words, 16);
}
static u32 rounded(float x) {  // to the nearest bf16, ties to even
    u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 pair(float low, float high) { return rounded(low) | rounded(high) << 16; }
