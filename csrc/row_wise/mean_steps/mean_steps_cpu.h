#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/chunks_cpu.h"
#include "row_wise/kinship/kin_step_cpu.h"
#include "row_wise/mean_steps/choose.h"
#include "row_wise/mean_steps/mean_steps.h"
#include "row_wise/support/refresh_cpu.h"

namespace secureafl::cpu {

using torch::headeronly::BFloat16;

// The inner products are added up in fixed chunks of d.
inline Chunks chunks_of_means(const MeanRound& r) {
  constexpr int64_t kMostNumbers = int64_t{1} << 22;  // of all chunks together
  const int64_t tiles = (r.d + kKinTile - 1) / kKinTile, most = std::max<int64_t>(kMostNumbers / (r.n * r.n), 1);
  return Chunks(tiles, std::max<int64_t>((tiles + most - 1) / most, 4));
}

// Memory of a refresh, with that of the inner products of the means.
struct MeansScratch {
  Chunks chunks;
  std::vector<double> parts;     // (chunks, n, n)
  std::vector<double> products;  // (n, n)
  std::vector<double> lengths;   // (n)
  RefreshScratch refresh;

  explicit MeansScratch(const MeanRound& r)
      : chunks(chunks_of_means(r)),
        parts(static_cast<size_t>(chunks.count * r.n * r.n)),
        products(static_cast<size_t>(r.n * r.n)),
        lengths(static_cast<size_t>(r.n)),
        refresh(r.n) {}
};

// A piece of a mean (width) as floats; in `buffer` if it is stored in two bytes.
inline const float* floats_of(const MeanRound& r, int64_t at, int64_t width, float* buffer) {
  if (!r.two_bytes) return static_cast<const float*>(r.own_means) + at;
  std::copy_n(static_cast<const BFloat16*>(r.own_means) + at, width, buffer);
  return buffer;
}

constexpr int64_t kMeanPiece = 512;  // coordinates at a time: those of 1,000 means stay in the L2 cache
constexpr int kEdge = 3;             // of a block of products: 9 sums, 3 rows and a column fit the 16 registers of AVX2

// Pieces (width) of kEdge means from that of client `first` on; past the last client its piece again.
struct MeanPieces {
  const float* rows[kEdge];
  float buffer[kEdge][kMeanPiece];  // unused if the means are floats

  MeanPieces(const MeanRound& r, int64_t first, int64_t start, int64_t width) {
    for (int i = 0; i < kEdge; ++i) {
      rows[i] = floats_of(r, std::min(first + i, r.n - 1) * r.d + start, width, buffer[i]);
    }
  }
};

// sums += the products of each row with each column, (width) each. Over 32 coordinates of a lane in float32, then in
// float64. Vectors of the compiler: it does not keep as many sums in registers by itself.
SECUREAFL_AVX2_CLONES inline void add_products(const float* const (&rows)[kEdge], const float* const (&columns)[kEdge],
                                               int64_t width, double (&sums)[kEdge][kEdge]) {
  constexpr int64_t kLanes = 8, kPiece = 32 * kLanes;
  using Lanes = float __attribute__((vector_size(4 * kLanes)));
  using Unaligned = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
  int64_t c = 0;
  while (c + kLanes <= width) {
    const int64_t end = c + std::min(kPiece, (width - c) / kLanes * kLanes);
    Lanes lanes[kEdge][kEdge] = {};
    for (; c < end; c += kLanes) {
      Lanes row[kEdge];
      for (int i = 0; i < kEdge; ++i) row[i] = *reinterpret_cast<const Unaligned*>(rows[i] + c);
      for (int k = 0; k < kEdge; ++k) {
        const Lanes column = *reinterpret_cast<const Unaligned*>(columns[k] + c);
        for (int i = 0; i < kEdge; ++i) lanes[i][k] += row[i] * column;
      }
    }
    for (int i = 0; i < kEdge; ++i) {
      for (int k = 0; k < kEdge; ++k) {
        for (int lane = 0; lane < kLanes; ++lane) sums[i][k] += lanes[i][k][lane];
      }
    }
  }
  for (; c < width; ++c) {
    for (int i = 0; i < kEdge; ++i) {
      for (int k = 0; k < kEdge; ++k) sums[i][k] += static_cast<double>(rows[i][c]) * columns[k][c];
    }
  }
}

// products (n, n), lower triangle += the products of the means over the coordinates start .. start + width - 1
inline void add_products_of_means(const MeanRound& r, int64_t start, int64_t width, double* products) {
  for (int64_t down = 0; down < r.n; down += kEdge) {
    const MeanPieces rows(r, down, start, width);
    for (int64_t across = 0; across <= down; across += kEdge) {
      const MeanPieces columns(r, across, start, width);
      double sums[kEdge][kEdge] = {};
      add_products(rows.rows, columns.rows, width, sums);
      for (int64_t i = down; i < std::min(down + kEdge, r.n); ++i) {
        for (int64_t k = across; k <= std::min(across + kEdge - 1, i); ++k) {
          products[i * r.n + k] += sums[i - down][k - across];
        }
      }
    }
  }
}

// scratch.products: inner products of the clients' means, lower triangle.
inline void products_of_means(const MeanRound& r, MeansScratch& scratch) {
  for_kin_tiles(scratch.chunks, [&](int64_t tile, int64_t chunk) {
    const int64_t stop = std::min(tile + kKinTile, r.d);
    double* products = scratch.parts.data() + chunk * r.n * r.n;
    for (int64_t start = tile; start < stop; start += kMeanPiece) {
      add_products_of_means(r, start, std::min(kMeanPiece, stop - start), products);
    }
  });
  add_chunks(scratch.parts, scratch.products);
}

inline void refresh_means(const MeanRound& r, Refresh refresh_args, MeansScratch& scratch) {
  const int64_t n = r.n;
  std::vector<double>&products = scratch.products, &lengths = scratch.lengths;
  products_of_means(r, scratch);
  for (int64_t k = 0; k < n; ++k) lengths[k] = shortened(r, k, products[k * n + k]);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = 0; k <= i; ++k) products[i * n + k] *= lengths[i] * lengths[k];
    for (int64_t k = 0; k < i; ++k) products[k * n + i] = products[i * n + k];
  }
  refresh_args.means = products.data();
  refresh_clients(r, refresh_args, scratch.refresh);
}

// mean (width): of the client's updates, after own (width)
SECUREAFL_AVX2_CLONES inline void add_to_mean(const Choice& choice, const float* __restrict own, float* __restrict mean,
                                              int64_t width) {
  for (int64_t c = 0; c < width; ++c) mean[c] = averaged(choice, mean[c], own[c]);
}

inline void add_to_mean(const Choice& choice, const float* own, BFloat16* mean, int64_t width) {
  for (int64_t c = 0; c < width; ++c) mean[c] = averaged(choice, mean[c], own[c]);
}

// One tile: the next model, the client's new mean, and its new row if these are kept.
inline void step_mean_tile(const MeanRound& r, const Choice& choice, int64_t start) {
  const int64_t width = std::min(kKinTile, r.d - start);
  const Verdict& v = choice.verdict;
  float direction[kKinTile] = {}, own[kKinTile];
  for (int64_t c = 0; c < width; ++c) own[c] = clipped(v, r.update[start + c]);
  if (v.received) add_row(choice.own_weight, own, direction, width);
  step_model(v, r.model + start, direction, r.next_model + start, width);
  if (!v.stored) return;
  const int64_t at = v.client * r.d + start;
  if (choice.mean_share > 0 && r.two_bytes) add_to_mean(choice, own, static_cast<BFloat16*>(r.own_means) + at, width);
  if (choice.mean_share > 0 && !r.two_bytes) add_to_mean(choice, own, static_cast<float*>(r.own_means) + at, width);
  store_row(r, v, start, own, width);
}

inline void mean_step(const MeanRound& r, const Refresh& refresh_args) {
  std::optional<MeansScratch> scratch;
  if ((*r.rounds + 1) % r.every == 0) scratch.emplace(r);
  kin_step(r, step_mean_tile);
  if (scratch) refresh_means(r, refresh_args, *scratch);
}

}  // namespace secureafl::cpu
