#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "lbfgs/lbfgs.h"

namespace secureafl::SECUREAFL_KIND {

// The corrections of all clients.
struct Corrections {
  const double* factors;  // (n, 2m + 1): factors of y_0 .., s_0 .., x in the first 2 pairs + 1 places
  const Status* status;   // (n)
};

template <typename T, int kRun>
SECUREAFL_FN void add_scaled(double factor, const T* row, double (&sum)[kRun]) {
  for (int i = 0; i < kRun; ++i) sum[i] += factor * row[i];
}

// Coordinates c .. c + kRun - 1 of the estimate of client k. Row by row, so that a long run vectorises. The order of
// each sum does not depend on kRun.
template <typename T, int kRun>
SECUREAFL_FN void estimate_run(const History<T>& h, const Corrections& corrections, int64_t k, int64_t c,
                               T (&out)[kRun]) {
  const T *g = h.g(k) + c, *w = h.w(k) + c, *model = h.model + c;
  if (!is_corrected(corrections.status[k])) {
    for (int i = 0; i < kRun; ++i) out[i] = g[i];
    return;
  }
  const int64_t pairs = h.pairs[k];
  const double* factor = corrections.factors + k * rows_of(h.m);
  double sum[kRun];
  for (int i = 0; i < kRun; ++i) sum[i] = factor[2 * pairs] * (static_cast<double>(model[i]) - w[i]);
  for (int64_t j = 0; j < pairs; ++j) add_scaled(factor[j], h.y(k, j) + c, sum);
  for (int64_t j = 0; j < pairs; ++j) add_scaled(factor[pairs + j], h.s(k, j) + c, sum);
  for (int i = 0; i < kRun; ++i) out[i] = static_cast<T>(g[i] + sum[i]);
}

// One coordinate of the estimate of client k.
template <typename T>
SECUREAFL_FN T estimate_at(const History<T>& h, const Corrections& corrections, int64_t k, int64_t c) {
  T value[1];
  estimate_run(h, corrections, k, c, value);
  return value[0];
}

}  // namespace secureafl::SECUREAFL_KIND
