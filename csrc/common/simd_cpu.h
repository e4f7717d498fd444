#pragma once

// Compiles a function for AVX2 too; the loader picks the version. x86_64 guarantees only SSE2, which has no minimum of
// 32-bit integers. flatten: inlines the callees, otherwise they would be built without AVX2.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define SECUREAFL_AVX2_CLONES __attribute__((flatten, target_clones("avx2", "default")))
#else
#define SECUREAFL_AVX2_CLONES __attribute__((flatten))
#endif
