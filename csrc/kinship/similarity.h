#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "kinship/kinship.h"
#include "kinship/table.h"

namespace secureafl::SECUREAFL_KIND {

// This upload meets the last of everybody: along (n) with them, table.lengths theirs. How many this thread saw it meet.
template <typename Team>
SECUREAFL_FN int meet(const Team& team, const Kin& r, int client, const double* along, double length, double usual,
                      const Table& table) {
  const int n = static_cast<int>(r.n);
  int count = 0;
  const double share = 1 / fmin(fmax(static_cast<double>(r.met[client] + 1), 1.0), r.bounds.span);
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const double cut = usual / fmax(table.lengths[k], usual) * usual / fmax(length, usual);
    const double now = along[k] * cut / (usual * usual);
    if (!(table.lengths[k] > 0) || !isfinite(now)) continue;
    const double before = r.means[client * r.n + k];
    const double after = share < 0.5 ? before + share * (now - before) : now - (now - before) * (1 - share);
    r.means[client * r.n + k] = r.means[k * r.n + client] = after;
    ++count;
  }
  return count;
}

// The mean updates seen from their centre: table.reach, table.far. found (1) is scratch; what it returns is the square
// of the centre.
template <typename Team>
SECUREAFL_FN double look_from_centre(const Team& team, const Kin& r, const Table& table, double* found) {
  const int n = static_cast<int>(r.n);
  SECUREAFL_ROLLED
  for (int i = team.down(); i < n; i += Team::kDown) {
    double reach = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) reach += r.means[i * r.n + k] * r.centre[k];
    reach = team.sum_across(reach);
    if (team.across() == 0) table.reach[i] = reach;
  }
  team.sync();
  if (team.down() == 0) {
    double square = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) square += r.centre[k] * table.reach[k];
    square = team.sum_across(square);
    if (team.across() == 0) *found = square;
  }
  team.sync();
  const double square = *found;
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    table.far[k] = sqrt(fmax(r.means[k * r.n + k] - 2 * table.reach[k] + square, 0.0));
  }
  team.sync();
  return square;
}

// The centre a step on towards the geometric median, from table.far.
template <typename Team>
SECUREAFL_FN void settle(const Team& team, const Kin& r, const Table& table, double* found) {
  const int n = static_cast<int>(r.n);
  const auto weight = [&](int k) { return is_known(r, k) ? 1 / fmax(table.far[k], r.bounds.near) : 0.0; };
  if (team.down() == 0) {
    double sum = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) sum += weight(k);
    sum = team.sum_across(sum);
    if (team.across() == 0) *found = fmax(sum, 1e-300);
  }
  team.sync();
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) r.centre[k] = weight(k) / *found;
}

}  // namespace secureafl::SECUREAFL_KIND
