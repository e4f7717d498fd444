#pragma once

#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/tensors.h"
#include "round/factor_counts.h"
#include "round/round.h"

namespace secureafl::SECUREAFL_KIND {

// State tensors per client, other than slots and last.
struct Clients {
  const Tensor &scales, &gram, &along, &factors, &status, &pairs, &oldest, &seen;

  void check(const Check& check, int64_t n, int64_t m) const {
    const int64_t planes = 2 * m;
    check.state("scales", scales, ScalarType::Float, "(n, 2m)", {n, planes});
    check.state("gram", gram, ScalarType::Double, "(n, m (2m + 1))", {n, m * (planes + 1)});
    check.state("along", along, ScalarType::Double, "(n, 2m + 2)", {n, planes + 2});
    check.state("factors", factors, ScalarType::Float, "(n, 2m + 2)", {n, planes + 2});
    check.state("status", status, ScalarType::Int, "(n,)", {n});
    check.state("pairs", pairs, ScalarType::Long, "(n,)", {n});
    check.state("oldest", oldest, ScalarType::Long, "(n,)", {n});
    check.state("seen", seen, ScalarType::Bool, "(n,)", {n});
  }

  // Checks values that the host can read. A kernel clamps them instead.
  void check_values(const Check& check, int64_t n, int64_t m) const {
    for (int64_t k = 0; k < n; ++k) {
      check.within("pairs must lie in", data<int64_t>(pairs)[k], 0, m);
      check.within("oldest must lie in", data<int64_t>(oldest)[k], 0, m > 0 ? m - 1 : 0);
    }
  }

  // Memory that a round writes. `renew_` and `refresh_` only read some of it.
  std::vector<Span> spans() const {
    return {span_of("scales", scales, true),   span_of("gram", gram, true),     span_of("along", along, true),
            span_of("factors", factors, true), span_of("status", status, true), span_of("pairs", pairs, true),
            span_of("oldest", oldest, true),   span_of("seen", seen, true)};
  }

  void fill(int64_t n, int64_t m, Round& r) const {
    r.n = n;
    r.m = m;
    r.scales = mutable_data<float>(scales);
    r.gram = mutable_data<double>(gram);
    r.along = mutable_data<double>(along);
    r.factors = mutable_data<float>(factors);
    r.status = mutable_data<Status>(status);
    r.pairs = mutable_data<int64_t>(pairs);
    r.oldest = mutable_data<int64_t>(oldest);
    r.seen = mutable_data<bool>(seen);
  }
};

// Tensors and settings that decide which clients count.
struct PresenceState {
  const Tensor &clock, &last_epoch, &uploads;
  int64_t expiry, probation;

  template <typename Device>
  void check(const Check& check, int64_t n) const {
    check.state("clock", clock, ScalarType::Long, "(3,)", {3});
    check.state("last_epoch", last_epoch, ScalarType::Long, "(n,)", {n});
    check.state("uploads", uploads, ScalarType::Long, "(n, 3)", {n, 3});
    check.within("expiry must lie in", expiry, 1, INT64_MAX);
    check.within("probation must lie in", probation, 0, INT64_MAX);
    if constexpr (Device::kHostReads) {
      const int64_t* now = data<int64_t>(clock);
      for (int i = 0; i < 2; ++i) check.within("clock must lie in", now[i], 0, INT64_MAX - 1);
      check.within("the last value of clock must lie in", now[2], 0, 1);
      for (int64_t k = 0; k < n; ++k) {
        check.within("last_epoch must lie in", data<int64_t>(last_epoch)[k], kGone, now[0]);
        for (int i = 0; i < 3; ++i) {
          check.within("uploads must lie in", data<int64_t>(uploads)[3 * k + i], 0, INT64_MAX - 1);
        }
      }
    }
  }

  void add_spans(std::vector<Span>& spans) const {
    spans.insert(spans.end(), {span_of("clock", clock, true), span_of("last_epoch", last_epoch, true),
                               span_of("uploads", uploads, true)});
  }

  // alone: steps are along the received update alone
  Presence view(bool alone) const {
    return {expiry,
            probation,
            mutable_data<int64_t>(clock),
            mutable_data<int64_t>(last_epoch),
            mutable_data<int64_t>(uploads),
            alone ? kFreeAlone : kFree};
  }
};

inline void check_client(const char* op, const Tensor& client, int64_t n) {
  const int64_t given = *data<int64_t>(client);
  if (given < 0 || given >= n) refuse(op, "client must lie in 0..", n - 1, ", got ", given);
}

// Number of pairs m in 2m planes. The number of planes must be even, and m at most what the solver supports.
inline int64_t pairs_in(const char* op, const char* name, int64_t planes, int64_t n) {
  const int64_t m = planes / 2;
  if (planes != 2 * m || m > kMaxPairs || n < 1) {
    refuse(op, name, " must hold 0 to ", kMaxPairs, " pairs (twice as many planes) of at least 1 client, got ", planes,
           " planes of ", n, " clients");
  }
  return m;
}

inline void check_verdict(const Check& check, const Tensor& verdict) {
  check.state("verdict", verdict, ScalarType::Byte, "(bytes,)", {sizeof(Verdict)});
  check.aligned("verdict", verdict, alignof(Verdict));
}

// Checks values that the host can read. A kernel clamps them instead.
inline void check_verdict_values(const Check& check, const Verdict& verdict, int64_t n, int64_t m) {
  check.within("the client of verdict must lie in", verdict.client, 0, n - 1);
  check.within("the slot of verdict must lie in", verdict.slot, 0, m > 0 ? m - 1 : 0);
}

// The sums of a pass.
inline void check_changes(const Check& check, const Tensor& changes, int64_t n, int64_t m) {
  const char* meaning = m == 0 ? "(0,)" : "((2m + 1) (n + 1) + 4m + 1,)";
  check.state("changes", changes, ScalarType::Double, meaning, {pass_sums(n, m)});
}

// The same in parts that are not yet added up. blocks: parts of each sum, or -1 if any number will do
inline void check_parts(const Check& check, const Tensor& changes, int64_t n, int64_t m, int64_t blocks) {
  const char* meaning = m == 0 ? "(0, 0)" : "((2m + 1) (n + 1) + 4m + 1, blocks)";
  check.state("changes", changes, ScalarType::Double, meaning, {pass_sums(n, m), m == 0 ? 0 : blocks});
}

using Outcome = std::tuple<Tensor, Tensor, Tensor>;  // accepted, factor, reason

// Arguments that all rounds share: the update (d), the model (d) it was computed on, both contiguous, the rows of
// models (rows, d) to read and to write, and Q.
struct Arrival {
  Tensor update;
  const Tensor& client;
  Tensor trained_on;
  int64_t now_row, next_row;
  const Tensor &models, &seen_factors, &recorded, &factor_counts, &counts;

  template <typename Device>
  void check(const Check& check, const char* op, int64_t n) const {
    const int64_t d = models.size(1);
    check.floats("update", update, "(d,)", {d});
    check.floats("trained_on", trained_on, "(d,)", {d});
    check.state("client", client, ScalarType::Long, "(1,)", {1});
    check.shape("seen_factors", seen_factors, "(lists, room)", {-1, -1});
    const int64_t lists = seen_factors.size(0), room = seen_factors.size(1);
    if ((lists != 1 && lists != n) || room < 1 || lists * room > INT32_MAX) {
      refuse(op, "seen_factors must have shape (1, room) or (n, room) = (", n, ", room), room 1 or more and less than ",
             "2^31 places in all, got (", lists, ", ", room, ")");
    }
    check.state("seen_factors", seen_factors, ScalarType::Double, "(lists, room)", {lists, room});
    check.state("recorded", recorded, ScalarType::Long, "(lists,)", {lists});
    // The host does not read its values: they are added up, never used as an index.
    check.shape("factor_counts", factor_counts, "(rows, 1024)", {-1, kKeysPerRow});
    const int64_t rows_of_counts = factor_counts.size(0);
    if (rows_of_counts != 0 && (rows_of_counts != 1 + kKeyRows || lists != 1)) {
      refuse(op, "factor_counts must have no rows, or ", 1 + kKeyRows, " with a single list of seen_factors, got ",
             rows_of_counts, " with ", lists, " lists");
    }
    check.state("factor_counts", factor_counts, ScalarType::Long, "(rows, 1024)", {rows_of_counts, kKeysPerRow});
    check.state("counts", counts, ScalarType::Long, "(5,)", {5});
    if constexpr (Device::kHostReads) {
      check_client(op, client, n);
      for (int64_t list = 0; list < lists; ++list) {
        check.within("recorded must lie in", data<int64_t>(recorded)[list], 0, INT64_MAX - 1);
      }
    }
    const int64_t rows = models.size(0);
    if (now_row < 0 || now_row >= rows) refuse(op, "now_row must lie in 0..", rows - 1, ", got ", now_row);
    if (next_row < 0 || next_row >= rows) refuse(op, "next_row must lie in 0..", rows - 1, ", got ", next_row);
    if (next_row == now_row) refuse(op, "next_row must differ from now_row, got ", next_row);
  }

  // Only the next row of models is written. trained_on, or even update, may be one of the other rows.
  void add_spans(std::vector<Span>& spans) const {
    const int64_t d = models.size(1);
    const auto row = [&](int64_t i) { return reinterpret_cast<uintptr_t>(data<float>(models) + i * d); };
    spans.insert(spans.end(), {{"the next row of models", row(next_row), row(next_row + 1), true},
                               {"models", row(0), row(next_row), false},
                               {"models", row(next_row + 1), row(models.size(0)), false},
                               span_of("update", update, false),
                               span_of("trained_on", trained_on, false),
                               span_of("client", client, false),
                               span_of("seen_factors", seen_factors, true),
                               span_of("recorded", recorded, true),
                               span_of("factor_counts", factor_counts, true),
                               span_of("counts", counts, true)});
  }

  // Sets the pointers of r and allocates the results.
  Outcome fill(Round& r) const {
    const Outcome outcome{allocate(models, ScalarType::Bool, {}), allocate(models, ScalarType::Double, {}),
                          allocate(models, ScalarType::Long, {})};
    float* rows = mutable_data<float>(models);
    r.d = models.size(1);
    r.lists = seen_factors.size(0);
    r.room = seen_factors.size(1);
    r.update = data<float>(update);
    r.trained_on = data<float>(trained_on);
    r.model = rows + now_row * r.d;
    r.next_model = rows + next_row * r.d;
    r.client = data<int64_t>(client);
    r.seen_factors = mutable_data<double>(seen_factors);
    r.recorded = mutable_data<int64_t>(recorded);
    r.factor_counts = factor_counts.size(0) > 0 ? mutable_data<int64_t>(factor_counts) : nullptr;
    r.counts = mutable_data<int64_t>(counts);
    r.accepted = mutable_data<bool>(std::get<0>(outcome));
    r.factor = mutable_data<double>(std::get<1>(outcome));
    r.reason = mutable_data<Reason>(std::get<2>(outcome));
    return outcome;
  }
};

// Settings that all rounds share.
struct RoundSettings {
  double lr, quantile, max_norm;
  bool filter, receive, store_all, hold;

  void check(const Check& check) const {
    check.number("lr must be finite", lr, std::isfinite(lr));
    check.number("quantile must lie in 0 to 1", quantile, quantile >= 0 && quantile <= 1);
    check.number("max_norm must be positive", max_norm, max_norm > 0);
  }

  void fill(Round& r) const {
    r.lr = lr;
    r.quantile = quantile;
    r.max_norm = max_norm;
    r.filter = filter;
    r.receive = receive;
    r.store_all = store_all;
    r.hold = hold;
  }
};

// Checks the common arguments of the rounds of row-wise rules. spans: memory of the other arguments
template <typename Device>
void check_row_wise(const Check& check, const char* op, int64_t n, const PresenceState& presence,
                    const Arrival& arrival, const RoundSettings& settings, int64_t quorum, int64_t span,
                    std::vector<Span> spans) {
  presence.check<Device>(check, n);
  arrival.check<Device>(check, op, n);
  arrival.add_spans(spans);
  presence.add_spans(spans);
  check.no_overlap(spans);
  settings.check(check);
  check.within("quorum must lie in", quorum, 0, n);
  check.within("span must lie in", span, 1, INT32_MAX);
}

}  // namespace secureafl::SECUREAFL_KIND
