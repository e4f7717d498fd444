#pragma once

#include "row_wise/kinship/ops_impl.h"
#include "row_wise/support/support.h"

// The op support_step_ for both devices. A Device has support_step(round, refresh, every, like) and kHostReads.

namespace secureafl::SECUREAFL_KIND {

template <typename Device>
RowsOutcome support_step(const Tensor& update, const Tensor& client, const Tensor& trained_on, int64_t now_row,
                         int64_t next_row, Tensor models, Tensor last_updates, Tensor last_models, Tensor seen,
                         Tensor products, Tensor similarity, Tensor met, Tensor basis, Tensor shift, Tensor rounds,
                         Tensor clock, Tensor last_epoch, Tensor uploads, Tensor seen_factors, Tensor recorded,
                         Tensor factor_counts, Tensor counts, double lr, double quantile, double max_norm, bool filter,
                         bool receive, bool store_all, bool hold, int64_t expiry, int64_t probation, bool alone,
                         int64_t quorum, int64_t span, int64_t every, double cut, double crowd, double crowd_least,
                         double odd, double odd_least, double kin, double short_square, double few_kin,
                         double short_level, double fade, double again, double most, double group, double group_spreads,
                         double group_least, double group_end, double group_left, double opposed, double opposed_end,
                         double fill, double apart, double apart_end) {
  constexpr const char* op = "support_step_";
  const Check check(op, "models", models, /*two_byte_types=*/false);
  const RowsState state{models, last_updates, last_models, seen, rounds, &products, &similarity, &met, "similarity"};
  const int64_t n = state.check<Device>(check, op);
  check.state("basis", basis, ScalarType::Double, "(3, n, n)", {kStages, n, n});
  check.state("shift", shift, ScalarType::Double, "(n,)", {n});
  const PresenceState presence{clock, last_epoch, uploads, expiry, probation};
  const Arrival arrival{dense(update), client,       dense(trained_on), now_row,       next_row,
                        models,        seen_factors, recorded,          factor_counts, counts};
  std::vector<Span> spans = state.spans();
  spans.insert(spans.end(), {span_of("basis", basis, true), span_of("shift", shift, true)});
  const RoundSettings settings{lr, quantile, max_norm, filter, receive, store_all, hold};
  check_row_wise<Device>(check, op, n, presence, arrival, settings, quorum, span, std::move(spans));
  check.within("every must lie in", every, 1, INT32_MAX);

  const Device device(models);
  KinRound r{};
  const RowsOutcome outcome = state.fill(r, arrival, alone, quorum);
  settings.fill(r);
  r.bounds.span = static_cast<double>(span);  // the others are kinship's; every client that counts is known
  r.presence = presence.view(alone);
  r.shift = data<double>(shift);
  const SupportBounds bounds{cut,         crowd,   crowd_least, odd,  odd_least, kin,           short_square, few_kin,
                             short_level, fade,    again,       most, group,     group_spreads, group_least,  group_end,
                             group_left,  opposed, opposed_end, fill, apart,     apart_end};
  const Refresh refresh{n, bounds, r.means, nullptr, mutable_data<double>(basis), mutable_data<double>(shift)};
  device.support_step(r, refresh, every, models);
  return outcome;
}

}  // namespace secureafl::SECUREAFL_KIND

// Used at the end of ops_cpu.cpp and ops_cuda.cu.
#define SECUREAFL_REGISTER_SUPPORT(Device, key)                                      \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                                     \
    m.impl("support_step_", TORCH_BOX(&secureafl::support_step<secureafl::Device>)); \
  }
