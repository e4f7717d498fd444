#pragma once

#include <cuda_fp16.h>

namespace secureafl::cuda {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }

// Loads kColumns neighbouring values in one instruction and converts them to float.
template <typename S, int kColumns>
__device__ inline void load_columns(const S* from, float (&out)[kColumns]) {
  struct alignas(sizeof(S) * kColumns) Piece {
    S values[kColumns];
  };
  const Piece piece = *reinterpret_cast<const Piece*>(from);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = to_float(piece.values[c]);
}

// Stores kColumns neighbouring floats in one instruction.
template <int kColumns>
__device__ inline void store_columns(float* to, const float (&values)[kColumns]) {
  struct alignas(sizeof(float) * kColumns) Piece {
    float values[kColumns];
  } piece;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) piece.values[c] = values[c];
  *reinterpret_cast<Piece*>(to) = piece;
}

// Loads without alignment: tensors of the caller may begin anywhere.
template <int kColumns>
__device__ inline void load_unaligned(const float* from, float (&out)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = from[c];
}

// sum + a.b
template <int kColumns>
__device__ inline float add_dot(float sum, const float (&a)[kColumns], const float (&b)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum += a[c] * b[c];
  return sum;
}

}  // namespace secureafl::cuda
