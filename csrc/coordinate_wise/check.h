#pragma once

#include <optional>
#include <string>

#include "common/check.h"
#include "coordinate_wise/rank.h"

namespace secureafl::SECUREAFL_KIND {

// updates (n, d), mask (n)
inline Check check_rows(const char* op, const Tensor& updates, const std::optional<Tensor>& mask) {
  const Check check(op, "updates", updates, /*two_byte_types=*/true);
  check.shape("updates", updates, "(n, d)", {-1, -1});
  if (mask) check.typed("mask", *mask, ScalarType::Bool, "(n,)", {updates.size(0)});
  return check;
}

inline Rule rule_named(const char* op, const std::string& name) {
  if (name == "median") return Rule::kMedian;
  if (name == "mean") return Rule::kMean;
  if (name == "trimmed_mean") return Rule::kTrimmedMean;
  refuse(op, "rule must be median, trimmed_mean or mean, got '", name, "'");
}

}  // namespace secureafl::SECUREAFL_KIND
