#pragma once

// SSE2, all that x86_64 promises, has no minimum of 32-bit integers: build for AVX2 too, and choose when loaded.
// Flattened, or the functions called would not be built so.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define SECUREAFL_AVX2_CLONES __attribute__((flatten, target_clones("avx2", "default")))
#else
#define SECUREAFL_AVX2_CLONES __attribute__((flatten))
#endif
