#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "coordinate_wise/network_cpu.h"
#include "coordinate_wise/rank.h"
#include "round/round.h"
#include "round/tiles.h"

// Access to the history in memory.

namespace secureafl::cpu {

using KeyRow = TileRow<Key<float>>;
constexpr int kColumns = KeyRow::kWidth;
static_assert(kColumns == kCpuColumns, "the network takes a tile as it lies in memory");

// One tile: kColumns coordinates of all clients.
template <typename Stored>
struct Tile {
  Stored* slots;  // (2m, n, kColumns)
  float* last;    // (2, n, kColumns): w, g
  int64_t n, start;

  Tile(const Round& r, int64_t tile)
      : slots(static_cast<Stored*>(r.slots) + tile * r.planes() * r.n * kColumns),
        last(r.last + tile * 2 * r.n * kColumns),
        n(r.n),
        start(tile * kColumns) {}
  Stored* slot(int64_t j, int64_t k) const { return slots + (j * n + k) * kColumns; }
  float* w(int64_t k) const { return last + k * kColumns; }
  float* g(int64_t k) const { return last + (n + k) * kColumns; }
};

// Prefetches a row (kColumns) of the next tile while this one is processed.
template <typename T>
inline void prefetch(const T* row) {
  for (size_t byte = 0; byte < kColumns * sizeof(T); byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, /*write=*/0, /*nearness=*/2);
  }
}

// Loads from (d) at the coordinates of a tile; zeros beyond d.
inline void load_columns(const float* from, int64_t start, int64_t d, float (&out)[kColumns]) {
  const int64_t width = std::min<int64_t>(kColumns, d - start);
  std::copy(from + start, from + start + width, out);
  std::fill(out + width, out + kColumns, 0.0f);
}

}  // namespace secureafl::cpu
