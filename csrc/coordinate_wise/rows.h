#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "coordinate_wise/rank.h"

// Rows: the input of a coordinate-wise rule, n rows in memory or n rows computed on the fly (lbfgs/aggregate.h). Both
// have
//   bool takes_part(k)       false: row k is ignored
//   void keys(k, c, out)     keys of row k at the coordinates c .. c + kRun - 1; out (kRun)
//   Key  key(k, c)           one key, kAbsent if the row takes no part
//   kStored                  true if the rows are in memory

namespace secureafl::SECUREAFL_KIND {

template <typename Rows>
SECUREAFL_FN auto key_or_absent(const Rows& rows, int64_t k, int64_t c) {
  using T = typename Rows::value_type;
  Key<T> key[1] = {kAbsent<T>};
  if (rows.takes_part(k)) rows.keys(k, c, key);
  return key[0];
}

template <typename scalar_t, typename T>
struct StoredRows {
  using value_type = T;
  static constexpr bool kStored = true;
  const scalar_t* updates;  // (n, d)
  const bool* mask;         // (n) or null
  int64_t n, d;

  SECUREAFL_FN bool takes_part(int64_t k) const { return mask == nullptr || mask[k]; }
  SECUREAFL_FN T value(int64_t k, int64_t c) const { return static_cast<T>(updates[k * d + c]); }

  template <int kRun>
  SECUREAFL_FN void keys(int64_t k, int64_t c, Key<T> (&out)[kRun]) const {
    for (int i = 0; i < kRun; ++i) out[i] = to_key<T>(value(k, c + i));
  }

  SECUREAFL_FN Key<T> key(int64_t k, int64_t c) const { return key_or_absent(*this, k, c); }
};

}  // namespace secureafl::SECUREAFL_KIND
