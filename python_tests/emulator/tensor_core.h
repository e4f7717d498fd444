#pragma once

#include <type_traits>

#include "copies.h"
#include "gpu.h"

// In place of csrc/sim/resnet/tensor_core.cuh.

namespace secureafl::cuda {

// Not rounded: with rounding, a ReLU near zero may switch, and a wrong gradient could not be told from a correct one.
using Operand = float;
struct Pair {
  float of[2];
};
struct OperandB {
  Pair at[2];
};
inline Pair to_pair(float first, float second) {
  if (std::abs(first) > 65504 || std::abs(second) > 65504) std::abort();  // infinite as float16
  return {{first, second}};
}

inline void prefetch_l2(const void*) {}
template <typename T>
void copy_async(T* to, const T* from) {
  constexpr int kCount = std::is_same_v<T, Operand> ? 8 : 1;
  emulator::copy_async([=] { std::copy(from, from + kCount, to); });
}
inline void wait_copies() { emulator::complete(emulator::grid->current->copies.size()); }

// The row addresses of all lanes.
inline emulator::Lanes<const float*> rows_of(const float* row) {
  if ((row - emulator::grid->block->memory.data()) % 8 != 0) std::abort();
  return emulator::Lanes<const float*>(row);
}
inline void load_rows(Pair (&to)[4], const float* row) {
  const auto rows = rows_of(row);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) to[i] = {{rows[8 * i + g][2 * t], rows[8 * i + g][2 * t + 1]}};
}
template <int kTiles>
inline void load_transposed(Pair (&to)[kTiles], const float* row) {
  const auto rows = rows_of(row);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < kTiles; ++i) to[i] = {{rows[8 * i + 2 * t][g], rows[8 * i + 2 * t + 1][g]}};
}

inline void add_product(float (&sum)[4], const Pair (&a)[4], const OperandB& b) {
  auto& board = emulator::board().shown;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 8; ++i) board[lane][i] = a[i / 2].of[i % 2];
  for (int i = 0; i < 4; ++i) board[lane][8 + i] = b.at[i / 2].of[i % 2];
  emulator::wait(emulator::Waits::kForWarp);
  for (int e = 0; e < 4; ++e) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2;
    float product = 0;
    for (int k = 0; k < 16; ++k) {
      const int lanes = k % 8 / 2, pair = k / 8;
      product += board[row % 8 * 4 + lanes][(row / 8 + pair * 2) * 2 + k % 2] *
                 board[column * 4 + lanes][8 + pair * 2 + k % 2];
    }
    sum[e] += product;
  }
}

}  // namespace secureafl::cuda
