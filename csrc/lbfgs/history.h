#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace secureafl::SECUREAFL_KIND {

constexpr int64_t kMaxPairs = 16;

// The history of all clients. All tensors are contiguous. Of the m slots of client k, pairs[k] are filled, oldest
// first.
template <typename T>
struct History {
  const T* model;         // (d)
  const T* last_updates;  // (n, d)
  const T* last_models;   // (n, d)
  const T* dw;            // (n, m, d)
  const T* dg;            // (n, m, d)
  const int64_t* pairs;   // (n)
  int64_t n, m, d;

  SECUREAFL_FN const T* w(int64_t k) const { return last_models + k * d; }
  SECUREAFL_FN const T* g(int64_t k) const { return last_updates + k * d; }
  SECUREAFL_FN const T* s(int64_t k, int64_t j) const { return dw + (k * m + j) * d; }
  SECUREAFL_FN const T* y(int64_t k, int64_t j) const { return dg + (k * m + j) * d; }
  // An out-of-range count is read as 0: on a GPU the host cannot check it without waiting for the device.
  SECUREAFL_FN int64_t pairs_of(int64_t k) const { return pairs[k] > 0 && pairs[k] <= m ? pairs[k] : 0; }
};

// The clients whose estimates are wanted: all, or all seen clients except the arriving one.
struct Wanted {
  const bool* seen;  // (n) or null
  int64_t except;    // a client to leave out, or -1

  SECUREAFL_BOTH bool operator()(int64_t k) const { return k != except && (seen == nullptr || seen[k]); }
};

}  // namespace secureafl::SECUREAFL_KIND
