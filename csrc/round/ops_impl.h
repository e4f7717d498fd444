#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinate_wise/check.h"
#include "round/check.h"

// The ops of a round for both devices: check arguments, allocate, pass plain pointers. A Device has
//   step(round, verdict, changes, like)   a whole round: judge, pass, renew. It may leave the renewal to the next call:
//                                         then the verdict is pending, and changes has the sums of PassSums
//   settle(round, verdict, changes, blocks)    renews, if the verdict is pending
//   pass_blocks(n, m, half, tiles)        parts of each sum in changes
//   fits(n, m, half, shared_bytes)        true if the shared memory is large enough for a round
//   refresh(round)                        computes factors from products
//   columns(op, n, m)                     coordinates per tile; throws if n or m is not supported
//   kHostReads                            true if the host can read tensors without waiting
// The same round in phases, for ranks that hold a slice of the coordinates each. The caller adds up the sums of all
// ranks between the phases:
//   update_sums(round, sums, like)                sums over the update
//   apply(round, sums, verdict, changes, like)    judge and pass; changes: the sums of PassSums
//   renew(round, verdict, changes)                updates products and factors

namespace secureafl::SECUREAFL_KIND {

// Where `step_` and `apply_` differ: the tensors that link their calls.
struct Carried {
  const Tensor* sums;     // apply_: (kSums), the sums over the update, of all ranks. step_: null, it makes them itself
  const Tensor& verdict;  // (sizeof(Verdict)): written, for the call that renews
  // The sums of the pass, for the call that renews. step_: in parts, one per block, for the next step_ or settle_.
  // apply_: the sums of this rank, for renew_.
  const Tensor& changes;
};

// A whole round (`step_`), or only judge and pass (`apply_`).
template <typename Device>
Outcome round(const char* op, const Carried& carried, const Tensor& update, const Tensor& client,
              const Tensor& trained_on, int64_t now_row, int64_t next_row, Tensor models, Tensor slots, Tensor last,
              Tensor scales, Tensor gram, Tensor along, Tensor factors, Tensor status, Tensor pairs, Tensor oldest,
              Tensor seen, Tensor clock, Tensor last_epoch, Tensor uploads, Tensor seen_factors, Tensor recorded,
              Tensor factor_counts, Tensor counts, Tensor arrived, double lr, double quantile, double max_norm,
              double trust, StringHandle rule_name, int64_t trim, bool filter, bool estimate, bool receive,
              bool store_all, bool hold, int64_t expiry, int64_t probation) {
  const std::string rule = take_string(rule_name);
  const Check check(op, "models", models, /*two_byte_types=*/false);
  check.shape("models", models, "(rows, d)", {-1, -1});
  check.shape("slots", slots, "(tiles, 2m, n, columns)", {-1, -1, -1, -1});
  const bool half = slots.scalar_type() == ScalarType::Half;
  const int64_t d = models.size(1), tiles = slots.size(0), n = slots.size(2),
                m = pairs_in(op, "slots", slots.size(1), n);
  const int64_t columns = Device::columns(op, n, m);
  check.state("models", models, ScalarType::Float, "(rows, d)", {models.size(0), d});
  check.state("slots", slots, half ? ScalarType::Half : ScalarType::Float, "(ceil(d / columns), 2m, n, columns)",
              {(d + columns - 1) / columns, 2 * m, n, columns});
  check.state("last", last, ScalarType::Float, "(tiles, 2, n, columns)", {tiles, 2, n, columns});
  check.aligned("slots", slots, 16);
  check.aligned("last", last, 16);
  const Clients clients{scales, gram, along, factors, status, pairs, oldest, seen};
  clients.check(check, n, m);
  if constexpr (Device::kHostReads) clients.check_values(check, n, m);
  const PresenceState presence{clock, last_epoch, uploads, expiry, probation};
  presence.check<Device>(check, n);
  check.state("arrived", arrived, ScalarType::Int, "(4,)", {4});
  check.trust(trust);
  if (trim < 0) refuse(op, "trim must be 0 or more, got ", trim);
  const RoundSettings settings{lr, quantile, max_norm, filter, receive, store_all, hold};
  settings.check(check);
  const Device device(models);
  const bool is_apply = carried.sums != nullptr;
  if (is_apply) check.state("sums", *carried.sums, ScalarType::Double, "(5,)", {kSums});
  check_verdict(check, carried.verdict);
  if (is_apply) {
    check_changes(check, carried.changes, n, m);
  } else {
    check_parts(check, carried.changes, n, m, device.pass_blocks(n, m, half, tiles));
    if constexpr (Device::kHostReads) {
      const auto* last = data<Verdict>(carried.verdict);
      if (last->pending != 0) check_verdict_values(check, *last, n, m);
    }
  }
  const Arrival arrival{dense(update), client,       dense(trained_on), now_row,       next_row,
                        models,        seen_factors, recorded,          factor_counts, counts};
  arrival.check<Device>(check, op, n);
  std::vector<Span> spans = clients.spans();
  spans.insert(spans.end(),
               {span_of("slots", slots, true), span_of("last", last, true), span_of("arrived", arrived, true)});
  spans.insert(spans.end(), {span_of("verdict", carried.verdict, true), span_of("changes", carried.changes, true)});
  if (is_apply) spans.push_back(span_of("sums", *carried.sums, false));
  arrival.add_spans(spans);
  presence.add_spans(spans);
  check.no_overlap(spans);

  Round r{};
  const Outcome outcome = arrival.fill(r);
  settings.fill(r);
  r.trust = trust;
  r.rule = rule_named(op, rule);
  r.trim = estimate ? trim : 0;  // a single update is not trimmed
  r.estimate = estimate;
  r.previous = data<float>(models) + (now_row + models.size(0) - 1) % models.size(0) * d;
  r.backwards = now_row % 2 == 1;
  clients.fill(n, m, r);
  r.presence = presence.view(/*alone=*/false);
  r.tiles = tiles;
  r.columns = columns;
  r.half = half;
  r.slots = slots.mutable_data_ptr();
  r.last = mutable_data<float>(last);
  r.arrived = mutable_data<unsigned>(arrived);
  auto* verdict = mutable_data<Verdict>(carried.verdict);
  auto* changes = mutable_data<double>(carried.changes);
  if (is_apply) {
    device.apply(r, data<double>(*carried.sums), verdict, changes, models);
  } else {
    device.step(r, verdict, changes, models);
  }
  return outcome;
}

// Makes the ops `step_` and `apply_` from round(), with the same arguments.
template <auto kRound>
struct RoundOps;
template <typename... Args, Outcome (*kRound)(const char*, const Carried&, Args...)>
struct RoundOps<kRound> {
  static Outcome step(Tensor verdict, Tensor changes, Args... args) {
    return kRound("step_", {nullptr, verdict, changes}, std::forward<Args>(args)...);
  }
  static Outcome apply(const Tensor& sums, Tensor verdict, Tensor changes, Args... args) {
    return kRound("apply_", {&sums, verdict, changes}, std::forward<Args>(args)...);
  }
};

// Sums over the update that the verdict depends on.      returns (5)
template <typename Device>
Tensor update_sums(const Tensor& update, const Tensor& client, const Tensor& trained_on, const Tensor& last) {
  constexpr const char* op = "update_sums";
  const Check check(op, "update", update, /*two_byte_types=*/false);
  check.shape("update", update, "(d,)", {-1});
  check.shape("last", last, "(tiles, 2, n, columns)", {-1, 2, -1, -1});
  const int64_t d = update.size(0), n = last.size(2), columns = last.size(3);
  // Powers of two: kernels find the tile of a coordinate by shifts.
  if (n < 1 || columns < 1 || columns > INT32_MAX || (columns & (columns - 1)) != 0) {
    refuse(op, "last must hold at least 1 client, and a power of two of columns, got ", n, " and ", columns);
  }
  const int64_t tiles = (d + columns - 1) / columns;
  check.state("last", last, ScalarType::Float, "(ceil(d / columns), 2, n, columns)", {tiles, 2, n, columns});
  check.typed("update", update, ScalarType::Float, "(d,)", {d});
  check.floats("trained_on", trained_on, "(d,)", {d});
  check.state("client", client, ScalarType::Long, "(1,)", {1});
  if constexpr (Device::kHostReads) check_client(op, client, n);
  const Tensor received = dense(update), start = dense(trained_on);
  const Device device(update);
  const Tensor sums = allocate(update, ScalarType::Double, {kSums});
  Round r{};
  r.update = data<float>(received);
  r.trained_on = data<float>(start);
  r.client = data<int64_t>(client);
  r.n = n;
  r.d = d;
  r.tiles = tiles;
  r.columns = columns;
  r.last = const_cast<float*>(data<float>(last));
  device.update_sums(r, mutable_data<double>(sums), update);
  return sums;
}

// The common part of `renew_` and `settle_`. settle: the verdict is used only if it is pending, and changes has parts.
template <typename Device>
void finish(const char* op, bool settle, const Tensor& verdict, const Tensor& changes, const Tensor& scales,
            const Tensor& gram, const Tensor& along, const Tensor& factors, const Tensor& status, const Tensor& pairs,
            const Tensor& oldest, const Tensor& seen, double trust) {
  const Check check(op, "scales", scales, /*two_byte_types=*/false);
  check.shape("scales", scales, "(n, 2m)", {-1, -1});
  const int64_t n = scales.size(0), m = pairs_in(op, "scales", scales.size(1), n);
  const Clients clients{scales, gram, along, factors, status, pairs, oldest, seen};
  clients.check(check, n, m);
  if (settle) {
    check_parts(check, changes, n, m, -1);
  } else {
    check_changes(check, changes, n, m);
  }
  check_verdict(check, verdict);
  std::vector<Span> spans = clients.spans();
  spans.insert(spans.end(), {span_of("verdict", verdict, settle), span_of("changes", changes, false)});
  check.no_overlap(spans);
  if constexpr (Device::kHostReads) {
    clients.check_values(check, n, m);
    const auto* given = data<Verdict>(verdict);
    if (!settle || given->pending != 0) check_verdict_values(check, *given, n, m);
  }
  check.trust(trust);
  Round r{};
  r.trust = trust;
  clients.fill(n, m, r);
  if (m == 0) return;  // nothing is carried
  const Device device(scales);
  if (settle) {
    device.settle(r, mutable_data<Verdict>(verdict), data<double>(changes), changes.size(1));
  } else {
    device.renew(r, data<Verdict>(verdict), data<double>(changes));
  }
}

// Last phase of a round that `apply_` began.
template <typename Device>
void renew(const Tensor& verdict, const Tensor& changes, const Tensor& scales, Tensor gram, Tensor along,
           Tensor factors, Tensor status, const Tensor& pairs, const Tensor& oldest, Tensor seen, double trust) {
  finish<Device>("renew_", /*settle=*/false, verdict, changes, scales, gram, along, factors, status, pairs, oldest,
                 seen, trust);
}

// The end of a round of `step_` that was left to the next one, if any. Call it before the state is read or changed.
template <typename Device>
void settle(Tensor verdict, const Tensor& changes, const Tensor& scales, Tensor gram, Tensor along, Tensor factors,
            Tensor status, const Tensor& pairs, const Tensor& oldest, Tensor seen, double trust) {
  finish<Device>("settle_", /*settle=*/true, verdict, changes, scales, gram, along, factors, status, pairs, oldest,
                 seen, trust);
}

// Number of parts of each sum in the `changes` of `step_`.
template <typename Device>
int64_t pass_blocks(const Tensor& like, int64_t clients, int64_t pairs, bool half, int64_t tiles) {
  constexpr const char* op = "pass_blocks";
  Device::columns(op, clients, pairs);
  if (tiles < 0 || tiles > INT32_MAX) refuse(op, "tiles must lie in 0 to ", int64_t{INT32_MAX}, ", got ", tiles);
  return Device(like).pass_blocks(clients, pairs, half, tiles);
}

// True if the device supports a round with this many clients and pairs. shared_bytes: shared memory of a block, instead
// of the limit of the device.
template <typename Device>
bool round_fits(const Tensor& like, int64_t clients, int64_t pairs, bool half, std::optional<int64_t> shared_bytes) {
  constexpr const char* op = "round_fits";
  Device::columns(op, clients, pairs);
  return Device(like).fits(clients, pairs, half, shared_bytes);
}

// Computes factors from products, for a state that was loaded or built elsewhere.
template <typename Device>
void refresh(const Tensor& scales, const Tensor& gram, const Tensor& along, Tensor factors, Tensor status,
             const Tensor& pairs, const Tensor& oldest, const Tensor& seen, double trust) {
  constexpr const char* op = "refresh_";
  const Check check(op, "scales", scales, /*two_byte_types=*/false);
  check.shape("scales", scales, "(n, 2m)", {-1, -1});
  const int64_t n = scales.size(0), m = pairs_in(op, "scales", scales.size(1), n);
  const Clients clients{scales, gram, along, factors, status, pairs, oldest, seen};
  clients.check(check, n, m);
  check.no_overlap(clients.spans());
  if constexpr (Device::kHostReads) clients.check_values(check, n, m);
  check.trust(trust);
  Round r{};
  r.trust = trust;
  clients.fill(n, m, r);
  if (m == 0) return;  // nothing is carried
  Device(scales).refresh(r);
}

}  // namespace secureafl::SECUREAFL_KIND

// Used at the end of ops_cpu.cpp and ops_cuda.cu.
#define SECUREAFL_REGISTER_STEP(Device, key)                                      \
  STABLE_TORCH_LIBRARY_IMPL(secureafl, key, m) {                                  \
    using RoundOps = secureafl::RoundOps<&secureafl::round<secureafl::Device>>;   \
    m.impl("step_", TORCH_BOX(&RoundOps::step));                                  \
    m.impl("update_sums", TORCH_BOX(&secureafl::update_sums<secureafl::Device>)); \
    m.impl("apply_", TORCH_BOX(&RoundOps::apply));                                \
    m.impl("renew_", TORCH_BOX(&secureafl::renew<secureafl::Device>));            \
    m.impl("refresh_", TORCH_BOX(&secureafl::refresh<secureafl::Device>));        \
    m.impl("round_fits", TORCH_BOX(&secureafl::round_fits<secureafl::Device>));   \
    m.impl("settle_", TORCH_BOX(&secureafl::settle<secureafl::Device>));          \
    m.impl("pass_blocks", TORCH_BOX(&secureafl::pass_blocks<secureafl::Device>)); \
  }
