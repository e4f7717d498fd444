#pragma once

#include "common/check.h"
#include "common/tensors.h"
#include "round/check.h"
#include "row_wise/kinship/kinship.h"

// The op kin_step_ for both devices, and the part of it that support_step_, mean_step_ and row_step_ share. A Device
// has kin_step(round, like) and kHostReads, as in round/ops_impl.h.

namespace secureafl::SECUREAFL_KIND {

using RowsOutcome = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // accepted, factor, reason, weight

// The state of a rule on the last updates of the clients, perhaps with the averages of their inner products (n, n).
struct RowsState {
  const Tensor &models, &last_updates, &last_models, &seen, &rounds;
  const Tensor *products = nullptr, *means = nullptr, *met = nullptr;
  const char* means_name = nullptr;  // of `means` in the op

  // False if a rule that does not compare last updates gets none, (0, d).
  bool keeps_last() const { return products || last_updates.size(0) > 0; }

  template <typename Device>
  int64_t check(const Check& check, const char* op) const {
    check.shape("models", models, "(rows, d)", {-1, -1});
    check.shape("last_updates", last_updates, "(n, d)", {-1, models.size(1)});
    check.shape("seen", seen, "(n,)", {-1});
    const int64_t d = models.size(1), kept = last_updates.size(0), n = keeps_last() ? kept : seen.size(0);
    const char* first = keeps_last() ? "last_updates" : "seen";
    if (n < 1 || n > kMaxRowClients) refuse(op, first, " must hold 1 to ", kMaxRowClients, " clients, got ", n);
    check.state("models", models, ScalarType::Float, "(rows, d)", {models.size(0), d});
    check.state("last_updates", last_updates, ScalarType::Float, "(n, d)", {kept, d});
    check.state("last_models", last_models, ScalarType::Float, "(n, d)", {kept, d});
    check.state("seen", seen, ScalarType::Bool, "(n,)", {n});
    if (products) check.state("products", *products, ScalarType::Double, "(n, n)", {n, n});
    if (means) check.state(means_name, *means, ScalarType::Double, "(n, n)", {n, n});
    if (met) check.state("met", *met, ScalarType::Long, "(n,)", {n});
    check.state("rounds", rounds, ScalarType::Long, "()", {});
    if constexpr (Device::kHostReads) {
      check.within("rounds must lie in", *data<int64_t>(rounds), 0, INT64_MAX - 1);
      for (int64_t k = 0; k < n && met; ++k) {
        check.within("met must lie in", data<int64_t>(*met)[k], 0, INT64_MAX - 1);
      }
    }
    return n;
  }

  std::vector<Span> spans() const {
    std::vector<Span> spans{span_of("last_updates", last_updates, true), span_of("last_models", last_models, true),
                            span_of("seen", seen, true), span_of("rounds", rounds, true)};
    if (products) spans.push_back(span_of("products", *products, true));
    if (means) spans.push_back(span_of(means_name, *means, true));
    if (met) spans.push_back(span_of("met", *met, true));
    return spans;
  }

  // Sets the pointers of r and allocates the results.
  RowsOutcome fill(KinRound& r, const Arrival& arrival, bool alone, int64_t quorum) const {
    const RowsOutcome outcome = std::tuple_cat(arrival.fill(r), std::tuple{allocate(models, ScalarType::Double, {})});
    r.weight = mutable_data<double>(std::get<3>(outcome));
    r.alone = alone;
    r.quorum = quorum;
    r.n = seen.size(0);
    r.compared = products ? r.n : 0;
    r.seen = mutable_data<bool>(seen);
    if (keeps_last()) {
      r.last_updates = mutable_data<float>(last_updates);
      r.last_models = mutable_data<float>(last_models);
    }
    if (products) r.products = mutable_data<double>(*products);
    if (means) r.means = mutable_data<double>(*means);
    if (met) r.met = mutable_data<int64_t>(*met);
    r.rounds = mutable_data<int64_t>(rounds);
    return outcome;
  }
};

template <typename Device>
RowsOutcome kin_step(const Tensor& update, const Tensor& client, const Tensor& trained_on, int64_t now_row,
                     int64_t next_row, Tensor models, Tensor last_updates, Tensor last_models, Tensor seen,
                     Tensor products, Tensor kinship, Tensor met, Tensor centre, Tensor rounds, Tensor clock,
                     Tensor last_epoch, Tensor uploads, Tensor seen_factors, Tensor recorded, Tensor factor_counts,
                     Tensor counts, double lr, double quantile, double max_norm, bool filter, bool receive,
                     bool store_all, bool hold, int64_t expiry, int64_t probation, bool alone, int64_t quorum,
                     int64_t span, int64_t known, double kin, double crowd, double turned, double least,
                     double least_sum, double least_apart, double near) {
  constexpr const char* op = "kin_step_";
  const Check check(op, "models", models, /*two_byte_types=*/false);
  const RowsState state{models, last_updates, last_models, seen, rounds, &products, &kinship, &met, "kinship"};
  const int64_t n = state.check<Device>(check, op);
  check.state("centre", centre, ScalarType::Double, "(n,)", {n});
  const PresenceState presence{clock, last_epoch, uploads, expiry, probation};
  const Arrival arrival{dense(update), client,       dense(trained_on), now_row,       next_row,
                        models,        seen_factors, recorded,          factor_counts, counts};
  std::vector<Span> spans = state.spans();
  spans.push_back(span_of("centre", centre, true));
  const RoundSettings settings{lr, quantile, max_norm, filter, receive, store_all, hold};
  check_row_wise<Device>(check, op, n, presence, arrival, settings, quorum, span, std::move(spans));

  const Device device(models);
  KinRound r{};
  const RowsOutcome outcome = state.fill(r, arrival, alone, quorum);
  settings.fill(r);
  r.bounds = {
      static_cast<double>(span), static_cast<double>(known), kin, crowd, turned, least, least_sum, least_apart, near};
  r.presence = presence.view(alone);
  r.mean_center = mutable_data<double>(centre);
  device.kin_step(r, models);
  return outcome;
}

}  // namespace secureafl::SECUREAFL_KIND

// Used at the end of ops_cpu.cpp and ops_cuda.cu.
#define SECUREAFL_REGISTER_KIN(Device, key)                                  \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                             \
    m.impl("kin_step_", TORCH_BOX(&secureafl::kin_step<secureafl::Device>)); \
  }
