#pragma once

#include <cstdint>
#include <optional>

#include "common/tensors.h"
#include "coordinate_wise/check.h"
#include "coordinate_wise/rows.h"

// The ops median and trimmed_mean for both devices: check arguments, allocate, pass plain pointers. A Device has
//   reduce_columns(rows, rule, trim, out)   applies the rule to each column
//   kHostReads                              true if the host can read tensors without waiting

namespace secureafl::SECUREAFL_KIND {

template <typename Device>
Tensor reduce_rows(const Tensor& updates, const std::optional<Tensor>& mask, Rule rule, int64_t trim) {
  const Device device(updates);
  const Tensor rows = dense(updates);
  const std::optional<Tensor> keep = mask ? std::optional(dense(*mask)) : std::nullopt;
  Tensor out = allocate(rows, rows.scalar_type(), {rows.size(1)});
  dispatch_any(rows.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    const StoredRows<scalar_t, compute_t<scalar_t>> stored{data<scalar_t>(rows), keep ? data<bool>(*keep) : nullptr,
                                                           rows.size(0), rows.size(1)};
    device.reduce_columns(stored, rule, trim, mutable_data<scalar_t>(out));
  });
  return out;
}

template <typename Device>
Tensor median(const Tensor& updates, const std::optional<Tensor>& mask) {
  check_rows("median", updates, mask);
  return reduce_rows<Device>(updates, mask, Rule::kMedian, 0);
}

template <typename Device>
Tensor trimmed_mean(const Tensor& updates, int64_t trim, const std::optional<Tensor>& mask) {
  const Check check = check_rows("trimmed_mean", updates, mask);
  int64_t rows = updates.size(0);
  if (Device::kHostReads && mask) rows = count_true(dense(*mask));
  check.trim(trim, rows);
  return reduce_rows<Device>(updates, mask, Rule::kTrimmedMean, trim);
}

}  // namespace secureafl::SECUREAFL_KIND

// Used at the end of ops_cpu.cpp and ops_cuda.cu.
#define SECUREAFL_REGISTER_RULES(Device, key)                                       \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                                    \
    m.impl("median", TORCH_BOX(&secureafl::median<secureafl::Device>));             \
    m.impl("trimmed_mean", TORCH_BOX(&secureafl::trimmed_mean<secureafl::Device>)); \
  }
