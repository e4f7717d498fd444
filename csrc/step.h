#pragma once

#include <string>
#include <tuple>

#include "check.h"
#include "math/round.h"
#include "tensors.h"

// The ops on a server's state, `step_` and `refresh_`, from arguments to result, as front.h has the others. A Device
// brings
//   step(round, like)      judge, pass, renew
//   refresh(round)         factors from products alone
//   columns(n, m)          coordinates per tile of its layout; refuses what it cannot hold
//   kHostReads             whether the host may look into tensors without waiting

namespace secureafl::SECUREAFL_KIND {

// What is kept of every client besides its rows.
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

  void put(int64_t n, int64_t m, Round& r) const {
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

template <typename Device>
std::tuple<Tensor, Tensor, Tensor> step(const Tensor& update, const Tensor& client, const Tensor& trained_on,
                                        int64_t now_row, int64_t next_row, Tensor models, Tensor slots, Tensor last,
                                        Tensor scales, Tensor gram, Tensor along, Tensor factors, Tensor status,
                                        Tensor pairs, Tensor oldest, Tensor seen, Tensor seen_factors, Tensor recorded,
                                        Tensor counts, Tensor arrived, double lr, double quantile, double max_norm,
                                        double trust, std::string rule, int64_t trim, bool filter, bool estimate,
                                        bool receive, bool store_all) {
  constexpr const char* op = "step_";
  const Check check(op, "models", models, /*two_byte_types=*/false);
  check.shape("models", models, "(rows, d)", {-1, -1});
  check.shape("slots", slots, "(tiles, 2m, n, columns)", {-1, -1, -1, -1});
  const bool half = slots.scalar_type() == ScalarType::Half;
  const int64_t d = models.size(1), tiles = slots.size(0), planes = slots.size(1), m = planes / 2, n = slots.size(2);
  const int64_t columns = Device::columns(op, n, m);
  check.state("models", models, ScalarType::Float, "(rows, d)", {models.size(0), d});
  check.state("slots", slots, half ? ScalarType::Half : ScalarType::Float, "(ceil(d / columns), 2m, n, columns)",
              {(d + columns - 1) / columns, 2 * m, n, columns});
  check.state("last", last, ScalarType::Float, "(tiles, 2, n, columns)", {tiles, 2, n, columns});
  check.floats("update", update, "(d,)", {d});
  check.floats("trained_on", trained_on, "(d,)", {d});
  check.state("client", client, ScalarType::Long, "(1,)", {1});
  const Clients clients{scales, gram, along, factors, status, pairs, oldest, seen};
  clients.check(check, n, m);
  check.state("seen_factors", seen_factors, ScalarType::Double, "(room,)", {seen_factors.numel()});
  check.state("recorded", recorded, ScalarType::Long, "()", {});
  check.state("counts", counts, ScalarType::Long, "(5,)", {5});
  check.state("arrived", arrived, ScalarType::Int, "()", {});
  check.trust(trust);
  if constexpr (Device::kHostReads) {
    const int64_t given = *data<int64_t>(client);
    if (given < 0 || given >= n) refuse(op, "client must lie in 0..", n - 1, ", got ", given);
  }
  for (const int64_t row : {now_row, next_row}) {
    if (row < 0 || row >= models.size(0)) refuse(op, "rows must lie in 0..", models.size(0) - 1, ", got ", row);
  }
  const Tensor received = dense(update), start = dense(trained_on);
  float* model_rows = mutable_data<float>(models);
  if (next_row == now_row || data<float>(start) == model_rows + next_row * d) {
    refuse(op, "next_row must be a row of its own, got ", next_row);
  }

  const Device device(models);
  const Tensor accepted = allocate(models, ScalarType::Bool, {}), factor = allocate(models, ScalarType::Double, {});
  const Tensor reason = allocate(models, ScalarType::Long, {});
  Round r{};
  r.lr = lr;
  r.quantile = quantile;
  r.max_norm = max_norm;
  r.trust = trust;
  r.rule = rule_named(op, rule);
  r.trim = estimate ? trim : 0;  // an update alone is not trimmed
  r.filter = filter;
  r.estimate = estimate;
  r.receive = receive;
  r.store_all = store_all;
  r.update = data<float>(received);
  r.trained_on = data<float>(start);
  r.model = model_rows + now_row * d;
  r.previous = model_rows + (now_row + models.size(0) - 1) % models.size(0) * d;
  r.next_model = model_rows + next_row * d;
  r.client = data<int64_t>(client);
  r.backwards = now_row % 2 == 1;
  clients.put(n, m, r);
  r.d = d;
  r.tiles = tiles;
  r.columns = columns;
  r.room = seen_factors.numel();
  r.half = half;
  r.slots = slots.mutable_data_ptr();
  r.last = mutable_data<float>(last);
  r.seen_factors = mutable_data<double>(seen_factors);
  r.recorded = mutable_data<int64_t>(recorded);
  r.counts = mutable_data<int64_t>(counts);
  r.arrived = mutable_data<unsigned>(arrived);
  r.accepted = mutable_data<bool>(accepted);
  r.factor = mutable_data<double>(factor);
  r.reason = mutable_data<Reason>(reason);
  device.step(r, models);
  return {accepted, factor, reason};
}

// Factors from products alone, for a state that was put together elsewhere.
template <typename Device>
void refresh(const Tensor& scales, const Tensor& gram, const Tensor& along, Tensor factors, Tensor status,
             const Tensor& pairs, const Tensor& oldest, const Tensor& seen, double trust) {
  const Check check("refresh_", "scales", scales, /*two_byte_types=*/false);
  check.shape("scales", scales, "(n, 2m)", {-1, -1});
  const int64_t n = scales.size(0), m = scales.size(1) / 2;
  const Clients clients{scales, gram, along, factors, status, pairs, oldest, seen};
  clients.check(check, n, m);
  Round r{};
  r.trust = trust;
  clients.put(n, m, r);
  Device(scales).refresh(r);
}

}  // namespace secureafl::SECUREAFL_KIND

// At the foot of each device's file.
#define SECUREAFL_REGISTER_STEP(Device, key)                               \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                           \
    m.impl("step_", TORCH_BOX(&secureafl::step<secureafl::Device>));       \
    m.impl("refresh_", TORCH_BOX(&secureafl::refresh<secureafl::Device>)); \
  }
