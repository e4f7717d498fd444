#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// Sums over many tiles in fixed chunks. The chunks do not depend on the number of threads, so neither does the result.

namespace secureafl::cpu {

// Cuts `size` items into at most 64 chunks of at least `least` items.
struct Chunks {
  int64_t size, count;

  Chunks(int64_t size, int64_t least) : size(size), count(std::clamp<int64_t>(size / least, 1, 64)) {}
  int64_t begin(int64_t chunk) const { return size * chunk / count; }
  int64_t end(int64_t chunk) const { return begin(chunk + 1); }
};

// sums (count) += parts (chunks, count), in order.
inline void add_chunks(const std::vector<double>& parts, std::vector<double>& sums) {
  for (auto part = parts.begin(); part != parts.end(); part += static_cast<int64_t>(sums.size())) {
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += part[static_cast<int64_t>(i)];
  }
}

// Adds up parts (chunks, count) -> (count), in order.
inline std::vector<double> sum_chunks(const std::vector<double>& parts, int64_t count) {
  std::vector<double> sums(static_cast<size_t>(count));
  add_chunks(parts, sums);
  return sums;
}

}  // namespace secureafl::cpu
