// Of scores that come in any number, the k best so far: candidates in shared memory, cut back to k when they are many.
//
// A candidate is its score as an integer in the same order, and behind it the complement of its key's index: no two are
// equal, and the lower index of equal scores is the better one. A team of TEAM threads has them; `Team` says how its
// threads meet. Knows neither where scores come from nor how many tokens there are.

constexpr int EACH = ROOM / TEAM, DIGIT_BITS = 10, DIGITS = 1 << DIGIT_BITS, DIGITS_EACH = DIGITS / TEAM;

// NaN above all, both zeros equal; never 0.
__device__ __forceinline__ u32 ordered(float score) {
    u32 bits = __float_as_uint(score + 0.0f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return ~0u;
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
__device__ __forceinline__ u64 candidate(u32 key, int index) { return (u64)key << 32 | (u32)~index; }
__device__ __forceinline__ int index_of(u64 one) { return (int)~(u32)one; }

// What a team shares while it cuts or writes. The digits' memory is also the map of the indices that are written.
struct Desk {
    u32 digits[DIGITS];
    u32 sums[TEAM / 32], digit, above, inside, low, high;
};

// Of one token.
struct Candidates {
    u64 *list;    // [ROOM]
    u32 *filled;  // how many there are

    __device__ __forceinline__ void add(u32 key, int index) { list[atomicAdd(filled, 1u)] = candidate(key, index); }
};

// Of scores to come, whose indices are higher, only keys above this count once a cut has given `least`: equal ones are
// no better where indices decided, but may be where a few digits of the keys did.
__device__ __forceinline__ u32 admitted_after(u64 least) { return (u32)(least >> 32) - ((u32)least == 0); }

template <typename Team> __device__ __forceinline__ u32 sum_before(Desk &desk, u32 value, u32 &all) {
    int thread = Team::thread(), lane = thread % 32, warp = thread / 32;
    u32 sum = value;
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) desk.sums[warp] = sum;
    Team::meet();
    u32 before = sum - value;
    all = 0;
#pragma unroll
    for (int i = 0; i < TEAM / 32; i++) {
        if (i < warp) before += desk.sums[i];
        all += desk.sums[i];
    }
    Team::meet();
    return before;
}

// The digit of the `need`-th from above, how many have higher ones and how many this one.
template <typename Team> __device__ __forceinline__ void find_digit(Desk &desk, u32 need) {
    int top = (TEAM - Team::thread()) * DIGITS_EACH - 1;
    u32 counts[DIGITS_EACH], sum = 0, all;
#pragma unroll
    for (int i = 0; i < DIGITS_EACH; i++) sum += counts[i] = desk.digits[top - i];
    u32 above = sum_before<Team>(desk, sum, all);
#pragma unroll
    for (int i = 0; i < DIGITS_EACH; i++) {
        if (above < need && need <= above + counts[i])
            desk.digit = top - i, desk.above = above, desk.inside = counts[i];
        above += counts[i];
    }
    Team::meet();
}

// More than `count` candidates become the `count` best. Returns a bound that these reach and that none that is left out
// does; all threads of the team take part.
template <typename Team> __device__ __forceinline__ u64 cut(Desk &desk, const Candidates &of, u32 count) {
    int thread = Team::thread();
    u32 filled = *of.filled;
    u64 mine[EACH];  // the whole list, in registers
    u32 low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        u32 at = i * TEAM + thread;
        mine[i] = at < filled ? of.list[at] : 0;
        u32 key = (u32)(mine[i] >> 32);
        if (mine[i]) low = min(low, key), high = max(high, key);
    }
    if (thread == 0) desk.low = ~0u, desk.high = 0;
    Team::meet();
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    if (thread % 32 == 0) atomicMin(&desk.low, low), atomicMax(&desk.high, high);
    Team::meet();
    // Digits from the highest bit in which keys differ from the least: those of a few octaves spread over all digits.
    u64 base = (u64)desk.low << 32, found = 0;
    u32 inside = filled, need = count;
    int bit = 64 - __clz(desk.high - desk.low);
    while (inside != need) {
        int next = max(bit - DIGIT_BITS, 0);
#pragma unroll
        for (int i = 0; i < DIGITS_EACH; i++) desk.digits[i * TEAM + thread] = 0;
        Team::meet();
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            u64 one = mine[i] - base;
            if (mine[i] && (bit == 64 ? 0 : one >> bit) == found)
                atomicAdd(&desk.digits[(u32)(one >> next) & (DIGITS - 1) & ((1u << (bit - next)) - 1)], 1u);
        }
        Team::meet();
        find_digit<Team>(desk, need);
        found = found << (bit - next) | desk.digit, inside = desk.inside, need -= desk.above, bit = next;
        Team::meet();
    }
    u64 least = bit == 64 ? base : base + (found << bit);
    u32 kept = 0, all;
#pragma unroll
    for (int i = 0; i < EACH; i++) kept += mine[i] >= least && mine[i];
    u32 at = sum_before<Team>(desk, kept, all);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (mine[i] >= least && mine[i]) of.list[at++] = mine[i];
    if (thread == 0) *of.filled = all;
    Team::meet();
    return least;
}

// The indices of at most `count` candidates in ascending order, then -1; they lie from `first` to before `end`.
template <typename Team>
__device__ __forceinline__ void write_indices(Desk &desk, const Candidates &of, u32 count, int first, int end,
                                              int *to) {
    constexpr int SPAN = DIGITS * 32;  // as many indices have a bit each
    int thread = Team::thread();
    u32 filled = *of.filled, written = 0;
    for (int from = first; from < end; from += SPAN) {
#pragma unroll
        for (int i = 0; i < DIGITS_EACH; i++) desk.digits[i * TEAM + thread] = 0;
        Team::meet();
        for (u32 i = thread; i < filled; i += TEAM) {
            u32 place = index_of(of.list[i]) - from;
            if (place < SPAN) atomicOr(&desk.digits[place / 32], 1u << place % 32);
        }
        Team::meet();
        u32 words[DIGITS_EACH], mine = 0, all;
#pragma unroll
        for (int i = 0; i < DIGITS_EACH; i++) mine += __popc(words[i] = desk.digits[thread * DIGITS_EACH + i]);
        u32 at = written + sum_before<Team>(desk, mine, all);
#pragma unroll
        for (int i = 0; i < DIGITS_EACH; i++)
            for (u32 word = words[i]; word; word &= word - 1)
                to[at++] = from + (thread * DIGITS_EACH + i) * 32 + __ffs(word) - 1;
        written += all;
    }
    for (u32 i = filled + thread; i < count; i += TEAM) to[i] = -1;
}
