#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "round/judge.h"
#include "round/quantile.h"
#include "row_wise/sketch/median_norm.h"
#include "row_wise/sketch/sketch.h"

namespace secureafl::SECUREAFL_KIND {

// Counts over Q and over all clients but the arriving one, before this round.
struct Totals {
  Tally tally;
  int64_t rows;  // clients with a row
  Census others;
};

// The share of an upload in the mean of its client, with averages of uploads; records it if it counts there.
// consecutive: its product with the last one
template <typename Team>
SECUREAFL_FN double share_by_uploads(const Team& team, const SketchRound& r, int64_t client, double consecutive,
                                     bool counts) {
  const bool again = r.norms[client] > 0;                                   // a first upload begins the mean
  const double compared = again ? static_cast<double>(r.met[client]) : -1;  // uploads compared before
  team.sync();                                                              // all have read the state of the client
  if (team.rank() == 0 && counts && again) {
    const double square = r.squares[client];
    r.squares[client] = square + (consecutive - square) / fmin(fmax(compared + 1, 1.0), r.span);
    r.met[client] = plus_one(r.met[client]);
  }
  return 1 / fmin(compared + 2, r.span);
}

// The same for averages of steps. moved: how far the model moves along the upload, in full steps
template <typename Team>
SECUREAFL_FN double share_by_steps(const Team& team, const SketchRound& r, int64_t client, double moved, bool counts) {
  const double share = r.least_share + (1 - r.least_share) * fmin(fmax(moved, 0.0), 1.0);
  const double total = fmin(r.total[client] + share, r.span), weight = share / total;
  team.sync();  // all have read the state of the client
  if (team.rank() == 0 && counts) {
    r.total[client] = total;
    r.noise[client] = (1 - weight) * (1 - weight) * r.noise[client] + weight * weight;
  }
  return weight;
}

// Averages the upload of the client, and stores its sketches and its norm. sketches (2, k): before clipping
template <typename Team>
SECUREAFL_FN void store_upload(const Team& team, const SketchRound& r, const SketchStep& step, const float* sketches,
                               double norm, double median_norm) {
  const Verdict& v = step.verdict;
  const int64_t at = v.client * r.k;
  const double longest = fmax(norm, median_norm);
  double sums[] = {0, 0};  // the product with the last upload, and the numbers that are not finite
  SECUREAFL_NO_UNROLL
  for (int64_t b = team.rank(); b < r.k; b += Team::kSize) {
    const double now = sketches[b] * v.clip / longest;
    if (!r.steps) sums[0] += now * r.update_sketches[at + b];
    sums[1] += !isfinite(now);
  }
  team.sum_all(sums);
  const double consecutive = sums[0] / fmax(r.norms[v.client], median_norm);
  const bool fits = sums[1] == 0 && norm * norm <= kMaxSquare, counts = fits && (r.steps || isfinite(consecutive));
  const double share = r.steps ? share_by_steps(team, r, v.client, step.moved, counts)
                               : share_by_uploads(team, r, v.client, consecutive, counts);
  SECUREAFL_NO_UNROLL
  for (int64_t b = team.rank(); b < r.k; b += Team::kSize) {
    const float clipped = sketches[b] * v.clip;
    const double mean = r.means[at + b];
    if (counts) r.means[at + b] = static_cast<float>(mean + share * (clipped / longest - mean));
    if (!r.update_sketches) continue;
    r.update_sketches[at + b] = clipped;
    r.model_sketches[at + b] = sketches[r.k + b];
  }
  if (team.rank() != 0) return;
  r.norms[v.client] = norm;
  r.seen[v.client] = true;
}

// From the sums to the verdict, the step and the new state. judged (kSums)   sketches (2, k)   keys (n): scratch
template <typename Team>
SECUREAFL_FN void choose_step(const Team& team, const SketchRound& r, const double* judged, const Totals& totals,
                              const float* sketches, uint64_t* keys, Bins* bins, SketchStep* out) {
  if (team.rank() == 0) {
    const ClientState before = client_state(r);
    Verdict verdict = decide(r, before, judged, totals.tally, totals.others);
    verdict.steps &= totals.rows + (before.known || verdict.stored) >= r.quorum;
    out->verdict = verdict;
  }
  team.sync();

  const Verdict v = out->verdict;
  const double norm = v.stored ? sqrt(judged[kGG]) * v.clip : 0;  // an update that is not stored takes no part
  int count[] = {0};                                              // clients that count
  SECUREAFL_NO_UNROLL
  for (int64_t k = team.rank(); k < r.n; k += Team::kSize) {
    const bool present = k == v.client ? v.received : r.presence.counts(r.seen[k], k);
    const double length = k == v.client ? norm : r.norms[k];
    const bool counts = present && length * length <= kMaxSquare;
    keys[k] = counts ? bits_of<uint64_t>(length) : kNoKey;
    count[0] += counts;
  }
  team.sum_all(count);
  const double median_norm = median_of_keys(team, keys, r.n, count[0], bins);
  if (team.rank() == 0) {
    // Below 0 if more clients count than when the shifts were computed.
    const double shifted = fmax(1.0 / count[0] + r.shift[v.client], 0.0);
    const double weight = keys[v.client] != kNoKey ? shifted : 0;
    const double clip = norm > median_norm ? median_norm / norm : 1;
    out->scale = static_cast<float>(weight * count[0] * clip * v.clip);
    out->moved = v.received && v.steps && r.lr != 0 ? weight * count[0] * (v.rate / r.lr) : 0;
    *r.weight = weight;
  }
  team.sync();
  if (v.stored) store_upload(team, r, *out, sketches, norm, median_norm);
}

}  // namespace secureafl::SECUREAFL_KIND
