#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "common/tensors.h"
#include "lbfgs/aggregate.h"
#include "lbfgs/check.h"

// The ops estimate and aggregate for both devices: check arguments, allocate, pass plain pointers. A Device has
//   solve_all(history, wanted, trust, factors, status, like)   solves for the correction of every wanted client
//   write_estimates(history, corrections, out)                 writes all estimates (n, d)
//   reduce_columns(rows, rule, trim, out)                      applies the rule to each column
//   kHostReads                                                 true if the host can read tensors without waiting
// like: a tensor on the device where scratch memory is allocated.

namespace secureafl::SECUREAFL_KIND {

// The corrections and the tensors that own them.
struct Solved {
  Tensor factors;  // (n, 2m + 1) float64
  Tensor status;   // (n) int32

  Corrections view() const { return {data<double>(factors), data<Status>(status)}; }
};

template <typename Device, typename T>
Solved solve_clients(const Device& device, const History<T>& h, const Wanted& wanted, double trust,
                     const Tensor& like) {
  const Solved solved{allocate(like, ScalarType::Double, {h.n, rows_of(h.m)}), allocate(like, ScalarType::Int, {h.n})};
  device.solve_all(h, wanted, trust, mutable_data<double>(solved.factors), mutable_data<Status>(solved.status), like);
  return solved;
}

template <typename Device>
Tensor estimate(const Tensor& model, const Tensor& last_updates, const Tensor& last_models, const Tensor& dw,
                const Tensor& dg, const Tensor& pairs, double trust) {
  check_history("estimate", model, last_updates, last_models, dw, dg, pairs, trust);
  const Device device(model);
  const DenseHistory tensors(model, last_updates, last_models, dw, dg, pairs);
  const Wanted all{nullptr, -1};
  if constexpr (Device::kHostReads) check_pairs("estimate", tensors, all);
  Tensor out = allocate(model, model.scalar_type(), {last_updates.size(0), model.size(0)});
  dispatch_wide(model.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const History<T> h = tensors.view<T>();
    const Solved solved = solve_clients(device, h, all, trust, tensors.model);
    device.write_estimates(h, solved.view(), mutable_data<T>(out));
  });
  return out;
}

template <typename Device>
std::tuple<Tensor, Tensor> aggregate_status(const Tensor& model, const Tensor& update, int64_t client,
                                            const Tensor& accepted, const Tensor& last_updates,
                                            const Tensor& last_models, const Tensor& dw, const Tensor& dg,
                                            const Tensor& pairs, const Tensor& seen, double trust,
                                            StringHandle rule_name, int64_t trim) {
  const std::string name = take_string(rule_name);
  const Check check = check_history("aggregate", model, last_updates, last_models, dw, dg, pairs, trust);
  const Rule rule = check_round(check, update, client, accepted, seen, last_updates.size(0), model.size(0), name, trim);
  const Device device(model);
  const DenseHistory tensors(model, last_updates, last_models, dw, dg, pairs);
  const Tensor received = dense(update), seen_rows = dense(seen);
  const Wanted wanted{data<bool>(seen_rows), client};
  if constexpr (Device::kHostReads) check_pairs("aggregate", tensors, wanted);
  Tensor out = allocate(model, model.scalar_type(), {model.size(0)});
  Tensor status;
  dispatch_wide(model.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const History<T> h = tensors.view<T>();
    const Solved solved = solve_clients(device, h, wanted, trust, tensors.model);
    const EstimatedRows<T> rows{h, solved.view(), wanted, data<T>(received), data<bool>(accepted), h.n, h.d};
    device.reduce_columns(rows, rule, trim, mutable_data<T>(out));
    status = solved.status;
  });
  return {out, status};
}

template <typename Device>
Tensor aggregate(const Tensor& model, const Tensor& update, int64_t client, const Tensor& accepted,
                 const Tensor& last_updates, const Tensor& last_models, const Tensor& dw, const Tensor& dg,
                 const Tensor& pairs, const Tensor& seen, double trust, StringHandle rule_name, int64_t trim) {
  return std::get<0>(aggregate_status<Device>(model, update, client, accepted, last_updates, last_models, dw, dg, pairs,
                                              seen, trust, rule_name, trim));
}

}  // namespace secureafl::SECUREAFL_KIND

// Used at the end of ops_cpu.cpp and ops_cuda.cu.
#define SECUREAFL_REGISTER_LBFGS(Device, key)                                               \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                                            \
    m.impl("estimate", TORCH_BOX(&secureafl::estimate<secureafl::Device>));                 \
    m.impl("aggregate", TORCH_BOX(&secureafl::aggregate<secureafl::Device>));               \
    m.impl("aggregate_status", TORCH_BOX(&secureafl::aggregate_status<secureafl::Device>)); \
  }
