// Hopper's wide FP8 matrix products with fp32 sums: d[64 x COLUMNS] (+)= a[64 x 32] . b[COLUMNS x 32]^T, e4m3, both
// K-major in shared memory. Knows no kernel.

#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32 SUMS_16(0), SUMS_16(16)
#define SUMS_48 SUMS_32, SUMS_16(32)
#define SUMS_56 SUMS_48, SUMS_8(48)
#define SUMS_64 SUMS_48, SUMS_16(48)
#define SUMS_72 SUMS_64, SUMS_8(64)
#define SUMS_80 SUMS_64, SUMS_16(64)
#define SUMS_88 SUMS_80, SUMS_8(80)
#define SUMS_96 SUMS_80, SUMS_16(80)

#define NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_80 NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"

// An operand that begins `bytes` behind another.
__device__ __forceinline__ u64 further(u64 operand, int bytes) { return operand + bytes / 16; }

// Bytes of `low` and `high` by four numbers below 8, one in each nibble.
__device__ __forceinline__ u32 pick_bytes(u32 low, u32 high, u32 numbers) {
    u32 x;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(numbers));
    return x;
}

template <int COLUMNS> struct Product;

// A0 to A2 are the numbers of the operands behind the COUNT sums.
#define PRODUCT(WIDTH, COUNT, A0, A1, A2) \
    template <> struct Product<WIDTH> { \
        static __device__ __forceinline__ void run(float (&d)[COUNT], u64 a, u64 b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #A2 ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #WIDTH "k32.f32.e4m3.e4m3 {" NAMES_##COUNT "}, %" #A0 \
                         ", %" #A1 ", p, 1, 1;\n}\n" \
                         : SUMS_##COUNT : "l"(a), "l"(b), "r"(accumulate)); \
        } \
    };

PRODUCT(64, 32, 32, 33, 34)
PRODUCT(96, 48, 48, 49, 50)
PRODUCT(128, 64, 64, 65, 66)
PRODUCT(176, 88, 88, 89, 90)
PRODUCT(192, 96, 96, 97, 98)
