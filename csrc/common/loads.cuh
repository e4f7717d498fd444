#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace secureafl::cuda {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void from_float(float value, float& out) { out = value; }
__device__ inline void from_float(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }

// Loads kColumns neighbouring values in one instruction.
template <typename S, int kColumns>
__device__ inline void copy_columns(const S* from, S (&out)[kColumns]) {
  struct alignas(sizeof(S) * kColumns) Piece {
    S values[kColumns];
  };
  const Piece piece = *reinterpret_cast<const Piece*>(from);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = piece.values[c];
}

// The same, converted to float.
template <typename S, int kColumns>
__device__ inline void load_columns(const S* from, float (&out)[kColumns]) {
  S values[kColumns];
  copy_columns(from, values);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) out[c] = to_float(values[c]);
}

// Converts kColumns neighbouring floats and stores them in one instruction.
template <typename S, int kColumns>
__device__ inline void store_columns(S* to, const float (&values)[kColumns]) {
  struct alignas(sizeof(S) * kColumns) Piece {
    S values[kColumns];
  } piece;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) from_float(values[c], piece.values[c]);
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
