#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "coordinate_wise/rows.h"
#include "lbfgs/estimate.h"

// The input of the rule of `aggregate`, computed on the fly (Rows of coordinate_wise/rows.h).

namespace secureafl::SECUREAFL_KIND {

// The estimates of the wanted clients. The row of the arriving client is its update, if accepted.
template <typename T>
struct EstimatedRows {
  using value_type = T;
  static constexpr bool kStored = false;
  History<T> history;
  Corrections corrections;
  Wanted wanted;
  const T* update;       // (d)
  const bool* accepted;  // ()
  int64_t n, d;

  SECUREAFL_FN bool takes_part(int64_t k) const { return k == wanted.except ? *accepted : wanted(k); }

  template <int kRun>
  SECUREAFL_FN void keys(int64_t k, int64_t c, Key<T> (&out)[kRun]) const {
    if (k == wanted.except) {
      for (int i = 0; i < kRun; ++i) out[i] = to_key<T>(update[c + i]);
      return;
    }
    T values[kRun];
    estimate_run(history, corrections, k, c, values);
    for (int i = 0; i < kRun; ++i) out[i] = to_key<T>(values[i]);
  }

  SECUREAFL_FN Key<T> key(int64_t k, int64_t c) const { return key_or_absent(*this, k, c); }
};

}  // namespace secureafl::SECUREAFL_KIND
