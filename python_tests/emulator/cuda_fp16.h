#pragma once

#include "warp.h"

// In place of the header of CUDA with this name: a finite float16, as a type to store.

struct __half {
  uint16_t bits;
};

inline float __half2float(__half half) {
  const float size = __uint_as_float((half.bits & 0x7fffu) << 13) * 0x1p112f;  // the exponents differ by 112
  return half.bits >> 15 ? -size : size;
}
// To nearest, ties to even.
inline __half __float2half_rn(float value) {
  int exponent;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent, -13) - 11);  // distance to the next float16
  const float size = static_cast<float>(std::nearbyint(std::abs(value) / unit) * unit);
  if (!(size <= 65504)) std::abort();
  return {static_cast<uint16_t>(__float_as_uint(size * 0x1p-112f) >> 13 | (std::signbit(value) ? 0x8000 : 0))};
}
