#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/chunks_cpu.h"
#include "common/simd_cpu.h"
#include "common/team.h"
#include "round/judge.h"
#include "row_wise/kinship/choose.h"
#include "row_wise/kinship/kinship.h"

// A round in the three steps of kinship.h. The first and the last run on all threads, in chunks that depend only on d.

namespace secureafl::cpu {

constexpr int64_t kKinTile = 2048;  // coordinates per tile: the shared values stay in the L1 cache

// row . g, each (width), in interleaved sums that vectorise
SECUREAFL_AVX2_CLONES inline double product_with(const float* __restrict row, const double* __restrict g,
                                                 int64_t width) {
  constexpr int kSide = 16;
  double sums[kSide] = {}, sum = 0;
  int64_t c = 0;
  for (; c + kSide <= width; c += kSide) {
    for (int lane = 0; lane < kSide; ++lane) sums[lane] += row[c + lane] * g[c + lane];
  }
  for (; c < width; ++c) sum += row[c] * g[c];
  for (const double part : sums) sum += part;
  return sum;
}

// sums (kSums) += the sums of the judge over one tile (width), as interleaved as in product_with
SECUREAFL_AVX2_CLONES inline void judge_tile(const double* __restrict g, const float* __restrict w,
                                             const float* __restrict last_g, const float* __restrict last_w,
                                             int64_t width, double* __restrict sums) {
  constexpr int kSide = 8;
  double lanes[kSums][kSide] = {};
  struct Lane {
    double (*sums)[kSide];
    int lane;
    double& operator[](int i) { return sums[i][lane]; }
  };
  int64_t c = 0;
  for (; c + kSide <= width; c += kSide) {
    for (int k = 0; k < kSide; ++k) {
      Lane lane{lanes, k};
      add_to_judge(g[c + k], w[c + k], last_g[c + k], last_w[c + k], lane);
    }
  }
  for (; c < width; ++c) add_to_judge(g[c], w[c], last_g[c], last_w[c], sums);
  for (int i = 0; i < kSums; ++i) {
    for (const double part : lanes[i]) sums[i] += part;
  }
}

// sums (r.sums()) += sums over the coordinates of one tile
inline void add_kin_tile(const KinRound& r, int64_t client, int64_t start, double* sums) {
  const int64_t width = std::min(kKinTile, r.d - start);
  double g[kKinTile];
  std::copy(r.update + start, r.update + start + width, g);
  for (int64_t k = 0; k < r.compared; ++k) {
    if (r.seen[k]) sums[k] += product_with(r.last_updates + k * r.d + start, g, width);
  }
  const float *w = r.trained_on + start, *last_g = r.update + start, *last_w = w;
  if (r.last_updates) {  // otherwise the update is compared with itself: no change, and no factor
    last_g = r.last_updates + client * r.d + start;
    last_w = r.last_models + client * r.d + start;
  }
  judge_tile(g, w, last_g, last_w, width, sums + r.compared);
  if (!r.centered) return;
  double center[kKinTile], *of_center = sums + r.compared + kSums;
  std::copy(r.center + start, r.center + start + width, center);
  for (int64_t k = 0; k < r.n; ++k) {
    if (r.seen[k]) of_center[k] += product_with(r.last_updates + k * r.d + start, center, width);
  }
  of_center[r.n] += product_with(r.update + start, center, width);
  of_center[r.n + 1] += product_with(r.center + start, center, width);
}

// direction (width) += weight * row
SECUREAFL_AVX2_CLONES inline void add_row(float weight, const float* __restrict row, float* __restrict direction,
                                          int64_t width) {
  for (int64_t c = 0; c < width; ++c) direction[c] += weight * row[c];
}

// next_model (width) = model - rate direction
SECUREAFL_AVX2_CLONES inline void step_model(const Verdict& v, const float* __restrict model,
                                             const float* __restrict direction, float* __restrict next_model,
                                             int64_t width) {
  for (int64_t c = 0; c < width; ++c) next_model[c] = stepped(v, model[c], direction[c]);
}

// Stores the new row of the client, `own` (width), if last updates are kept.
inline void store_row(const KinRound& r, const Verdict& v, int64_t start, const float* own, int64_t width) {
  if (!r.last_updates) return;
  const int64_t row = v.client * r.d + start;
  std::copy_n(own, width, r.last_updates + row);
  std::copy_n(r.trained_on + start, width, r.last_models + row);
}

// One tile: the next model and the new row of the client.
inline void step_kin_tile(const KinRound& r, const Choice& choice, int64_t start) {
  const int64_t width = std::min(kKinTile, r.d - start);
  const Verdict& v = choice.verdict;
  float direction[kKinTile] = {}, own[kKinTile];
  for (int32_t i = 0; i < choice.count; ++i) {
    add_row(choice.weights[i], r.last_updates + choice.rows[i] * r.d + start, direction, width);
  }
  for (int64_t c = 0; c < width; ++c) own[c] = clipped(v, r.update[start + c]);
  if (v.received) add_row(choice.own_weight, own, direction, width);
  if (r.centered) {
    float* center = r.center + start;
    add_row(choice.center_weight, center, direction, width);
    for (int64_t c = 0; c < width; ++c) {
      if (v.steps && choice.any && std::isfinite(direction[c])) center[c] = direction[c];
    }
  }
  step_model(v, r.model + start, direction, r.next_model + start, width);
  if (!v.stored) return;
  store_row(r, v, start, own, width);
}

// Calls each(first coordinate of the tile, chunk) for all tiles.
template <typename Each>
void for_kin_tiles(const Chunks& chunks, const Each& each) {
  torch::stable::parallel_for(0, chunks.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      for (int64_t tile = chunks.begin(chunk); tile < chunks.end(chunk); ++tile) each(tile * kKinTile, chunk);
    }
  });
}

// R: KinRound, or one with a `choose` of its own    step_tile: the last step for one tile
template <typename R, typename StepTile = decltype(&step_kin_tile)>
void kin_step(const R& r, const StepTile& step_tile = step_kin_tile) {
  const Chunks chunks((r.d + kKinTile - 1) / kKinTile, 4);
  std::vector<double> parts(static_cast<size_t>(chunks.count * r.sums()));  // (chunks, sums)
  const int32_t client = client_of(r);
  for_kin_tiles(chunks,
                [&](int64_t start, int64_t chunk) { add_kin_tile(r, client, start, parts.data() + chunk * r.sums()); });
  std::vector<double> sums = sum_chunks(parts, r.sums()), scratch(static_cast<size_t>(Table::doubles(r.n)));
  std::vector<int32_t> rows(static_cast<size_t>(r.n));
  std::vector<float> weights(static_cast<size_t>(r.n));
  Choice choice{};
  choice.rows = rows.data();
  choice.weights = weights.data();
  choose(Solo(), r, sums.data(), Table(scratch.data(), r.n), &choice);
  for_kin_tiles(chunks, [&](int64_t start, int64_t) { step_tile(r, choice, start); });
}

}  // namespace secureafl::cpu
