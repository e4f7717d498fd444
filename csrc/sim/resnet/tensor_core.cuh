#pragma once

#ifdef SECUREAFL_EMULATED
#include "block.h"  // of python_tests/emulator: all this for a CPU, so that a kernel's source is tested without a GPU
#else

#include <cuda_fp16.h>

#include <cstdint>

#include "common/launch.cuh"

// One product of a warp's tensor cores: sum (16, 8) += a (16, 16) b (16, 8). Factors are half floats, with the 11
// significant bits of TF32 in half the memory but none of its range: whoever writes them brings them near 1 first, by a
// power of two. Sums are float32. What a lane holds, with g = lane / 4 and t = lane % 4:
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

// A line of global memory is wanted soon, in the L2 cache.
__device__ inline void prefetch_l2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
// Eight factors, or four floats, from global memory to shared, both aligned to 16 bytes, while this thread goes on; it
// waits for all.
__device__ inline void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four tiles of 8 x 8 from shared memory: lane 8 i + k says where row k of tile i begins, aligned to 16 bytes.
__device__ inline void load_rows(Pair (&to)[4], const Operand* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}
// The same, each turned: its columns become rows; or two of them, from the lower half of the lanes.
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
