#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "common/chunks_cpu.h"
#include "kinship/kin_step_cpu.h"
#include "mean_steps/choose.h"
#include "mean_steps/mean_steps.h"
#include "support/refresh.h"

namespace secureafl::cpu {

// (n, n): inner products of the clients' means, in fixed chunks of d.
inline std::vector<double> products_of_means(const MeanRound& r) {
  constexpr int64_t kMostNumbers = int64_t{1} << 22;  // of all chunks together
  const int64_t tiles = (r.d + kKinTile - 1) / kKinTile, most = std::max<int64_t>(kMostNumbers / (r.n * r.n), 1);
  const Chunks chunks(tiles, std::max<int64_t>((tiles + most - 1) / most, 4));
  std::vector<double> parts(static_cast<size_t>(chunks.count * r.n * r.n));
  for_kin_tiles(chunks, [&](int64_t start, int64_t chunk) {
    const int64_t width = std::min(kKinTile, r.d - start);
    double* products = parts.data() + chunk * r.n * r.n;
    double mean[kKinTile];
    for (int64_t i = 0; i < r.n; ++i) {
      std::copy_n(r.own_means + i * r.d + start, width, mean);
      for (int64_t k = 0; k <= i; ++k) {
        products[i * r.n + k] += product_with(r.own_means + k * r.d + start, mean, width);
      }
    }
  });
  return sum_chunks(parts, r.n * r.n);
}

inline void refresh_means(const MeanRound& r, Refresh refresh_args) {
  const int64_t n = r.n;
  std::vector<double> products = products_of_means(r), lengths(static_cast<size_t>(n));
  for (int64_t k = 0; k < n; ++k) lengths[k] = shortened(r, k, products[k * n + k]);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = 0; k <= i; ++k) products[i * n + k] *= lengths[i] * lengths[k];
    for (int64_t k = 0; k < i; ++k) products[k * n + i] = products[i * n + k];
  }
  std::vector<double> scratch(static_cast<size_t>(RefreshTables::doubles(n, Solo::kDown)));
  const std::unique_ptr<bool[]> counts(new bool[static_cast<size_t>(n)]);
  for (int64_t k = 0; k < n; ++k) counts[k] = r.presence.counts(r.seen[k], k);
  refresh_args.means = products.data();
  refresh_args.counts = counts.get();
  refresh(Solo(), refresh_args, RefreshTables({scratch.data(), nullptr, 0}, n, Solo::kDown));
}

inline void mean_step(const MeanRound& r, const Refresh& refresh_args) {
  kin_step(r);
  if (*r.rounds % r.every == 0) refresh_means(r, refresh_args);
}

}  // namespace secureafl::cpu
