#pragma once

#include <cstring>

#include "block.h"

// Operations of a warp, and intrinsics of one thread.

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

// The values of all lanes.
template <typename T>
class Lanes {
 public:
  explicit Lanes(const T& value) : board_(board()), meeting_(grid->current->meetings) {
    std::memcpy(board_.shown[threadIdx.x % 32], &value, sizeof(T));
    wait(Waits::kForWarp);
  }
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, board_.shown[lane], sizeof(T));
    return value;
  }
  // In the order of a butterfly: every lane gets the same bits. Only the first lane computes them.
  template <typename Op>
  T combined(const Op& op) const {
    T values[32];
    if (board_.of != meeting_) {
      for (int i = 0; i < 32; ++i) values[i] = (*this)[i];
      for (int far = 16; far > 0; far /= 2) {
        for (int i = 0; i < far; ++i) values[i] = op(values[i], values[i + far]);
      }
      board_.of = meeting_;
      std::memcpy(board_.combined, values, sizeof(T));
    }
    std::memcpy(values, board_.combined, sizeof(T));
    return values[0];
  }

 private:
  Board& board_;
  int meeting_;  // counted from 1
};

}  // namespace emulator

inline void __syncwarp() { emulator::wait(emulator::Waits::kForWarp); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulator::Lanes<T>(value)[lane];
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int far) {
  return __shfl_sync(~0u, value, static_cast<int>(threadIdx.x % 32) ^ far);
}

inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a < b ? b : a; }
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return emulator::Lanes<unsigned>(value).combined(std::plus<unsigned>());
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) { return emulator::Lanes<unsigned>(value).combined(min); }
inline unsigned __reduce_max_sync(unsigned, unsigned value) { return emulator::Lanes<unsigned>(value).combined(max); }
inline unsigned __ballot_sync(unsigned, bool value) {
  return __reduce_add_sync(~0u, static_cast<unsigned>(value) << threadIdx.x % 32);
}
inline bool __all_sync(unsigned, bool value) { return __ballot_sync(~0u, value) == ~0u; }

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline uint32_t __float_as_uint(float value) {
  if (std::isnan(value)) return 0x7fffffff;  // arithmetic on a GPU gives only this one
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
T __ldcg(const T* at) {
  return *at;
}
inline void __threadfence() {}
template <typename T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
  const unsigned before = *at;
  *at = before >= most ? 0 : before + 1;
  return before;
}
