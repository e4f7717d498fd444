#pragma once

#include <vector>

#include "row_wise/kinship/ops_impl.h"
#include "row_wise/mean_steps/mean_steps.h"
#include "row_wise/support/support.h"

// The op mean_step_ for both devices. A Device has mean_step(round, refresh, like) and kHostReads.

namespace secureafl::SECUREAFL_KIND {

// The mean of each client's updates, and numbers per client.
struct MeansState {
  const Tensor &means, &total, &noise, &norms, &basis, &shift;

  bool two_bytes() const { return means.scalar_type() == ScalarType::BFloat16; }

  template <typename Device>
  void check(const Check& check, int64_t n, int64_t d, int64_t span) const {
    check.state("means", means, two_bytes() ? ScalarType::BFloat16 : ScalarType::Float, "(n, d)", {n, d});
    check.state("total", total, ScalarType::Double, "(n,)", {n});
    check.state("noise", noise, ScalarType::Double, "(n,)", {n});
    check.state("norms", norms, ScalarType::Double, "(n,)", {n});
    check.state("basis", basis, ScalarType::Double, "(3, n, n)", {kStages, n, n});
    check.state("shift", shift, ScalarType::Double, "(n,)", {n});
    if constexpr (Device::kHostReads) {
      for (int64_t k = 0; k < n; ++k) {
        check.between("total must lie in 0 to span", data<double>(total)[k], 0, static_cast<double>(span));
        check.between("noise must lie in 0 to 1", data<double>(noise)[k], 0, 1);
        check.between("norms must be 0 or more", data<double>(norms)[k], 0, INFINITY);
      }
    }
  }

  void add_spans(std::vector<Span>& spans) const {
    spans.insert(spans.end(),
                 {span_of("means", means, true), span_of("total", total, true), span_of("noise", noise, true),
                  span_of("norms", norms, true), span_of("basis", basis, true), span_of("shift", shift, true)});
  }

  void fill(MeanRound& r) const {
    r.own_means = means.mutable_data_ptr();
    r.two_bytes = two_bytes();
    r.total = mutable_data<double>(total);
    r.noise = mutable_data<double>(noise);
    r.norms = mutable_data<double>(norms);
    r.shift = data<double>(shift);
  }
};

template <typename Device>
RowsOutcome mean_step(const Tensor& update, const Tensor& client, const Tensor& trained_on, int64_t now_row,
                      int64_t next_row, Tensor models, Tensor last_updates, Tensor last_models, Tensor seen,
                      Tensor means, Tensor total, Tensor noise, Tensor norms, Tensor basis, Tensor shift, Tensor rounds,
                      Tensor clock, Tensor last_epoch, Tensor uploads, Tensor seen_factors, Tensor recorded,
                      Tensor factor_counts, Tensor counts, double lr, double quantile, double max_norm, bool filter,
                      bool receive, bool store_all, bool hold, int64_t expiry, int64_t probation, int64_t quorum,
                      int64_t span, double least_share, double noisy, int64_t every, double cut, double crowd,
                      double crowd_least, double odd, double odd_least, double kin, double short_square, double few_kin,
                      double short_level, double fade, double again, double most, double group, double group_spreads,
                      double group_least, double group_end, double group_left, double opposed, double opposed_end,
                      double fill, double apart, double apart_end) {
  constexpr const char* op = "mean_step_";
  const Check check(op, "models", models, /*two_byte_types=*/false);
  const RowsState state{models, last_updates, last_models, seen, rounds};
  const int64_t n = state.check<Device>(check, op);
  if (filter && !state.keeps_last()) refuse(op, "filter must be false without last_updates, got true");
  const MeansState averages{means, total, noise, norms, basis, shift};
  check.within("span must lie in", span, 1, INT32_MAX);
  averages.check<Device>(check, n, models.size(1), span);
  const PresenceState presence{clock, last_epoch, uploads, expiry, probation};
  const Arrival arrival{dense(update), client,       dense(trained_on), now_row,       next_row,
                        models,        seen_factors, recorded,          factor_counts, counts};
  std::vector<Span> spans = state.spans();
  averages.add_spans(spans);
  const RoundSettings settings{lr, quantile, max_norm, filter, receive, store_all, hold};
  check_row_wise<Device>(check, op, n, presence, arrival, settings, quorum, span, std::move(spans));
  check.within("every must lie in", every, 1, INT32_MAX);
  check.least_share(least_share);
  check.number("noisy must be above 0 and below 1", noisy, noisy > 0 && noisy < 1);

  const Device device(models);
  MeanRound r{};
  const RowsOutcome outcome = state.fill(r, arrival, /*alone=*/true, quorum);
  averages.fill(r);
  settings.fill(r);
  r.bounds.span = static_cast<double>(span);
  r.presence = presence.view(/*alone=*/true);
  r.least_share = least_share;
  r.max_noise = noisy;
  r.every = every;
  const SupportBounds bounds{cut,         crowd,   crowd_least, odd,  odd_least, kin,           short_square, few_kin,
                             short_level, fade,    again,       most, group,     group_spreads, group_least,  group_end,
                             group_left,  opposed, opposed_end, fill, apart,     apart_end};
  const Refresh refresh{n, bounds, nullptr, nullptr, mutable_data<double>(basis), mutable_data<double>(shift)};
  device.mean_step(r, refresh, models);
  return outcome;
}

}  // namespace secureafl::SECUREAFL_KIND

// Used at the end of ops_cpu.cpp and ops_cuda.cu.
#define SECUREAFL_REGISTER_MEAN_STEPS(Device, key)                             \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                               \
    m.impl("mean_step_", TORCH_BOX(&secureafl::mean_step<secureafl::Device>)); \
  }
