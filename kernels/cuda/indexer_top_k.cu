// Index scores and the k best keys of every token in one launch: scores are never written. Definition:
// kernels/reference/indexer_top_k.py; how scores come about: mqa_logits.cuh; how the best are kept:
// indexer_candidates.cuh.
//
// A group of tokens whose tiles are shared by several blocks is finished by the last of them: each leaves its k best in
// the workspace, and the last one puts them together. Compiled with ROOM (candidates of a token in shared memory) too.

#include "mqa_logits.cuh"

constexpr int TEAM = SPLIT ? 256 : 128, TEAMS = SPLIT ? 1 : 2;
#include "indexer_candidates.cuh"

constexpr u32 DESKS = SCORING_END, DESK_BYTES = (sizeof(Desk) + 15) / 16 * 16;
constexpr u32 COUNTS = DESKS + TEAMS * DESK_BYTES, COUNT_BYTES = (GROUP * 8 + TEAMS * 8 + 15) / 16 * 16;
constexpr u32 LISTS = COUNTS + COUNT_BYTES;

constexpr int MOST_CHOSEN = 2048;

struct Parameters {
    Scoring scoring;
    int *indices;    // [tokens, count]
    u64 *partial;    // [blocks, 2, GROUP, count]: what a block leaves of the group it begins with, and of its last
    u32 *arrivals;   // [blocks, TEAMS], zero between launches: of the group that a block is the first to have
    int count;
};

extern __shared__ __align__(1024) u8 memory[];

struct Team {
    static __device__ __forceinline__ int thread() { return threadIdx.x % TEAM; }
    static __device__ __forceinline__ int number() { return SPLIT ? 0 : threadIdx.x / TEAM; }
    static __device__ __forceinline__ void meet() {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + number()), "n"(TEAM) : "memory");
    }
};

struct Collector {
    const Parameters &p;
    const Piece &piece;
    u32 line = piece.start;  // of the next group's first tile here
    int first, tiles, token, count, skip, all, offset;
    int lower[SUMS], upper[SUMS];
    u32 admitted[SUMS];  // keys above this

    __device__ __forceinline__ Desk &desk() const {
        return *(Desk *)(memory + DESKS - shared + Team::number() * DESK_BYTES);
    }
    // Shared memory: candidates there are and keys admitted, of each token; a note for each team.
    static __device__ __forceinline__ u32 *counts() { return (u32 *)(memory + COUNTS - shared); }
    // Of this team's token `at`.
    __device__ __forceinline__ Candidates candidates(int at) const {
        return {(u64 *)(memory + LISTS - shared) + (offset + at) * ROOM, counts() + offset + at};
    }
    __device__ __forceinline__ u32 &admission(int at) const { return counts()[GROUP + offset + at]; }
    __device__ __forceinline__ u32 &note() const { return counts()[2 * GROUP + Team::number()]; }

    __device__ __forceinline__ void begin(u32 bounds, int from) {
        offset = from;
        first = read_int(bounds), tiles = read_int(bounds + 4);
        token = read_int(bounds + 8), count = read_int(bounds + 12);
        skip = read_int(bounds + 16), all = read_int(bounds + 20);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            u32 at = bounds + TOKEN_BOUNDS + 8 * (offset + first_token() + i);
            lower[i] = read_int(at), upper[i] = has_scores() ? read_int(at + 4) : 0;
        }
        if (Team::thread() < TOKENS) *candidates(Team::thread()).filled = 0, admission(Team::thread()) = 0;
    }

    // Tiles that the team (each of its warpgroups) may take before candidates could be more than there is room for.
    __device__ __forceinline__ int room() {
        constexpr int MOST = TILE * (SPLIT ? 2 : 1), FEW = ROOM / MOST / 8;
        Team::meet();
        int tiles = ROOM / MOST;
#pragma unroll 1
        for (int at = 0; at < TOKENS; at++) {
            Candidates mine = candidates(at);
            u32 filled = *mine.filled;
            if ((ROOM - filled) / MOST < FEW && filled > p.count) {
                u64 least = cut<Team>(desk(), mine, p.count);
                if (Team::thread() == 0) admission(at) = admitted_after(least);
                filled = p.count;
            }
            tiles = min(tiles, (int)(ROOM - filled) / MOST);
        }
        Team::meet();
#pragma unroll
        for (int i = 0; i < SUMS; i++) admitted[i] = admission(first_token() + i);
        return tiles;
    }

    __device__ __forceinline__ void take(int tile, const Scores &scores) {
        int index = tile * TILE + scores.key;
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            u32 key = ordered(scores.of[i]);
            if (key > admitted[i] && index >= lower[i] && index < upper[i])
                candidates(first_token() + i).add(key, index);
        }
    }

    __device__ __forceinline__ void end() {
        Team::meet();
        u32 begun = line - skip;
        bool whole = tiles == all;
        line += tiles;
        for (int at = 0; at < TOKENS && offset + at < count; at++)
            if (*candidates(at).filled > p.count) cut<Team>(desk(), candidates(at), p.count);
        if (!whole && !gather(begun)) return;
        for (int at = 0; at < TOKENS && offset + at < count; at++)
            write_indices<Team>(desk(), candidates(at), p.count, (first - skip) * TILE, (first - skip + all) * TILE,
                                p.indices + (u64)(token + offset + at) * p.count);
        Team::meet();
    }

    __device__ __forceinline__ u64 place_of(u32 block, u32 begun, int at) const {
        bool later = block == piece.block_of(begun);  // its last group, where the group begins there
        return ((u64)block * 2 + later) * GROUP + offset + at;
    }

    // Leaves the candidates of a group in the workspace. True for the last block to do so, which then has them all.
    __device__ __forceinline__ bool gather(u32 begun) {
        u32 from = piece.block_of(begun), to = piece.block_of(begun + all - 1);
        for (int at = 0; at < TOKENS && offset + at < count; at++) {
            Candidates mine = candidates(at);
            u64 *part = p.partial + place_of(blockIdx.x, begun, at) * p.count;
            u32 filled = *mine.filled;
            for (u32 i = Team::thread(); i < p.count; i += TEAM) part[i] = i < filled ? mine.list[i] : 0;
        }
        __threadfence();
        Team::meet();
        u32 *arrivals = p.arrivals + from * TEAMS + Team::number();
        if (Team::thread() == 0) note() = atomicAdd(arrivals, 1u);
        Team::meet();
        if (note() != to - from) return false;
        __threadfence();
        if (Team::thread() == 0) *arrivals = 0;
        for (int at = 0; at < TOKENS && offset + at < count; at++) collect(begun, from, to, at);
        return true;
    }

    // The parts of all other blocks, a slice of 8 for each thread read while the one before is looked through.
    __device__ __forceinline__ void collect(u32 begun, u32 from, u32 to, int at) {
        constexpr int SLICE = 8, SLICES = MOST_CHOSEN / TEAM / SLICE;
        Candidates mine = candidates(at);
        u64 least = 1, now[SLICE], next[SLICE];
        auto read = [&](int turn) {
            u32 block = from + turn / SLICES, first = turn % SLICES * SLICE * TEAM + Team::thread();
            bool there = block != blockIdx.x && block <= to;
            const u64 *part = p.partial + (there ? place_of(block, begun, at) * p.count : 0);
#pragma unroll
            for (int i = 0; i < SLICE; i++)
                next[i] = there && first + i * TEAM < p.count ? __ldcg(part + first + i * TEAM) : 0;
        };
        int turns = (to - from + 1) * SLICES;
        read(0);
#pragma unroll 1
        for (int turn = 0; turn < turns; turn++) {
#pragma unroll
            for (int i = 0; i < SLICE; i++) now[i] = next[i];
            read(turn + 1);
#pragma unroll
            for (int i = 0; i < SLICE; i++)
                if (now[i] >= least) mine.list[atomicAdd(mine.filled, 1u)] = now[i];
            Team::meet();
            u32 filled = *mine.filled;
            Team::meet();
            bool last = turn == turns - 1;
            if (filled > p.count && (last || filled + SLICE * TEAM > ROOM)) least = cut<Team>(desk(), mine, p.count);
        }
    }
};

// Tokens of groups in which nobody sees a key.
__device__ __forceinline__ void fill_empty(const Parameters &p) {
    for (int i = blockIdx.x; i < Group::all(p.scoring); i += gridDim.x) {
        Group group(p.scoring, i);
        if (group.tiles) continue;
        for (int at = threadIdx.x; at < group.count * p.count; at += THREADS)
            p.indices[(u64)group.token * p.count + at] = -1;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) indexer_top_k(const __grid_constant__ Parameters p) {
    if (address_of(memory) != shared) __trap();
    prepare_barriers();
    fill_empty(p);
    Piece piece(p.scoring, (u32 *)(memory + SCRATCH - shared));
    if (piece.left <= 0) return;
    if (threadIdx.x >= MULTIPLIERS) {
        fewer_registers<40>();
        if (threadIdx.x < MULTIPLIERS + 32) Copier{p.scoring}.run(piece);
    } else {
        more_registers<232>();
        Collector collector{p, piece};
        Multiplier<Collector>{collector}.run(piece.left);
    }
}
