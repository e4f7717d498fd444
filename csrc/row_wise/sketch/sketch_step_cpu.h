#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/chunks_cpu.h"
#include "common/team.h"
#include "row_wise/sketch/choose.h"
#include "row_wise/sketch/sketch.h"

// A round in the three steps of sketch.h. The first and the last run on all threads, in chunks that depend only on the
// shapes.

namespace secureafl::cpu {

// parts (chunks, k, kBucketSums): sums over the places of each bucket. A chunk is some rows of `order`.
inline std::vector<double> bucket_parts(const SketchRound& r, const Chunks& chunks) {
  const int64_t count = r.k * kBucketSums;
  std::vector<double> parts(static_cast<size_t>(chunks.count * count));
  torch::stable::parallel_for(0, chunks.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      auto* sums = reinterpret_cast<double (*)[kBucketSums]>(parts.data() + chunk * count);
      for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row) {
        for (int64_t b = 0; b < r.k; ++b) add_place(r, row * r.k + b, sums[b]);
      }
    }
  });
  return parts;
}

inline void sketch_step(const SketchRound& r) {
  constexpr int64_t kLeastRows = 8, kLeastStep = 8192;
  const std::vector<double> sums = sum_chunks(bucket_parts(r, Chunks(r.rows, kLeastRows)), r.k * kBucketSums);
  const auto* buckets = reinterpret_cast<const double (*)[kBucketSums]>(sums.data());
  const ClientState before = client_state(r);
  std::vector<float> sketches(static_cast<size_t>(2 * r.k));
  double judged[kSums] = {};
  for (int64_t b = 0; b < r.k; ++b) finish_bucket(r, before.client, b, buckets[b], sketches.data(), judged);
  judged[kNonFinite] = non_finite(judged);

  Totals totals{tally_of(r, before, factor_of(before, judged)), 0,
                census_of_others(Solo(), r.presence, r.seen, r.n, before.client)};
  for (int64_t k = 0; k < r.n; ++k) totals.rows += r.seen[k] && k != before.client;
  std::vector<uint64_t> keys(static_cast<size_t>(r.n));
  const auto bins = std::make_unique<Bins>();
  SketchStep step{};
  choose_step(Solo(), r, judged, totals, sketches.data(), keys.data(), bins.get(), &step);

  torch::stable::parallel_for(0, r.d, kLeastStep, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) r.next_model[c] = next_value(r, step, c);
  });
}

}  // namespace secureafl::cpu
