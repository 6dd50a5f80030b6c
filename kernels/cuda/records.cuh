// Records of FP8 and FP4 read from pages and laid down as bf16 tiles; formats: kernels/reference/sparse_decode.py.

// Codes become bf16 by moving their bits to where bf16 keeps sign, exponent and mantissa; the difference of the exponents'
// biases (120 for E4M3, 126 for E2M1) is part of the scale, which is exact for subnormal codes as well. Channels lie in
// the order 0 2 1 3 in every four, which saves instructions; queries are permuted likewise, outputs back. Whatever lies
// in tiles is 2**-32 of its value, so that scales up to 2**39 times 2**120 stay below bf16's end (larger ones become
// infinite).
constexpr u32 UNIT_PAIR = 0x2f802f80;
constexpr float UNIT = 4294967296.0f;  // what a product of two tiles' values is to be multiplied by

// Codes of four channels, times 2**-120.
__device__ __forceinline__ void spread_e4m3(u32 codes, u32 &even, u32 &odd) {
    even = (codes << 8 & 0x80008000) | (codes << 4 & 0x07f007f0);
    odd = (codes & 0x80008000) | (codes >> 4 & 0x07f007f0);
}

// Codes of eight channels, times 2**-126.
__device__ __forceinline__ void spread_e2m1(u32 codes, u32 (&out)[4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 twice = __byte_perm(codes, 0, half ? 0x3322 : 0x1100);
        out[2 * half] = (twice << 4 & 0x80008000) | (twice << 6 & 0x01c001c0);
        out[2 * half + 1] = (twice & 0x80008000) | (twice << 2 & 0x01c001c0);
    }
}

// Scales times 2**88 (E8M0) and 2**94 (E4M3).
__device__ __forceinline__ u32 folded_e8m0(u32 code) { return min(code + 88, 255u) * 0x800080; }
__device__ __forceinline__ u32 folded_e4m3(u32 code) {
    return times(times((code & 0x80) * 0x1000100 | (code & 0x7f) * 0x100010, 0x75007500), 0x75007500);
}

// Of one key; `record` is null where an index names nothing. V4 keeps scales apart from its rows.
struct Place {
    const u8 *record, *scale;
};

// What one of the four threads of a key holds between loading and laying down.
template <int KIND> struct Record {
    static constexpr bool rope = KIND == V4 || KIND == V32;
    static constexpr int groups = KIND == V4 ? 7 : 8;
    static constexpr int words = KIND == V41_ENTRY ? 2 : 4;  // of codes, for each group of 64 channels
    static constexpr int bytes = KIND == V4 ? 576 : KIND == V32 ? 656 : KIND == V41_WINDOW ? 528 : 288;
    static constexpr int scale_words = KIND == V4 ? 2 : KIND == V41_ENTRY ? 8 : 4;
    u32 codes[groups][words];
    u32 plain[rope ? 8 : 1];
    u32 scales[scale_words];

    __device__ __forceinline__ void load(const Place &place, int part) {
        load_chunks<0>(place, part);
        load_scales(place);
    }

    template <int I> __device__ __forceinline__ void load_chunks(const Place &place, int part) {
        load_chunk<I>(place, part);
        if constexpr ((I + 1) * 64 < WIDTH) load_chunks<I + 1>(place, part);
    }

    template <int I> __device__ __forceinline__ void load_chunk(const Place &place, int part) {
        if constexpr (I < groups) {
            fetch<words>(place.record, I * 16 * words + part * 4 * words, codes[I]);
        } else {
            fetch<4>(place.record, (KIND == V4 ? 448 : 528) + part * 32, plain);
            fetch<4>(place.record, (KIND == V4 ? 464 : 544) + part * 32, plain + 4);
        }
    }

    __device__ __forceinline__ void load_scales(const Place &place) {
        if constexpr (KIND == V4) fetch<2>(place.scale, 0, scales);
        else fetch<4>(place.record, KIND == V41_ENTRY ? 256 : 512, scales);
        if constexpr (scale_words == 8) fetch<4>(place.record, 272, scales + 4);
    }

    // Zeros where there is no record. Not `ld.global.nc`: the assembler moves loads of what never changes.
    template <int WORDS> static __device__ __forceinline__ void fetch(const u8 *from, int offset, u32 *to) {
        if constexpr (WORDS == 4)
            asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
                         "mov.b32 %3, 0;\n@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
                         : "=&r"(to[0]), "=&r"(to[1]), "=&r"(to[2]), "=&r"(to[3]) : "l"(from + offset), "l"(from));
        else
            asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
                         "@p ld.global.v2.b32 {%0, %1}, [%2];\n}\n"
                         : "=&r"(to[0]), "=&r"(to[1]) : "l"(from + offset), "l"(from));
    }

    static __device__ __forceinline__ Place locate(const Cache &cache, int slot) {
        if (slot < 0) return {nullptr, nullptr};
        int page = slot / cache.page_tokens, at = slot - page * cache.page_tokens;
        const u8 *start = cache.records + page * cache.page_bytes;
        return {start + at * bytes, KIND == V4 ? start + cache.scales_at + at * 8 : nullptr};
    }

    // Sixteen channels of group `i`: eight words of bf16.
    template <int I> __device__ __forceinline__ void decode(int part, u32 (&out)[8]) const {
        if constexpr (KIND == V41_ENTRY) {
            u32 half[2][4];
            spread_e2m1(codes[I][0], half[0]), spread_e2m1(codes[I][1], half[1]);
#pragma unroll
            for (int j = 0; j < 8; j++) out[j] = half[j / 4][j % 4];
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) spread_e4m3(codes[I][j], out[2 * j], out[2 * j + 1]);
        }
        if constexpr (KIND == V32) {  // an fp32 scale as the sum of two bf16: the product is rounded once
            float scale = __uint_as_float(scales[I / 2]) * 309485009821345068724781056.0f;  // 2**88
            u32 most = pair(scale, scale);
            float rest = scale - __uint_as_float(most << 16);
            u32 least = pair(rest, rest);
#pragma unroll
            for (int j = 0; j < 8; j++) out[j] = times_plus(out[j], most, times(out[j], least));
        } else {
            u32 scale;
            if constexpr (KIND == V4) scale = folded_e8m0(scales[I / 4] >> (I % 4 * 8) & 0xff);
            if constexpr (KIND == V41_WINDOW) scale = folded_e8m0(scales[I / 2] >> (I % 2 * 16 + part / 2 * 8) & 0xff);
            if constexpr (KIND == V41_ENTRY) scale = folded_e4m3(scales[I] >> (part * 8) & 0xff);
#pragma unroll
            for (int j = 0; j < 8; j++) out[j] = times(out[j], scale);
        }
    }

    // Chunk `I` of 64 channels, and those behind it; `done(part)` after the last chunk of each part of the tile.
    // Registers take what is read at `next` as soon as they are free.
    template <int I, typename Done>
    __device__ __forceinline__ void lay(u32 tile, int row, int part, const Place &next, const Done &done) {
        constexpr int chunks = WIDTH / 64;
        u32 out[8];
        if constexpr (I < groups) decode<I>(part, out);
        else
#pragma unroll
            for (int j = 0; j < 8; j++) out[j] = times(plain[rope ? j : 0], UNIT_PAIR);
        store16(tile + I * CHUNK + swizzled(row, 2 * part), out[0], out[1], out[2], out[3]);
        store16(tile + I * CHUNK + swizzled(row, 2 * part + 1), out[4], out[5], out[6], out[7]);
        load_chunk<I>(next, part);
        __syncwarp();  // or the assembler gathers the loads behind the last chunk, where all of their time is lost
        if constexpr ((I + 1) * PARTS / chunks != I * PARTS / chunks) done(I * PARTS / chunks);
        if constexpr (I + 1 < chunks) lay<I + 1>(tile, row, part, next, done);
        else load_scales(next);
    }
};
