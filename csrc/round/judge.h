#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "lipschitz/lipschitz.h"
#include "round/client.h"
#include "round/quantile.h"
#include "round/verdict.h"

namespace secureafl::SECUREAFL_KIND {

// Power of two that scales a row with this squared norm into the range of float16. No value exceeds the norm, nor the
// largest float. The smallest normal float16 is far below the mean magnitude of d values with that norm.
SECUREAFL_FN float half_scale(double square) {
  const int exponent = static_cast<int>(bits_of<uint64_t>(square) >> 52) - 1022;  // square < 2^exponent
  const int scale = (exponent + 1) / 2 - 15;                                      // norm < 2^(scale + 15)
  const int bounded = scale > 113 ? 113 : scale < -100 ? -100 : scale;            // 2^(113 + 15) is above all floats
  return square > 0 ? bits_of<float>(static_cast<uint32_t>(127 + bounded) << 23) : 1.0f;
}

// The Lipschitz factor of this update, or NaN if it has none.
SECUREAFL_FN double factor_of(const ClientState& before, const double* sums) {
  return has_factor(sums, before.known) ? lipschitz_factor(sums[kYY], sums[kSS]) : NAN;
}

// From the sums over the update to the verdict; counts the upload if it is stored. Run by one thread. record_verdict
// and push_pair must follow.
SECUREAFL_FN Verdict verdict_on(const Round& r, const ClientState& before, const double* sums, const Tally& tally,
                                const Census& others) {
  const bool known = before.known;
  Verdict v{};
  v.client = before.client;
  const int64_t rounding = r.lists > 1 ? r.lists * r.room : 0;  // each weight is rounded down, by less than 1
  v.reason = judge(sums, known, r.filter, exceeds_quantile(tally, r.quantile, rounding));
  const bool accepted = accepts(v.reason);
  v.steps = accepted || !r.hold;
  v.stored = r.store_all ? v.reason != Reason::kNotFinite : accepted;
  v.rate = v.stored ? r.lr * count_upload(r.presence, v.client, others) : r.lr;
  v.last_rate = r.lr;
  v.received = accepted && r.receive && r.presence.counts(true, v.client);  // an accepted update is stored
  v.pushed = r.m > 0 && v.stored && known && has_curvature(sums);
  v.clip = known ? 1.0f : static_cast<float>(fmin(1.0, r.max_norm / sqrt(sums[kGG])));
  v.g_square = sums[kGG] * v.clip * v.clip;
  v.y_scale = r.half ? half_scale(sums[kYY]) : 1.0f;
  v.s_scale = r.half ? half_scale(sums[kSS]) : 1.0f;
  v.slot = before.pairs == r.m ? before.oldest : before.pairs;
  return v;
}

// Stores the factor in Q, the results and the counters. The rest of the round reads none of them. Run by one thread.
SECUREAFL_FN void record_verdict(const Round& r, const ClientState& before, const double* sums, const Verdict& v) {
  const double factor = factor_of(before, sums);
  const bool accepted = accepts(v.reason);
  if (has_factor(sums, before.known)) record_factor(r, before, factor);
  *r.accepted = accepted;
  *r.factor = factor;
  *r.reason = v.reason;
  r.counts[0] += accepted;
  r.counts[1] += !accepted;
  r.counts[2] += v.reason == Reason::kNotFinite;
}

SECUREAFL_FN Verdict decide(const Round& r, const ClientState& before, const double* sums, const Tally& tally,
                            const Census& others) {
  const Verdict v = verdict_on(r, before, sums, tally, others);
  record_verdict(r, before, sums, v);
  return v;
}

// Makes room for the pair of this update, if it is stored. Run by one thread, once no other renews the client.
SECUREAFL_FN void push_pair(const Round& r, const Verdict& v) {
  if (!v.pushed) return;
  const int32_t pairs = pairs_of(r, v.client), oldest = oldest_of(r, v.client);
  const bool full = pairs == r.m;
  r.pairs[v.client] = pairs + !full;
  r.oldest[v.client] = full ? (oldest + 1) % static_cast<int32_t>(r.m) : oldest;
  r.scales[v.client * r.planes() + v.slot] = v.y_scale;
  r.scales[v.client * r.planes() + r.m + v.slot] = v.s_scale;
}

// Next value of a coordinate. It keeps its value if the next one is not finite.
SECUREAFL_FN float stepped(const Verdict& v, float model, float direction) {
  const float next = model - static_cast<float>(v.rate * direction);
  return v.steps && isfinite(next) ? next : model;
}

}  // namespace secureafl::SECUREAFL_KIND
