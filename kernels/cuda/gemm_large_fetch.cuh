// Three warps that fill the ring: activations, weights, and scales with what a stage says of its tile. Each walks over
// the same tiles and waits for free stages by itself.

__device__ __forceinline__ void fetch_activations(const Parameters &p, u32 shared) {
    constexpr bool BY_HALVES = SHARE == PASSES;
    Ring at = {0, 1};
    Walk walk(p);
    int own = TOKENS / SHARE * rank_of_block();  // the first token that this block fetches
    for (Tile tile; walk.take(p, tile);) {
        u32 bytes = BY_HALVES ? __popc(tile.halves) * (ACTIVATION / PASSES) : ACTIVATION;
        bool mine = !BY_HALVES || tile.halves >> rank_of_block() & 1;
#pragma unroll 1
        for (int block = 0; block < p.blocks; block++, at.advance()) {
            barrier_wait(shared + FREE + 8 * at.stage, at.parity);
            if (threadIdx.x % 32) continue;
            u32 full = shared + FULL + 8 * at.stage;
            u32 to = shared + at.stage * ACTIVATION + own * DEPTH;
            barrier_expect(full, bytes);
            if (!mine) continue;
            int channel = block * DEPTH, token = tile.token + own;
            if (SHARE > 1) copy_box_to((1 << SHARE) - 1, to, &p.activation_map, channel, token, tile.group, full);
            else copy_box(to, &p.activation_map, channel, token, tile.group, full);
        }
    }
}

// FP4 weights as they are packed, for the warps that decode them.
__device__ __forceinline__ void fetch_packed(const Parameters &p, u32 shared) {
    Ring at = {0, 1};
    Walk walk(p);
    for (Tile tile; walk.take(p, tile);) {
        int tiles = p.rows / 64, count = max(min(ROWS / 64, tiles - tile.row / 64), 0);
        const u8 *from = (const u8 *)p.weight_scales + ((u64)tile.expert * tiles + tile.row / 64) * p.blocks * CHUNK;
#pragma unroll 1
        for (int block = 0; block < p.blocks; block++, at.advance(), from += CHUNK) {
            barrier_wait(shared + FREE + 8 * at.stage, at.parity);
            if (threadIdx.x % 32) continue;
            u32 come = shared + COME + 8 * at.stage, to = shared + PACKS + at.stage * PACKED;
            store4(shared + NOTES + at.stage * NOTE + MORE, 1);
            barrier_expect(come, count * CHUNK);
#pragma unroll 1
            for (int i = 0; i < count; i++)
                copy_bytes(to + i * CHUNK, from + (u64)i * p.blocks * CHUNK, CHUNK, come, READ_ONCE);
        }
    }
    barrier_wait(shared + FREE + 8 * at.stage, at.parity);
    if (threadIdx.x % 32) return;
    store4(shared + NOTES + at.stage * NOTE + MORE, 0);
    barrier_arrive(shared + COME + 8 * at.stage);
}

__device__ __forceinline__ void fetch_weights(const Parameters &p, u32 shared) {
    Ring at = {0, 1};
    Walk walk(p);
    for (Tile tile; walk.take(p, tile);) {
#pragma unroll 1
        for (int block = 0; block < p.blocks; block++, at.advance()) {
            barrier_wait(shared + FREE + 8 * at.stage, at.parity);
            if (threadIdx.x % 32) continue;
            u32 full = shared + FULL + 8 * at.stage, to = shared + WEIGHTS + at.stage * WEIGHT;
            barrier_expect(full, WEIGHT);
            copy_box(to, &p.weight_map, block * DEPTH, tile.row, tile.expert, full);
        }
    }
}

__device__ __forceinline__ void place(const Parameters &p, const Tile &tile, u32 note) {
    bool first = threadIdx.x % 32 == 0;
    if (first) store4(note + PLACE, tile.row), store4(note + PLACE + 4, tile.token), store4(note + PLACE + 8, tile.group);
#pragma unroll 4
    for (int i = 0; i < TOKENS / 32; i++) {
        u32 counted = counting(p, tile, 32 * i);
        if (first) store4(note + COUNTED + 4 * i, counted);
    }
}

__device__ __forceinline__ void fetch_scales(const Parameters &p, u32 shared) {
    int lane = threadIdx.x % 32;
    Ring at = {0, 1};
    Walk walk(p);
    for (Tile tile; walk.take(p, tile);) {
        constexpr int TALL = FP4 ? 64 : GRAIN, STEP = FP4 ? CHUNK / 4 : 1;  // words from block to block
        int scale_rows = parts(p.rows, TALL), row = min(tile.row / TALL + lane, scale_rows - 1);
        const u32 *weight = p.weight_scales + ((u64)tile.expert * scale_rows + row) * p.blocks * STEP;
        if (FP4) weight += 64 * DEPTH / 8;  // the first row's scales; the exponent is that of all
        int token = tile.token + 4 * lane;
        const float *scales = p.scales + (u64)tile.group * p.blocks * p.padded + token;
#pragma unroll 1
        for (int block = 0; block < p.blocks; block++, at.advance(), scales += p.padded) {
            u32 note = shared + NOTES + at.stage * NOTE, to = shared + SCALES + at.stage * TOKENS * 4 + 16 * lane;
            barrier_wait(shared + FREE + 8 * at.stage, at.parity);
#pragma unroll
            for (int i = 0; i < PASSES; i++)
                if (token + 128 * i < p.padded) copy16(to + 512 * i, scales + 128 * i);
            if (lane < SCALE_ROWS) copy4(note + 4 * lane, weight + block * STEP);
            if (block == 0) place(p, tile, note);
            if (lane == 0) barrier_arrive(shared + FULL + 8 * at.stage);  // what it wrote is seen
            arrive_when_copied(shared + FULL + 8 * at.stage);
        }
    }
    barrier_wait(shared + FREE + 8 * at.stage, at.parity);
    if (lane == 0) store4(shared + NOTES + at.stage * NOTE + PLACE, ~0u);  // no more tiles
    for (int i = lane; i < ARRIVALS; i += 32) barrier_arrive(shared + FULL + 8 * at.stage);
}
