#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "round/pass_cpu.h"

// The pass of a round without pairs. It reads the last update of every client, and no last model. There are no sums to
// make, so threads take any number of tiles.

namespace secureafl::cpu {

// keys (estimated): keys of the last updates. ahead: the next tile, to prefetch.
SECUREAFL_AVX2_CLONES inline void last_keys(const Plan& plan, const Tile<float>& tile, const Tile<float>& ahead,
                                            KeyRow* __restrict keys) {
  for (const int64_t k : plan.estimated) {
    const float* __restrict g = tile.g(k);
    for (int i = 0; i < kColumns; ++i) keys->keys[i] = to_key(g[i]);
    ++keys;
    prefetch(ahead.g(k));
  }
}

// One tile: the next model and the new row of the client. keys (count): scratch
inline void pass_last_tile(const Round& r, const Verdict& v, const Plan& plan, int64_t index,
                           std::vector<KeyRow>& keys) {
  const Tile<float> tile(r, index), ahead(r, std::min(index + 1, r.tiles - 1));
  float model[kColumns], update[kColumns], next[kColumns];
  load_columns(r.model, tile.start, r.d, model);
  load_columns(r.update, tile.start, r.d, update);
  for (float& g : update) g *= v.clip;
  last_keys(plan, tile, ahead, keys.data());
  step_columns(r, v, plan, model, update, keys, next);
  const int64_t width = std::min<int64_t>(kColumns, r.d - tile.start);
  std::copy(next, next + width, r.next_model + tile.start);
  if (!v.stored) return;
  std::copy(r.trained_on + tile.start, r.trained_on + tile.start + width, tile.w(v.client));
  std::copy(update, update + width, tile.g(v.client));
}

inline void pass_last(const Round& r, const Verdict& v) {
  const Plan plan(r, v);
  torch::stable::parallel_for(0, r.tiles, 4, [&](int64_t begin, int64_t end) {
    std::vector<KeyRow> keys(static_cast<size_t>(plan.count));
    for (int64_t tile = begin; tile < end; ++tile) pass_last_tile(r, v, plan, tile, keys);
  });
}

}  // namespace secureafl::cpu
