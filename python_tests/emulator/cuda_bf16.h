#pragma once

#include "warp.h"

// In place of the header of CUDA with this name: pairs of bfloat16 that are compared and counted.

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 half) { return __uint_as_float(static_cast<uint32_t>(half.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {  // of finite values
  const uint32_t bits = __float_as_uint(value);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline float __low2float(__nv_bfloat162 pair) { return __bfloat162float(pair.x); }
inline float __high2float(__nv_bfloat162 pair) { return __bfloat162float(pair.y); }

// Only results with eight significant bits: a count up to 256.
inline __nv_bfloat16 exact_bfloat16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (bits & 0xffff) std::abort();
  return {static_cast<uint16_t>(bits >> 16)};
}
template <typename Op>
__nv_bfloat162 in_pairs(__nv_bfloat162 a, __nv_bfloat162 b, Op op) {
  return {exact_bfloat16(op(__low2float(a), __low2float(b))), exact_bfloat16(op(__high2float(a), __high2float(b)))};
}
inline __nv_bfloat162 __hlt2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return in_pairs(a, b, [](float x, float y) { return x < y ? 1.0f : 0.0f; });
}
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return in_pairs(a, b, std::plus<float>()); }
