#pragma once

#include <string>

#include "common/check.h"
#include "coordinate_wise/check.h"
#include "lbfgs/history.h"

namespace secureafl::SECUREAFL_KIND {

// Owns the contiguous tensors that a History points to.
struct DenseHistory {
  Tensor model, last_updates, last_models, dw, dg, pairs;

  DenseHistory(const Tensor& model, const Tensor& last_updates, const Tensor& last_models, const Tensor& dw,
               const Tensor& dg, const Tensor& pairs)
      : model(dense(model)),
        last_updates(dense(last_updates)),
        last_models(dense(last_models)),
        dw(dense(dw)),
        dg(dense(dg)),
        pairs(dense(pairs)) {}

  template <typename T>
  History<T> view() const {
    return {data<T>(model), data<T>(last_updates), data<T>(last_models), data<T>(dw),
            data<T>(dg),    data<int64_t>(pairs),  dw.size(0),           dw.size(1),
            model.size(0)};
  }
};

// model (d), last_updates and last_models (n, d), dw and dg (n, m, d), pairs (n)
inline Check check_history(const char* op, const Tensor& model, const Tensor& last_updates, const Tensor& last_models,
                           const Tensor& dw, const Tensor& dg, const Tensor& pairs, double trust) {
  const Check check(op, "model", model, /*two_byte_types=*/false);
  check.shape("model", model, "(d,)", {-1});
  check.floats("last_updates", last_updates, "(n, d)", {-1, model.size(0)});
  const int64_t n = last_updates.size(0), d = model.size(0);
  check.floats("last_models", last_models, "(n, d)", {n, d});
  check.floats("dw", dw, "(n, m, d)", {n, -1, d});
  const int64_t m = dw.size(1);
  if (m > kMaxPairs) refuse(op, "dw must hold at most ", kMaxPairs, " pairs per client, got ", m);
  check.floats("dg", dg, "(n, m, d)", {n, m, d});
  check.typed("pairs", pairs, ScalarType::Long, "(n,)", {n});
  check.trust(trust);
  return check;
}

// Checks pairs[k] of every wanted client, if the host can read it.
inline void check_pairs(const char* op, const DenseHistory& tensors, const Wanted& wanted) {
  const int64_t* pairs = data<int64_t>(tensors.pairs);
  const int64_t n = tensors.dw.size(0), m = tensors.dw.size(1);
  for (int64_t k = 0; k < n; ++k) {
    if (wanted(k) && (pairs[k] < 0 || pairs[k] > m)) {
      refuse(op, "pairs must lie in 0..", m, ", got ", pairs[k], " for client ", k);
    }
  }
}

// Checks the arguments of `aggregate` other than the history.
inline Rule check_round(const Check& check, const Tensor& update, int64_t client, const Tensor& accepted,
                        const Tensor& seen, int64_t n, int64_t d, const std::string& rule, int64_t trim) {
  constexpr const char* op = "aggregate";
  check.floats("update", update, "(d,)", {d});
  if (client < 0 || client >= n) refuse(op, "client must lie in 0..", n - 1, ", got ", client);
  check.typed("accepted", accepted, ScalarType::Bool, "()", {});
  check.typed("seen", seen, ScalarType::Bool, "(n,)", {n});
  const Rule named = rule_named(op, rule);
  // Fewer rows than n may take part. Only the device knows their number; it returns zeros if trim removes all.
  if (named == Rule::kTrimmedMean) check.trim(trim, n);
  return named;
}

}  // namespace secureafl::SECUREAFL_KIND
