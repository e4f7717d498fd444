#pragma once

#include <cstdint>

#include "host_device.h"
#include "lbfgs.h"
#include "rank.h"

// What a coordinate-wise rule runs over: n rows that lie in memory, or n rows made on the fly.
// Both answer key(k, c): the key of row k at coordinate c, kAbsent if the row takes no part.

namespace secureafl::SECUREAFL_KIND {

template <typename scalar_t, typename T>
struct StoredRows {
  using value_type = T;
  const scalar_t* updates;  // (n, d)
  const bool* mask;         // (n) or null
  int64_t n, d;

  SECUREAFL_FN Key<T> key(int64_t k, int64_t c) const {
    if (mask != nullptr && !mask[k]) return kAbsent<T>;
    return to_key<T>(static_cast<T>(updates[k * d + c]));
  }
};

// The estimates of the wanted clients, and in the arriving client's place what it sent, if accepted.
template <typename T>
struct EstimatedRows {
  using value_type = T;
  History<T> history;
  Corrections corrections;
  Wanted wanted;
  const T* update;       // (d)
  const bool* accepted;  // ()
  int64_t n, d;

  SECUREAFL_FN Key<T> key(int64_t k, int64_t c) const {
    if (k == wanted.except) return *accepted ? to_key<T>(update[c]) : kAbsent<T>;
    return wanted(k) ? to_key<T>(estimate_at(history, corrections, k, c)) : kAbsent<T>;
  }
};

}  // namespace secureafl::SECUREAFL_KIND
