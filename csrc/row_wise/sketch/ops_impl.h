#pragma once

#include <vector>

#include "common/check.h"
#include "common/tensors.h"
#include "round/check.h"
#include "row_wise/sketch/sketch.h"

// The op sketch_step_ for both devices. A Device has sketch_step(round, like) and kHostReads, as in round/ops_impl.h.

namespace secureafl::SECUREAFL_KIND {

using SketchOutcome = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // accepted, factor, reason, weight

// The sketch itself, and the state of the clients in sketches.
struct SketchState {
  const Tensor &models, &places, &update_sketches, &model_sketches, &seen, &means, &squares, &met, &total, &noise,
      &norms, &shift;

  // Whether clients are compared by averages of steps; squares and met are empty then, else total and noise.
  bool steps() const { return total.numel() > 0; }

  // False if averages of steps, which do not compare last updates, get none, (0, k).
  bool keeps_last() const { return !steps() || update_sketches.size(0) > 0; }

  // Number of clients.
  template <typename Device>
  int64_t check(const Check& check, const char* op, int64_t span) const {
    check.shape("models", models, "(rows, d)", {-1, -1});
    check.shape("means", means, "(n, k)", {-1, -1});
    check.shape("update_sketches", update_sketches, "(n, k)", {-1, -1});
    const int64_t d = models.size(1), n = means.size(0), k = means.size(1), kept = keeps_last() ? n : 0;
    if (n < 1 || n > kMaxSketched) refuse(op, "means must hold 1 to ", kMaxSketched, " clients, got ", n);
    if (d < 1 || d > INT32_MAX || k < 1) refuse(op, "d and k must be 1 or more, d below 2^31, got ", d, " and ", k);
    const int64_t count = (d + k - 1) / k * k;
    check.state("models", models, ScalarType::Float, "(rows, d)", {models.size(0), d});
    check.state("places", places, ScalarType::Int, "(ceil(d / k) k,)", {count});
    check.state("update_sketches", update_sketches, ScalarType::Float, "(n, k)", {kept, k});
    check.state("model_sketches", model_sketches, ScalarType::Float, "(n, k)", {kept, k});
    check.state("seen", seen, ScalarType::Bool, "(n,)", {n});
    check.state("means", means, ScalarType::Float, "(n, k)", {n, k});
    const int64_t by_steps = steps() ? n : 0, by_uploads = n - by_steps;
    check.state("squares", squares, ScalarType::Double, "(n,), or (0,) with total", {by_uploads});
    check.state("met", met, ScalarType::Long, "(n,), or (0,) with total", {by_uploads});
    check.state("total", total, ScalarType::Double, "(n,), or (0,)", {by_steps});
    check.state("noise", noise, ScalarType::Double, "(n,), or (0,) without total", {by_steps});
    check.state("norms", norms, ScalarType::Double, "(n,)", {n});
    check.state("shift", shift, ScalarType::Double, "(n,)", {n});
    if constexpr (Device::kHostReads) check_values(check, n, d, static_cast<double>(span));
    return n;
  }

  // Checks values that the host can read. A kernel clamps the places, and takes the others as they are.
  void check_values(const Check& check, int64_t n, int64_t d, double span) const {
    const int32_t* at = data<int32_t>(places);
    for (int64_t place = 0; place < places.size(0); ++place) {
      if (at[place] != kNoCoordinate) check.within("places must lie in", at[place], -d, d - 1);
    }
    for (int64_t k = 0; k < n; ++k) {
      if (steps()) {
        check.between("total must lie in 0 to span", data<double>(total)[k], 0, span);
        check.between("noise must lie in 0 to 1", data<double>(noise)[k], 0, 1);
      } else {
        check.within("met must lie in", data<int64_t>(met)[k], 0, INT64_MAX - 1);
      }
      check.number("norms must be 0 or more", data<double>(norms)[k], data<double>(norms)[k] >= 0);
    }
  }

  std::vector<Span> spans() const {
    return {span_of("places", places, false),
            span_of("update_sketches", update_sketches, true),
            span_of("model_sketches", model_sketches, true),
            span_of("seen", seen, true),
            span_of("means", means, true),
            span_of("squares", squares, true),
            span_of("met", met, true),
            span_of("total", total, true),
            span_of("noise", noise, true),
            span_of("norms", norms, true),
            span_of("shift", shift, false)};
  }

  void fill(SketchRound& r) const {
    r.n = means.size(0);
    r.k = means.size(1);
    r.rows = places.size(0) / r.k;
    r.places = data<int32_t>(places);
    if (keeps_last()) {
      r.update_sketches = mutable_data<float>(update_sketches);
      r.model_sketches = mutable_data<float>(model_sketches);
    }
    r.seen = mutable_data<bool>(seen);
    r.means = mutable_data<float>(means);
    r.steps = steps();
    r.squares = mutable_data<double>(squares);
    r.met = mutable_data<int64_t>(met);
    r.total = mutable_data<double>(total);
    r.noise = mutable_data<double>(noise);
    r.norms = mutable_data<double>(norms);
    r.shift = data<double>(shift);
  }
};

template <typename Device>
SketchOutcome sketch_step(const Tensor& update, const Tensor& client, const Tensor& trained_on, int64_t now_row,
                          int64_t next_row, Tensor models, const Tensor& places, Tensor update_sketches,
                          Tensor model_sketches, Tensor seen, Tensor means, Tensor squares, Tensor met, Tensor total,
                          Tensor noise, Tensor norms, const Tensor& shift, Tensor clock, Tensor last_epoch,
                          Tensor uploads, Tensor seen_factors, Tensor recorded, Tensor factor_counts, Tensor counts,
                          double lr, double quantile, double max_norm, bool filter, bool receive, bool store_all,
                          bool hold, int64_t expiry, int64_t probation, int64_t quorum, int64_t span,
                          double least_share) {
  constexpr const char* op = "sketch_step_";
  const Check check(op, "models", models, /*two_byte_types=*/false);
  const SketchState state{models,  places, update_sketches, model_sketches, seen,  means,
                          squares, met,    total,           noise,          norms, shift};
  check.within("span must lie in", span, 1, INT32_MAX);
  check.least_share(least_share);
  const int64_t n = state.check<Device>(check, op, span);
  if (filter && !state.keeps_last()) refuse(op, "filter must be false without update_sketches, got true");
  const PresenceState presence{clock, last_epoch, uploads, expiry, probation};
  const Arrival arrival{dense(update), client,       dense(trained_on), now_row,       next_row,
                        models,        seen_factors, recorded,          factor_counts, counts};
  const RoundSettings settings{lr, quantile, max_norm, filter, receive, store_all, hold};
  check_row_wise<Device>(check, op, n, presence, arrival, settings, quorum, span, state.spans());

  const Device device(models);
  SketchRound r{};
  const SketchOutcome outcome = std::tuple_cat(arrival.fill(r), std::tuple{allocate(models, ScalarType::Double, {})});
  r.weight = mutable_data<double>(std::get<3>(outcome));
  state.fill(r);
  settings.fill(r);
  r.presence = presence.view(/*alone=*/true);
  r.quorum = quorum;
  r.span = static_cast<double>(span);
  r.least_share = least_share;
  device.sketch_step(r, models);
  return outcome;
}

}  // namespace secureafl::SECUREAFL_KIND

// Used at the end of ops_cpu.cpp and ops_cuda.cu.
#define SECUREAFL_REGISTER_SKETCH(Device, key)                                     \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                                   \
    m.impl("sketch_step_", TORCH_BOX(&secureafl::sketch_step<secureafl::Device>)); \
  }
