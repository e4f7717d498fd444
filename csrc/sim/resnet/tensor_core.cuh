#pragma once

#ifdef SECUREAFL_EMULATED
#include "tensor_core.h"  // python_tests/emulator
#else

#include <cuda_fp16.h>

#include <cstdint>

#include "common/launch.cuh"

// Matrix product of one warp on tensor cores (mma): sum (16, 8) += a (16, 16) b (16, 8). Operands are float16: the same
// 11 significant bits as TF32 in half the memory, but less range. So the writer first scales values near 1 by a power
// of two (prescale). Sums are float32. Elements of a lane, with g = lane / 4 and t = lane % 4:
//   a: pairs (g, 2 t) (g + 8, 2 t) (g, 2 t + 8) (g + 8, 2 t + 8), each with the next column
//   b: pairs (2 t, g) (2 t + 8, g), each with the next row
//   sum: (g, 2 t) (g, 2 t + 1) (g + 8, 2 t) (g + 8, 2 t + 1)

namespace secureafl::cuda {

using Operand = __half;
using Pair = uint32_t;
struct alignas(8) OperandB {
  Pair at[2];
};

__device__ inline Pair to_pair(float first, float second) {
  const __half2 packed = __floats2half2_rn(first, second);
  return reinterpret_cast<const Pair&>(packed);
}

// Prefetches a cache line of global memory into L2.
__device__ inline void prefetch_l2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
// Asynchronous copy of 16 bytes (eight operands or four floats) from global to shared memory, both aligned to 16 bytes.
// wait_copies waits for all copies of this thread.
__device__ inline void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Loads four 8 x 8 tiles from shared memory (ldmatrix): lane 8 i + k gives the address of row k of tile i, aligned to
// 16 bytes.
__device__ inline void load_rows(Pair (&to)[4], const Operand* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}
// The same with each tile transposed; or two tiles, with addresses from the lower half of the lanes.
__device__ inline void load_transposed(Pair (&to)[4], const Operand* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}
__device__ inline void load_transposed(Pair (&to)[2], const Operand* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}

__device__ inline void add_product(float (&sum)[4], const Pair (&a)[4], const OperandB& b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.at[0]), "r"(b.at[1]));
}

}  // namespace secureafl::cuda

#endif
