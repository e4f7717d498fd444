#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/chunks_cpu.h"
#include "coordinate_wise/columns_cpu.h"
#include "round/half_cpu.h"
#include "round/judge.h"
#include "round/round.h"
#include "round/tile_cpu.h"

// The pass over the history. All work on a tile is done while it is in a near cache.

namespace secureafl::cpu {

// kLanes: sums per row, side by side, so that additions vectorise. kFlush: number of tiles after which the float32 sums
// are added to the float64 sums.
constexpr int kLanes = 8;
constexpr int64_t kFlush = 64;

// Values that all tiles of one pass share.
struct Plan {
  std::vector<int64_t> estimated;  // clients whose estimate takes part
  std::vector<int64_t> carried;  // clients whose products are updated by the step: seen, and their row does not change
  int64_t count;                 // rows that take part
  RankRange ranks;               // the mean is taken over these ranks
  std::vector<Step> network;     // sorts them into place

  Plan(const Round& r, const Verdict& v) {
    for (int64_t k = 0; k < r.n; ++k) {
      if (k != v.client && r.takes_part(k, v)) estimated.push_back(k);
      if (r.seen[k] && !(k == v.client && v.stored)) carried.push_back(k);
    }
    count = static_cast<int64_t>(estimated.size()) + v.received;
    ranks = rank_range(r.rule, r.trim, count);
    if (!ranks.empty() && r.rule != Rule::kMean) network = selection_network(count, ranks.first, ranks.last);
  }
};

// Scratch memory of one thread.
struct Scratch {
  std::vector<KeyRow> keys;     // (count)
  std::vector<float> products;  // (own_x(0), kLanes)

  Scratch(const Round& r, const Plan& plan)
      : keys(static_cast<size_t>(plan.count)), products(static_cast<size_t>(PassSums{r.n, r.m}.own_x(0) * kLanes)) {}
};

// keys (estimated): keys of the estimates g + B x
template <typename Stored>
SECUREAFL_AVX2_CLONES void estimate_keys(const Round& r, const Plan& plan, const Tile<Stored>& tile,
                                         const Tile<Stored>& ahead, const float* __restrict model,
                                         KeyRow* __restrict keys) {
  const int64_t planes = r.planes();
  for (const int64_t k : plan.estimated) {
    const float* factors = r.factors + k * (planes + 2);
    const float* __restrict w = tile.w(k), * __restrict g = tile.g(k);
    float sum[kColumns];
    for (int i = 0; i < kColumns; ++i) sum[i] = g[i] + factors[planes] * (model[i] - w[i]);
    for (int64_t j = 0; j < planes; ++j) {
      const float factor = factors[j];
      const Stored* __restrict row = tile.slot(j, k);
      for (int i = 0; i < kColumns; ++i) sum[i] += factor * to_float(row[i]);
    }
    for (int i = 0; i < kColumns; ++i) keys->keys[i] = to_key(sum[i]);
    ++keys;
    prefetch(ahead.w(k));
    prefetch(ahead.g(k));
  }
}

// sums (kLanes) += row . step
template <typename Stored>
inline void add_product(const Stored* __restrict row, const float* __restrict step, float* __restrict sums) {
#pragma GCC unroll 1  // unrolled, the compiler would not vectorise the lanes
  for (int lane = 0; lane < kLanes; ++lane) {
    float sum = sums[lane];
    for (int i = 0; i < kColumns; i += kLanes) sum += to_float(row[i + lane]) * step[i + lane];
    sums[lane] = sum;
  }
}

// sums (own_x(0), kLanes) += products of the step with every slot and every x, in the order of PassSums
template <typename Stored>
SECUREAFL_AVX2_CLONES void add_products(const Round& r, const Plan& plan, const Tile<Stored>& tile,
                                        const Tile<Stored>& ahead, const float* __restrict model,
                                        const float* __restrict step, float* __restrict sums) {
  const PassSums at{r.n, r.m};
  for (int64_t j = 0; j < r.planes(); ++j) {
    for (const int64_t k : plan.carried) {
      add_product(tile.slot(j, k), step, sums + at.slot(j, k) * kLanes);
      prefetch(ahead.slot(j, k));
    }
  }
  for (const int64_t k : plan.carried) {
    const float* __restrict w = tile.w(k);
    float x[kColumns];
    for (int i = 0; i < kColumns; ++i) x[i] = model[i] - w[i];
    add_product(x, step, sums + at.x(k) * kLanes);
  }
}

// Adds products (own_x(0), kLanes) to sums (own_x(0)) and sets them to zero.
inline void flush(std::vector<float>& products, double* sums) {
  for (size_t row = 0; row < products.size() / kLanes; ++row) {
    for (int lane = 0; lane < kLanes; ++lane) sums[row] += products[row * kLanes + lane];
  }
  std::fill(products.begin(), products.end(), 0.0f);
}

// a . b, each (kColumns)
template <typename A, typename B>
inline double product(const A* a, const B* b) {
  double sums[kLanes] = {}, sum = 0;
  for (int i = 0; i < kColumns; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      sums[lane] += static_cast<double>(to_float(a[i + lane])) * static_cast<double>(to_float(b[i + lane]));
    }
  }
  for (const double part : sums) sum += part;
  return sum;
}

// Replaces the row of the client by this update. sums (count()) += its own products, computed from the stored (rounded)
// values.
template <typename Stored>
void renew_row(const Round& r, const Verdict& v, const Tile<Stored>& tile, const float (&update)[kColumns],
               const float (&next)[kColumns], double* sums) {
  const PassSums at{r.n, r.m};
  float *w = tile.w(v.client), *g = tile.g(v.client);
  Stored *new_y = tile.slot(v.slot, v.client), *new_s = tile.slot(r.m + v.slot, v.client);
  float trained_on[kColumns], x[kColumns];
  load_columns(r.trained_on, tile.start, r.d, trained_on);
  for (int i = 0; i < kColumns; ++i) {
    if (v.pushed) {
      round_to((update[i] - g[i]) / v.y_scale, new_y[i]);
      round_to((trained_on[i] - w[i]) / v.s_scale, new_s[i]);
    }
    w[i] = trained_on[i];
    g[i] = update[i];
    x[i] = next[i] - trained_on[i];
  }
  for (int64_t j = 0; j < r.planes(); ++j) {
    const Stored* row = tile.slot(j, v.client);
    sums[at.own_x(j)] += product(row, x);
    if (!v.pushed) continue;
    sums[at.own_s(j)] += product(row, new_s);
    sums[at.own_y(j)] += product(row, new_y);
  }
  sums[at.own_x(r.planes())] += product(x, x);
}

// From the keys of the estimates to the next model. keys (count): the last is for that of the update, if received.
inline void step_columns(const Round& r, const Verdict& v, const Plan& plan, const float (&model)[kColumns],
                         const float (&update)[kColumns], std::vector<KeyRow>& keys, float (&next)[kColumns]) {
  float direction[kColumns] = {};
  if (v.received) {
    for (int i = 0; i < kColumns; ++i) keys.back().keys[i] = to_key(update[i]);
  }
  if (!plan.ranks.empty()) {
    apply(plan.network, keys.data());
    mean_rows<float>(keys.data(), plan.ranks.first, plan.ranks.last, r.rule != Rule::kMean, direction);
  }
  for (int i = 0; i < kColumns; ++i) next[i] = stepped(v, model[i], direction[i]);
}

// One tile: the next model, the products with the step, the new row of the client. sums (count()). ahead: the next
// tile, to prefetch.
template <typename Stored>
void pass_tile(const Round& r, const Verdict& v, const Plan& plan, const Tile<Stored>& tile, const Tile<Stored>& ahead,
               Scratch& scratch, double* sums) {
  float model[kColumns], update[kColumns], next[kColumns], step[kColumns];
  load_columns(r.model, tile.start, r.d, model);
  load_columns(r.update, tile.start, r.d, update);
  for (float& g : update) g *= v.clip;

  estimate_keys(r, plan, tile, ahead, model, scratch.keys.data());
  step_columns(r, v, plan, model, update, scratch.keys, next);
  for (int i = 0; i < kColumns; ++i) step[i] = next[i] - model[i];
  std::copy(next, next + std::min<int64_t>(kColumns, r.d - tile.start), r.next_model + tile.start);

  add_products(r, plan, tile, ahead, model, step, scratch.products.data());
  sums[PassSums{r.n, r.m}.step_square()] += product(step, step);
  if (v.stored) renew_row(r, v, tile, update, next, sums);
}

// Returns the sums of PassSums (count()).
template <typename Stored>
std::vector<double> pass(const Round& r, const Verdict& v) {
  const Plan plan(r, v);
  const Chunks chunks(r.tiles, 4);
  const int64_t count = PassSums{r.n, r.m}.count();
  std::vector<double> parts(static_cast<size_t>(chunks.count * count));  // (chunks, count)
  torch::stable::parallel_for(0, chunks.count, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch(r, plan);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      double* sums = parts.data() + chunk * count;
      for (int64_t tile = chunks.begin(chunk); tile < chunks.end(chunk); ++tile) {
        const Tile<Stored> here(r, tile), ahead(r, std::min(tile + 1, r.tiles - 1));
        pass_tile(r, v, plan, here, ahead, scratch, sums);
        if ((tile - chunks.begin(chunk)) % kFlush == kFlush - 1) flush(scratch.products, sums);
      }
      flush(scratch.products, sums);
    }
  });
  return sum_chunks(parts, count);
}

}  // namespace secureafl::cpu
