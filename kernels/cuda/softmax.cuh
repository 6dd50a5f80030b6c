// The running softmax of scores in a warpgroup's registers, and the numbers by row that warpgroups leave each other in
// shared memory. A thread shares two rows, `own_row` and eight below; its scores are those of a 64 x 64 product.

constexpr float LAG = 8;
#define INFINITE __int_as_float(0x7f800000)

// The first of the two rows of the block that a thread of any warpgroup shares.
__device__ __forceinline__ int own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

__device__ __forceinline__ float read_float(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}
__device__ __forceinline__ void write_float(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// The numbers of a thread's two rows, by one of the four threads that share them; `at` is that of row 0.
__device__ __forceinline__ void write_rows_of(u32 at, const float (&x)[2]) {
    if (threadIdx.x % 4 == 0) write_float(at + 4 * own_row(), x[0]), write_float(at + 4 * own_row() + 32, x[1]);
}

// Scores from column `limit[r]` on become those of keys that row r does not see.
__device__ __forceinline__ void hide_from(float (&s)[32], int column, const int (&limit)[2]) {
    int first = column + (int)threadIdx.x % 4 * 2;  // limits may be negative
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (first + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -INFINITE;
}

// The same for keys whose bit is not set.
__device__ __forceinline__ void hide_all_but(float (&s)[32], u64 valid) {
    if (valid == ~0ull) return;
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (!(valid >> (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2) & 1)) s[i] = -INFINITE;
}

struct Softmax {
    float most[2] = {-INFINITE, -INFINITE}, total[2] = {0, 0}, factor[2];

    // Takes the scores' peaks in; `factor` is what earlier sums are to be multiplied by.
    __device__ __forceinline__ void look(const float (&s)[32], const float (&scale)[2]) {
        float peak[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float part[4] = {most[r], most[r], most[r], most[r]};
#pragma unroll
            for (int i = 0; i < 16; i++) part[i % 4] = fmaxf(part[i % 4], s[i / 2 * 4 + 2 * r + i % 2]);
            peak[r] = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
        }
#pragma unroll
        for (int lane = 1; lane < 4; lane *= 2)
#pragma unroll
            for (int r = 0; r < 2; r++) peak[r] = fmaxf(peak[r], __shfl_xor_sync(~0u, peak[r], lane));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            // The base follows the peak only when it falls 2**8 behind: weights stay far from overflow, and the sums of
            // earlier tiles are seldom rescaled.
            bool behind = (peak[r] - most[r]) * scale[r] > LAG;
            factor[r] = behind ? power((most[r] - peak[r]) * scale[r]) : 1.0f;
            most[r] = behind ? peak[r] : most[r];
        }
    }

    // The same. Peaks are only compared among the threads of a row where one of the warp's would move a base.
    __device__ __forceinline__ void glance(const float (&s)[32], const float (&scale)[2]) {
        bool behind = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float part[4] = {-INFINITE, -INFINITE, -INFINITE, -INFINITE};
#pragma unroll
            for (int i = 0; i < 16; i++) part[i % 4] = fmaxf(part[i % 4], s[i / 2 * 4 + 2 * r + i % 2]);
            float peak = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
            behind |= (peak - most[r]) * scale[r] > LAG;
            factor[r] = 1.0f;
        }
        if (__any_sync(~0u, behind)) look(s, scale);
    }

    // Scores become weights.
    __device__ __forceinline__ void weigh(float (&s)[32], const float (&scale)[2]) {
        float sum[4] = {0, 0, 0, 0}, base[2];
#pragma unroll
        for (int r = 0; r < 2; r++) base[r] = most[r] == -INFINITE ? 0.0f : most[r] * scale[r];
#pragma unroll
        for (int i = 0; i < 32; i++) sum[i % 4] += s[i] = power(s[i] * scale[i / 2 % 2] - base[i / 2 % 2]);
#pragma unroll
        for (int r = 0; r < 2; r++) total[r] = total[r] * factor[r] + (sum[2 * r] + sum[2 * r + 1]);
    }

    // A row's weights over all of its tiles, for each of the four threads that share it.
    __device__ __forceinline__ float whole(int r) const {
        float sum = total[r] + __shfl_xor_sync(~0u, total[r], 1);
        return sum + __shfl_xor_sync(~0u, sum, 2);
    }
};

template <int N> __device__ __forceinline__ void rescale(float (&output)[N], float first, float second) {
    if (!__any_sync(~0u, first != 1.0f || second != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < N; i++) output[i] *= i / 2 % 2 ? second : first;
}
