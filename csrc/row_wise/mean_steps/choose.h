#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "row_wise/kinship/choose.h"
#include "row_wise/kinship/table.h"
#include "row_wise/mean_steps/mean_steps.h"

namespace secureafl::SECUREAFL_KIND {

// Puts the update into the mean of its client. norm: of the update as it is stored. moved: how far the model moved
// along it, in full steps. Run by one thread, for a stored update.
SECUREAFL_FN void add_to_mean(const MeanRound& r, int32_t client, double norm, double median_norm, double moved,
                              Choice* out) {
  out->mean_length = fmax(norm, median_norm);
  r.norms[client] = norm;
  r.seen[client] = true;
  if (!(norm * norm <= kMaxSquare && out->mean_length > 0)) return;
  const double share = r.least_share + (1 - r.least_share) * fmin(fmax(moved, 0.0), 1.0);
  const double total = fmin(r.total[client] + share, r.bounds.span), weight = share / total;
  out->mean_share = weight;
  r.total[client] = total;
  r.noise[client] = (1 - weight) * (1 - weight) * r.noise[client] + weight * weight;
}

// As `choose` of kinship, for a rule that compares means of clients' own updates. judged (kSums)
template <typename Team>
SECUREAFL_FN void choose(const Team& team, const MeanRound& r, double* judged, const Table& table, Choice* out) {
  const int n = static_cast<int>(r.n);
  decide_arrival(team, r, judged, table, out);
  const Verdict v = out->verdict;
  const double norm = v.stored ? sqrt(v.g_square) : 0;  // an update that is not stored takes no part and may be NaN
  int64_t counting[] = {0};
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const bool present = k == v.client ? v.received : r.presence.counts(r.seen[k], k);
    const double length = k == v.client ? norm : r.norms[k];
    const bool counts = present && length * length <= kMaxSquare;
    table.values[k] = counts ? length : INFINITY;
    counting[0] += counts;
  }
  team.sum_all(counting);  // and waits for all threads
  const double count = static_cast<double>(counting[0]);
  const double median_norm = count > 0 ? median_of(team, table.values, n, table.shared_results) : INFINITY;
  if (team.rank() != 0) return;
  // Below 0 if more clients count than when the shifts were computed.
  const double weight = table.values[v.client] < INFINITY ? fmax(1 / count + r.shift[v.client], 0.0) : 0;
  const double clip = norm > median_norm ? median_norm / norm : 1;
  *r.weight = weight;
  out->own_weight = static_cast<float>(weight * count * clip);
  out->count = 0;
  out->mean_share = 0;
  const double moved = v.received && v.steps && r.lr != 0 ? weight * count * (v.rate / r.lr) : 0;
  if (v.stored) add_to_mean(r, v.client, norm, median_norm, moved, out);
}

}  // namespace secureafl::SECUREAFL_KIND
