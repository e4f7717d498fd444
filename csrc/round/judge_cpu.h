#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/chunks_cpu.h"
#include "common/team.h"
#include "round/judge.h"
#include "round/quantile.h"

namespace secureafl::cpu {

// sums (kSums) += sums over the coordinates of one tile.
inline void add_tile(const Round& r, int64_t client, int64_t tile, double* sums) {
  const int64_t start = tile * r.columns, width = std::min(r.columns, r.d - start);
  const float* last_w = r.last + (2 * tile * r.n + client) * r.columns;
  const float* last_g = last_w + r.n * r.columns;
  const float *w = r.trained_on + start, *update = r.update + start;
  for (int64_t i = 0; i < width; ++i) {
    const float g = update[i], s = w[i] - last_w[i], y = g - last_g[i];
    sums[kNonFinite] += !isfinite(g);
    sums[kGG] += static_cast<double>(g) * g;
    sums[kYY] += static_cast<double>(y) * y;
    sums[kSS] += static_cast<double>(s) * s;
    sums[kSY] += static_cast<double>(s) * y;
  }
}

// Sums over the update, (kSums).
inline std::vector<double> update_sums(const Round& r) {
  const int32_t client = client_of(r);
  const Chunks chunks(r.tiles, 32);
  std::vector<double> parts(static_cast<size_t>(chunks.count * kSums));  // (chunks, kSums)
  torch::stable::parallel_for(0, chunks.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      double sums[kSums] = {};  // local: threads would share a cache line
      for (int64_t tile = chunks.begin(chunk); tile < chunks.end(chunk); ++tile) add_tile(r, client, tile, sums);
      std::copy(sums, sums + kSums, parts.begin() + chunk * kSums);
    }
  });
  return sum_chunks(parts, kSums);
}

// sums (kSums)
inline Verdict judge_update(const Round& r, const double* sums) {
  const ClientState before = client_state(r);
  const double factor = factor_of(before, sums);
  const Census others = census_of_others(Solo(), r.presence, r.seen, r.n, before.client);
  const Verdict v = decide(r, before, sums, tally_of(r, before, factor), others);
  push_pair(r, v);
  return v;
}

}  // namespace secureafl::cpu
