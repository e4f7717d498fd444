#pragma once

#include <math.h>

#include <string>

#include "row_wise/kinship/ops_impl.h"
#include "row_wise/row_rules/row_rules.h"

// The op row_step_ for both devices. A Device has row_step(round, like) and kHostReads.

namespace secureafl::SECUREAFL_KIND {

inline RowRule row_rule_named(const char* op, const std::string& name) {
  if (name == "krum") return RowRule::kKrum;
  if (name == "spectral") return RowRule::kSpectral;
  if (name == "geometric_median") return RowRule::kGeometricMedian;
  if (name == "centered_clip") return RowRule::kCenteredClip;
  refuse(op, "rule must be krum, spectral, geometric_median or centered_clip, got '", name, "'");
}

template <typename Device>
RowsOutcome row_step(const Tensor& update, const Tensor& client, const Tensor& trained_on, int64_t now_row,
                     int64_t next_row, Tensor models, Tensor last_updates, Tensor last_models, Tensor seen,
                     Tensor products, Tensor centre, Tensor rounds, Tensor clock, Tensor last_epoch, Tensor uploads,
                     Tensor seen_factors, Tensor recorded, Tensor factor_counts, Tensor counts, double lr,
                     double quantile, double max_norm, bool filter, bool receive, bool store_all, bool hold,
                     int64_t expiry, int64_t probation, bool alone, int64_t quorum, StringHandle rule_name,
                     double remove, double radius, int64_t iterations) {
  constexpr const char* op = "row_step_";
  const std::string rule = take_string(rule_name);
  const Check check(op, "models", models, /*two_byte_types=*/false);
  const RowsState state{models, last_updates, last_models, seen, rounds, &products};
  const int64_t n = state.check<Device>(check, op);
  check.state("centre", centre, ScalarType::Float, "(d,)", {models.size(1)});
  const RowRule weighs = row_rule_named(op, rule);
  check.number("remove must be 0 or more and below 1", remove, remove >= 0 && remove < 1);
  check.number("radius must be a number", radius, !isnan(radius));
  check.within("iterations must lie in", iterations, 1, INT32_MAX);
  const PresenceState presence{clock, last_epoch, uploads, expiry, probation};
  const Arrival arrival{dense(update), client,       dense(trained_on), now_row,       next_row,
                        models,        seen_factors, recorded,          factor_counts, counts};
  std::vector<Span> spans = state.spans();
  spans.push_back(span_of("centre", centre, true));
  const RoundSettings settings{lr, quantile, max_norm, filter, receive, store_all, hold};
  check_row_wise<Device>(check, op, n, presence, arrival, settings, quorum, /*span=*/1, std::move(spans));

  const Device device(models);
  RowRound r{};
  const RowsOutcome outcome = state.fill(r, arrival, alone, quorum);
  settings.fill(r);
  r.presence = presence.view(alone);
  r.centered = weighs == RowRule::kCenteredClip;
  r.center = mutable_data<float>(centre);
  r.weighs = weighs;
  r.remove = remove;
  r.radius = radius;
  r.iterations = iterations;
  device.row_step(r, models);
  return outcome;
}

}  // namespace secureafl::SECUREAFL_KIND

// Used at the end of ops_cpu.cpp and ops_cuda.cu.
#define SECUREAFL_REGISTER_ROW_RULES(Device, key)                            \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                             \
    m.impl("row_step_", TORCH_BOX(&secureafl::row_step<secureafl::Device>)); \
  }
