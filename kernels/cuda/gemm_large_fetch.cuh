// Three warps that fill the ring: activations, weights, and scales with what a stage says of its tile. Each walks over
// the same tiles and waits for free stages by itself.

__device__ __forceinline__ void fetch_activations(const Parameters &p, u32 shared) {
    Ring at = {0, 1};
    Walk walk;
    int own = TOKENS / SHARE * rank_of_block();  // the first token that this block fetches
    for (Tile tile; walk.take(p, tile);) {
#pragma unroll 1
        for (int block = 0; block < p.blocks; block++, at.advance()) {
            barrier_wait(shared + FREE + 8 * at.stage, at.parity);
            if (threadIdx.x % 32) continue;
            u32 full = shared + FULL + 8 * at.stage;
            u32 to = shared + at.stage * ACTIVATION + own * DEPTH;
            barrier_expect(full, ACTIVATION);
            int channel = block * DEPTH, token = tile.token + own;
            if (SHARE > 1) copy_box_to((1 << SHARE) - 1, to, &p.activation_map, channel, token, tile.group, full);
            else copy_box(to, &p.activation_map, channel, token, tile.group, full);
        }
    }
}

__device__ __forceinline__ void fetch_weights(const Parameters &p, u32 shared) {
    Ring at = {0, 1};
    Walk walk;
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
#pragma unroll
    for (int i = 0; i < TOKENS / 32; i++) {
        u32 counted = counting(p, tile, 32 * i);
        if (first) store4(note + COUNTED + 4 * i, counted);
    }
}

__device__ __forceinline__ void fetch_scales(const Parameters &p, u32 shared) {
    int lane = threadIdx.x % 32;
    Ring at = {0, 1};
    Walk walk;
    for (Tile tile; walk.take(p, tile);) {
        int scale_rows = parts(p.rows, GRAIN), row = min(tile.row / GRAIN + lane, scale_rows - 1);
        const u32 *weight = p.weight_scales + ((u64)tile.expert * scale_rows + row) * p.blocks;
        int token = tile.token + 4 * lane;
        const float *scales = p.scales + (u64)tile.group * p.blocks * p.padded + token;
#pragma unroll 1
        for (int block = 0; block < p.blocks; block++, at.advance(), scales += p.padded) {
            u32 note = shared + NOTES + at.stage * NOTE, to = shared + SCALES + at.stage * TOKENS * 4 + 16 * lane;
            barrier_wait(shared + FREE + 8 * at.stage, at.parity);
#pragma unroll
            for (int i = 0; i < PASSES; i++)
                if (token + 128 * i < p.padded) copy16(to + 512 * i, scales + 128 * i);
            if (lane < SCALE_ROWS) copy4(note + 4 * lane, weight + block);
            if (block == 0) place(p, tile, note);
            if (lane == 0) barrier_arrive(shared + FULL + 8 * at.stage);  // what it wrote is seen
            arrive_when_copied(shared + FULL + 8 * at.stage);
        }
    }
    barrier_wait(shared + FREE + 8 * at.stage, at.parity);
    if (lane == 0) store4(shared + NOTES + at.stage * NOTE + PLACE, ~0u);  // no more tiles
    for (int i = lane; i < ARRIVALS; i += 32) barrier_arrive(shared + FULL + 8 * at.stage);
}
