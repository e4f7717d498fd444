#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "lbfgs/lbfgs.h"

namespace secureafl::cpu {

// a.b in eight interleaved sums: a fixed order that still vectorises.
inline double dot(const double* a, const double* b, int64_t size) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> sums{};
  int64_t c = 0;
  for (; c + kLanes <= size; c += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[c + lane] * b[c + lane];
  }
  double sum = 0;
  for (; c < size; ++c) sum += a[c] * b[c];
  for (const double part : sums) sum += part;
  return sum;
}

// The Gram matrix of client k, packed as in lbfgs.h.      gram (products_of(pairs))
template <typename T>
void inner_products(const History<T>& h, int64_t k, int64_t pairs, double* gram) {
  constexpr int64_t kTile = 256;  // at most 34 rows of doubles: a tile fits into the L1 and L2 caches
  const int64_t rows = rows_of(pairs);
  std::vector<double> tile(static_cast<size_t>((rows + 1) * kTile));  // (rows and g, kTile)
  std::fill(gram, gram + products_of(pairs), 0.0);
  for (int64_t start = 0; start < h.d; start += kTile) {
    const int64_t width = std::min(kTile, h.d - start);
    for (int64_t row = 0; row <= rows; ++row) {
      for (int64_t c = 0; c < width; ++c) tile[row * kTile + c] = row_value(h, k, pairs, row, start + c);
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column <= row; ++column) {
        gram[packed(row, column)] += dot(&tile[row * kTile], &tile[column * kTile], width);
      }
    }
    gram[packed(rows, 0)] += dot(&tile[rows * kTile], &tile[rows * kTile], width);
  }
}

}  // namespace secureafl::cpu
