// Exact top-k by index: CLUSTER blocks of threads take one row, each a part of it, and read each other's shared memory.
// Definition: kernels/reference/top_k.py.
//
// A row is read once. Its scores become integers in the same order, and with the place behind them no two are equal;
// the k-th of these is found by counting digits from the top (13 bits, then 10 at a time), each count among those that
// share the digits found so far. Where CACHED, the upper halves of the integers stay in shared memory, and only those
// few whose upper half is the k-th's are read again. BLOCKS: how many of them a multiprocessor is to have at a time.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int THREADS = 1024, PLACE_BITS = 21, DIGIT_BITS = 10, DIGITS = 1 << DIGIT_BITS;
constexpr int FIRST_LOW = 32 + PLACE_BITS - 13, HALF_LOW = 32 + PLACE_BITS - 16, FIRST_DIGITS = 1 << 13;
constexpr int LISTED = FIRST_DIGITS / 2;  // as many fit where the first digits were counted

struct Parameters {
    const float *scores;  // [rows, stride]
    const int *lengths;   // [rows], or null: every row has `columns`
    int *indices;         // [rows, count]
    u64 stride;
    int columns, count;
};

struct Shared {
    union {
        u32 first[FIRST_DIGITS];
        u64 list[LISTED];
    };
    u32 digits[DIGITS], sums[32], totals[8];
    u32 digit, above, inside, listed;
    u64 least;
    uint4 halves[1];  // of every thread's scores, `pitch` units of eight
};

#ifndef SHARED_MEMORY
#define SHARED_MEMORY(name) extern __shared__ uint4 name[]
#endif

__device__ __forceinline__ int rank() { return blockIdx.x % CLUSTER; }

// What another block of the cluster has where this one has `mine`.
template <typename T> __device__ __forceinline__ T *of_block(int other, T *mine) {
#if CLUSTER > 1
    return (T *)__cluster_map_shared_rank(mine, other);
#else
    return mine;
#endif
}

__device__ __forceinline__ void meet_cluster() {
#if CLUSTER > 1
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
#else
    __syncthreads();
#endif
}

// NaN above all, both zeros equal.
__device__ __forceinline__ u32 ordered(float score) {
    u32 bits = __float_as_uint(score + 0.0f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return ~0u;
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ u64 composite(u32 key, int place) {
    return (u64)key << PLACE_BITS | (u64)((1 << PLACE_BITS) - 1 - place);
}

// A row and this block's part of it: thread t has places start + (t << log) .. start + (t + 1 << log), in eights.
struct Row {
    const float *scores;
    int length, log, pitch, start;
    __device__ __forceinline__ Row(const Parameters &p) {
        int row = blockIdx.x / CLUSTER;
        scores = p.scores + row * p.stride;
        length = p.lengths ? min(max(p.lengths[row], 0), p.columns) : p.columns;
        for (log = 3; THREADS * CLUSTER << log < length;) log++;
        pitch = 1 << (log - 3) | 1;  // odd: neighbours' units lie in different banks
        start = rank() * THREADS << log;
    }
    __device__ __forceinline__ u64 at(int place) const { return composite(ordered(scores[place]), place); }
};

// Of a value per thread, the sum over the threads before.
__device__ __forceinline__ u32 sum_before(Shared &s, u32 value) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = value;
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) s.sums[warp] = sum;
    __syncthreads();
    u32 base = lane < warp ? s.sums[lane] : 0;
    for (int step = 16; step; step /= 2) base += __shfl_xor_sync(~0u, base, step);
    __syncthreads();
    return base + sum - value;
}

// The same over all threads of the cluster, for values that each warp or each thread has.
__device__ __forceinline__ u32 sum_before_in_cluster(Shared &s, u32 value) {
    u32 before = sum_before(s, value);
#if CLUSTER > 1
    if (threadIdx.x == THREADS - 1)
        for (int i = 0; i < CLUSTER; i++) of_block(i, s.totals)[rank()] = before + value;
    meet_cluster();
    for (int i = 0; i < rank(); i++) before += s.totals[i];
#endif
    return before;
}

// Whose counts decide: this block's, those of all blocks (each finds the same), or those of all with each block looking
// through a part of the digits and telling the others.
enum Counts { OWN, ALL, SHARED };

template <int EACH> struct alignas(EACH >= 4 ? 16 : EACH * 4) Span { u32 of[EACH]; };

// The digit of the `need`-th from above, how many have higher ones and how many this one. EACH digits a thread.
template <int EACH, Counts WHOSE> __device__ __forceinline__ void find(Shared &s, const u32 *counts, u32 need) {
    int thread = threadIdx.x + (WHOSE == SHARED ? rank() * THREADS : 0);
    int top = (THREADS * (WHOSE == SHARED ? CLUSTER : 1) - thread) * EACH - 1;
    Span<EACH> mine = {};
#pragma unroll
    for (int block = 0; block < (WHOSE == OWN ? 1 : CLUSTER); block++) {
        Span<EACH> theirs = *(const Span<EACH> *)(WHOSE == OWN ? counts + top + 1 - EACH
                                                               : of_block(block, counts) + top + 1 - EACH);
#pragma unroll
        for (int i = 0; i < EACH; i++) mine.of[i] += theirs.of[i];
    }
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += mine.of[i];
    u32 above = WHOSE == SHARED ? sum_before_in_cluster(s, sum) : sum_before(s, sum);
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) {
        if (above < need && need <= above + mine.of[i])
            for (int block = 0; block < (WHOSE == SHARED ? CLUSTER : 1); block++) {
                Shared &to = WHOSE == SHARED ? *of_block(block, &s) : s;
                to.digit = top - (EACH - 1 - i), to.above = above, to.inside = mine.of[i];
            }
        above += mine.of[i];
    }
    if (WHOSE == SHARED) meet_cluster();
    else __syncthreads();
}

// Four scores from `place` on; those behind the end are left alone.
__device__ __forceinline__ float4 read4(const Row &row, int place) {
    if (place + 4 <= row.length) return *(const float4 *)(row.scores + place);
    float4 found = make_float4(0, 0, 0, 0);
    if (place < row.length) found.x = row.scores[place];
    if (place + 1 < row.length) found.y = row.scores[place + 1];
    if (place + 2 < row.length) found.z = row.scores[place + 2];
    return found;
}

// First digits counted and upper halves kept; zero, which no score has, stands behind the end.
__device__ __forceinline__ void take4(Shared &s, const Row &row, int place, float4 four) {
    u32 keys[4] = {ordered(four.x), ordered(four.y), ordered(four.z), ordered(four.w)};
    if (place + 4 <= row.length) {
#pragma unroll
        for (int i = 0; i < 4; i++) atomicAdd(&s.first[keys[i] >> 19], 1u);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (place + i < row.length) atomicAdd(&s.first[keys[i] >> 19], 1u);
            else keys[i] = 0;
        }
    }
#if CACHED
    int owner = place - row.start >> row.log, unit = (place & ((1 << row.log) - 1)) / 8;
    uint2 *to = (uint2 *)(s.halves + owner * row.pitch + unit) + place / 4 % 2;
    *to = make_uint2(keys[0] >> 16 | (keys[1] & 0xffff0000u), keys[2] >> 16 | (keys[3] & 0xffff0000u));
#endif
}

__device__ __forceinline__ void read_row(Shared &s, const Row &row) {
    constexpr int AHEAD = BLOCKS == 1 ? 4 : 2;
    int turns = 1 << (row.log - 2);
    for (int turn = 0; turn < turns; turn += AHEAD) {
        float4 four[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) four[i] = read4(row, row.start + ((turn + i) * THREADS + threadIdx.x) * 4);
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (turn + i < turns) take4(s, row, row.start + ((turn + i) * THREADS + threadIdx.x) * 4, four[i]);
    }
}

// Bit 0: the lower half of a word is zero, bit 1: the upper one.
__device__ __forceinline__ u32 zero_halves(u32 word) {
    u32 found = ((word & 0x7fff7fffu) + 0x7fff7fffu | word) >> 15 & 0x10001;  // those that are not
    return ~(found | found >> 15) & 3;
}

// `act(composite)` for every score of this thread's whose first digits are `digit`.
template <typename Act> __device__ __forceinline__ void each_of(Shared &s, const Row &row, u32 digit, const Act &act) {
#if CACHED
    int start = row.start + (threadIdx.x << row.log);
    for (int unit = 0; unit < 1 << (row.log - 3); unit++) {
        uint4 found = s.halves[threadIdx.x * row.pitch + unit];
        u32 words[4] = {found.x, found.y, found.z, found.w}, bits = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) bits |= zero_halves((words[i] ^ digit * 0x80008u) & 0xfff8fff8u) << 2 * i;
        for (; bits; bits &= bits - 1) act(row.at(start + unit * 8 + __ffs(bits) - 1));
    }
#else
    constexpr int AHEAD = 4;
    int end = min(row.start + (THREADS << row.log), row.length);
    for (int first = row.start + threadIdx.x * 4; first < end; first += AHEAD * THREADS * 4) {
        float4 four[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) four[i] = read4(row, first + i * THREADS * 4);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int place = first + i * THREADS * 4;
            float scores[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u64 found = composite(ordered(scores[j]), place + j);
                if (place + j < end && found >> FIRST_LOW == digit) act(found);
            }
        }
    }
#endif
}

// Of the composites that share a first digit, the `need`-th, cut behind the digit that decides. IN_LIST: all of them
// lie in this block's list, and it decides alone; otherwise each block counts its own.
template <bool IN_LIST>
__device__ __forceinline__ u64 refine(Shared &s, const Row &row, u32 first, u32 inside, u32 need) {
    u32 listed = inside;
    u64 found = first;
    int low = FIRST_LOW;
    while (inside != need) {
        s.digits[threadIdx.x] = 0;
        __syncthreads();
        auto count = [&](u64 one) {
            if (one >> low == found) atomicAdd(&s.digits[one >> (low - DIGIT_BITS) & (DIGITS - 1)], 1u);
        };
        if (IN_LIST)
            for (u32 i = threadIdx.x; i < listed; i += THREADS) count(s.list[i]);
        else each_of(s, row, first, count);
        if (IN_LIST) __syncthreads();
        else meet_cluster();
        find<1, IN_LIST ? OWN : ALL>(s, s.digits, need);
        low -= DIGIT_BITS;
        found = found << DIGIT_BITS | s.digit, inside = s.inside, need -= s.above;
        if (IN_LIST) __syncthreads();
        else meet_cluster();
    }
    return found << low;
}

// The k-th composite in a row that has more than `need` scores, cut behind the digit that decides.
__device__ __forceinline__ u64 threshold(Shared &s, const Row &row, u32 need) {
    find<FIRST_DIGITS / THREADS / CLUSTER, CLUSTER == 1 ? OWN : SHARED>(s, s.first, need);
    u32 first = s.digit, inside = s.inside;
    need -= s.above;
    if (inside == need) return (u64)first << FIRST_LOW;
    if (inside > LISTED) return refine<false>(s, row, first, inside, need);
    Shared &leader = *of_block(0, &s);
    each_of(s, row, first, [&](u64 one) { leader.list[atomicAdd(&leader.listed, 1u)] = one; });
    meet_cluster();
    if (CLUSTER == 1) return refine<true>(s, row, first, inside, need);
    if (rank() == 0) {
        u64 found = refine<true>(s, row, first, inside, need);
        if (threadIdx.x < CLUSTER) of_block(threadIdx.x, &s)->least = found;
    }
    meet_cluster();
    return s.least;
}

#if CACHED
// The places not below `least`, in order.
__device__ __forceinline__ void write(Shared &s, const Row &row, u64 least, int *to) {
    u32 half = (u32)(least >> HALF_LOW);
    int start = row.start + (threadIdx.x << row.log);
    u64 taken = 0;
    for (int unit = 0; unit < 1 << (row.log - 3); unit++) {
        uint4 found = s.halves[threadIdx.x * row.pitch + unit];
        u32 words[4] = {found.x, found.y, found.z, found.w}, bits = 0, equal = 0, above = half << 16 | 0xffff;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (words[i] << 16 > above) bits |= 1u << 2 * i;
            if (words[i] > above) bits |= 2u << 2 * i;
            equal |= zero_halves(words[i] ^ half * 0x10001u) << 2 * i;
        }
        for (; equal; equal &= equal - 1)
            if (row.at(start + unit * 8 + __ffs(equal) - 1) >= least) bits |= equal & -equal;
        taken |= (u64)bits << unit * 8;
    }
    to += sum_before_in_cluster(s, __popcll(taken));
    for (; taken; taken &= taken - 1) *to++ = start + __ffsll(taken) - 1;
}
#else
// `act(place, bits)` for every 128 places of this warp's, four a lane: bit i is set where score place + i is not below
// `least`. Sixteen scores a lane are in flight.
template <typename Act> __device__ __forceinline__ void each_four(const Row &row, u64 least, const Act &act) {
    constexpr int AHEAD = 4;
    int lane = threadIdx.x % 32, start = row.start + (threadIdx.x - lane << row.log);
    int end = min(start + (32 << row.log), row.length);
    for (int first = start; first < end; first += AHEAD * 128) {
        float4 four[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) four[i] = read4(row, first + i * 128 + lane * 4);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int place = first + i * 128 + lane * 4;
            float scores[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
            u32 bits = 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (place + j < end && composite(ordered(scores[j]), place + j) >= least) bits |= 1u << j;
            act(place, bits);
        }
    }
}

// A warp takes places that lie one after another, read twice: to count and to write.
__device__ __forceinline__ void write(Shared &s, const Row &row, u64 least, int *to) {
    u32 taken = 0, below = (1u << threadIdx.x % 32) - 1;
    each_four(row, least, [&](int, u32 bits) { taken += __popc(bits); });
    to += __shfl_sync(~0u, sum_before_in_cluster(s, taken), 0);
    each_four(row, least, [&](int place, u32 bits) {
        u32 before = 0, all = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 lanes = __ballot_sync(~0u, bits >> j & 1);
            before += __popc(lanes & below), all += __popc(lanes);
        }
        int *mine = to + before;
        for (; bits; bits &= bits - 1) *mine++ = place + __ffs(bits) - 1;
        to += all;
    });
}
#endif

extern "C" __global__ void __launch_bounds__(1024, BLOCKS)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    top_k(const __grid_constant__ Parameters p) {
    SHARED_MEMORY(memory);
    Shared &s = *(Shared *)memory;
    Row row(p);
    int *to = p.indices + (u64)(blockIdx.x / CLUSTER) * p.count;
    if (row.length <= p.count) {
        for (int i = rank() * THREADS + threadIdx.x; i < p.count; i += CLUSTER * THREADS)
            to[i] = i < row.length ? i : -1;
        return;
    }
    for (int i = threadIdx.x; i < FIRST_DIGITS / 4; i += THREADS) memory[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    read_row(s, row);
    meet_cluster();
    write(s, row, threshold(s, row, p.count), to);
}
