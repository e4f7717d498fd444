#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/team.h"
#include "round/judge_cpu.h"
#include "round/pass_cpu.h"
#include "round/pass_last_cpu.h"
#include "round/renew.h"

// A round in the three steps of round.h, each on all threads.

namespace secureafl::cpu {

// Calls each(k, scratch) for every client; scratch (solve_scratch(m))
template <typename Each>
void for_clients(const Round& r, const Each& each) {
  torch::stable::parallel_for(0, r.n, 8, [&](int64_t begin, int64_t end) {
    std::vector<double> scratch(static_cast<size_t>(solve_scratch(r.m)));
    for (int64_t k = begin; k < end; ++k) each(k, scratch.data());
  });
}

// Returns the sums of PassSums (count()); none without pairs.
inline std::vector<double> apply(const Round& r, const Verdict& v) {
  std::vector<double> sums;
  if (v.changes_nothing()) {  // so a flood of rejected updates does not cost a pass each
    std::copy(r.model, r.model + r.d, r.next_model);
    sums.resize(static_cast<size_t>(pass_sums(r.n, r.m)));
  } else if (r.m == 0) {
    pass_last(r, v);
  } else {
    sums = r.half ? pass<uint16_t>(r, v) : pass<float>(r, v);
  }
  if (r.m > 0) {
    for (int64_t k = 0; k < r.n; ++k) {
      if (int64_t* count = counted_at(r, v, k)) ++*count;
    }
  }
  if (v.stored) r.seen[v.client] = true;
  return sums;
}

// sums (count()): see PassSums.
inline void renew(const Round& r, const Verdict& v, const double* sums) {
  const PassSums at{r.n, r.m};
  for_clients(r, [&](int64_t k, double* scratch) {
    for (int64_t j = 0; j <= r.planes(); ++j) scratch[j] = sums[at.slot(j, k)];  // slot(2m, k) is x(k)
    const ClientProducts products = client_products(r, k);
    renew_products(Solo(), r, v, k, products, scratch, sums + at.own_x(0));
    solve_client(Solo(), r, k, products, scratch);
  });
}

// Returns the sums (count) of parts (count, blocks).
inline std::vector<double> add_parts(const double* parts, int64_t count, int64_t blocks) {
  std::vector<double> sums(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t b = 0; b < blocks; ++b) sums[i] += parts[i * blocks + b];
  }
  return sums;
}

inline void step(const Round& r) {
  const Verdict v = judge_update(r, update_sums(r).data());
  const std::vector<double> sums = apply(r, v);
  if (r.m > 0) renew(r, v, sums.data());
}

inline void refresh(const Round& r) {
  for_clients(r, [&](int64_t k, double* scratch) { solve_client(Solo(), r, k, client_products(r, k), scratch); });
}

}  // namespace secureafl::cpu
