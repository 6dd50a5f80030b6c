// Hopper's FP8 matrix products with fp32 sums: d[64 x COLUMNS] (+)= a[64 x 32] . b[COLUMNS x 32]^T, e4m3, both K-major.
// `a` lies in shared memory (a descriptor) or in registers (four words of a thread). Knows no kernel.

#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 \
    NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)

template <int COLUMNS> struct Product;

// An operand that begins `bytes` behind another.
__device__ __forceinline__ u64 further(u64 operand, int bytes) { return operand + bytes / 16; }
// Bytes of `low` and `high` by four numbers below 8, one in each nibble (which __byte_perm would mask again).
__device__ __forceinline__ u32 pick_bytes(u32 low, u32 high, u32 numbers) {
    u32 x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(numbers));
    return x;
}

// A0 .. A5 are the numbers of the operands behind the COUNT sums.
#define PRODUCT(WIDTH, COUNT, A0, A1, A2, A3, A4, A5) \
    template <> struct Product<WIDTH> { \
        static __device__ __forceinline__ void run(float (&d)[COUNT], u64 a, u64 b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2 ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #WIDTH "k32.f32.e4m3.e4m3 {" NAMES_##COUNT "}, %" #A0 \
                         ", %" #A1 ", p, 1, 1;\n}\n" \
                         : SUMS_##COUNT(0) : "l"(a), "l"(b), "r"(accumulate)); \
        } \
        static __device__ __forceinline__ void run(float (&d)[COUNT], const u32 *a, u64 b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A5 ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #WIDTH "k32.f32.e4m3.e4m3 {" NAMES_##COUNT "}, {%" #A0 \
                         ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", p, 1, 1;\n}\n" \
                         : SUMS_##COUNT(0) \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
        } \
    };

PRODUCT(8, 4, 4, 5, 6, 7, 8, 9)
PRODUCT(16, 8, 8, 9, 10, 11, 12, 13)
PRODUCT(32, 16, 16, 17, 18, 19, 20, 21)
PRODUCT(64, 32, 32, 33, 34, 35, 36, 37)
PRODUCT(128, 64, 64, 65, 66, 67, 68, 69)
