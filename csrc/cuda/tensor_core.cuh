#pragma once

#ifdef SECUREAFL_EMULATED
#include "block.h"  // of python_tests/emulator: all this for a CPU, so that a kernel's source is tested without a GPU
#else

#include <cstdint>

#include "launch.cuh"

// One product of a warp's tensor cores: sum (16, 8) += a (16, 8) b (8, 8), in TF32: factors have 11 significant bits
// and the range of float32, sums are float32. What a lane holds, with g = lane / 4 and t = lane % 4:
//   a: (g, t) (g + 8, t) (g, t + 4) (g + 8, t + 4)   b: (t, g) (t + 4, g)
//   sum: (g, 2 t) (g, 2 t + 1) (g + 8, 2 t) (g + 8, 2 t + 1)

namespace secureafl::cuda {

// Rounded to TF32; to be done once, where a factor is written.
__device__ inline float to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

// A line of global memory is wanted soon: in the L2 cache, or in the L1 too.
__device__ inline void fetch_far(const float* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
__device__ inline void fetch_near(const float* line) {
  float unused;
  asm volatile("ld.global.ca.f32 %0, [%1];" : "=f"(unused) : "l"(line));
}

// a (16, 8) from shared memory: each lane says where row lane % 16 begins, four floats on in the upper half of the
// warp. Those must be aligned to 16 bytes.
__device__ inline void load_rows(float (&a)[4], const float* row) {
  uint32_t bits[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = __uint_as_float(bits[i]);
}

__device__ inline void add_product(float (&sum)[4], const float (&a)[4], float2 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)));
}

}  // namespace secureafl::cuda

#endif
