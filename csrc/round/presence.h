#pragma once

#include <cstdint>

#include "common/host_device.h"

// Which clients count in the aggregate (reasons: secureafl_ext/engines/presence.py, which does the same in torch). No
// value here is an index, and sums wrap: a state with odd numbers does no harm beyond a wrong choice of clients.

namespace secureafl::SECUREAFL_KIND {

constexpr int64_t kStall = 16;         // STALL of presence.py
constexpr int64_t kGone = -1;          // GONE of config.py
constexpr double kPace = 1.5;          // PACE of presence.py
constexpr int64_t kNever = INT64_MAX;  // NEVER of presence.py

struct Presence {
  int64_t expiry, probation;
  int64_t* clock;       // (3): the epoch, stored uploads in it, whether probation applies
  int64_t* last_epoch;  // (n): epoch of the last stored upload of each client, or kGone
  int64_t* uploads;     // (n): stored uploads of each client

  // seen: whether the client has a history
  SECUREAFL_FN bool live(bool seen, int64_t k) const {
    const int64_t last = last_epoch[k];
    return seen && last >= 0 && static_cast<uint64_t>(clock[0]) - static_cast<uint64_t>(last) <= uint64_t(expiry);
  }
  SECUREAFL_FN bool past_probation(int64_t k) const { return uploads[k] >= probation; }
  SECUREAFL_FN bool counts(bool seen, int64_t k) const { return live(seen, k) && (past_probation(k) || clock[2] == 0); }
};

// Four counts of clients in one integer, so that one sum over threads adds them all up: live ones, those of them that
// are past their probation, those that have uploaded in this epoch, those that are both. Below 2^53 for n < 4096.
constexpr int kCensusBits = 12;

SECUREAFL_FN int64_t census(bool past_probation, bool current) {
  const int64_t in_all = 1 | static_cast<int64_t>(current) << (2 * kCensusBits);
  return past_probation ? in_all | in_all << kCensusBits : in_all;
}

SECUREAFL_FN int64_t counted_in(int64_t census, int which) {
  return census >> (which * kCensusBits) & ((1 << kCensusBits) - 1);
}

// Contribution of this thread to the census of all clients but the arriving one.
template <typename Team>
SECUREAFL_FN int64_t census_of_others(const Team& team, const Presence& p, const bool* seen, int64_t n,
                                      int64_t client) {
  int64_t sum = 0;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < static_cast<int>(n); k += Team::kSize) {
    if (k != client && p.live(seen[k], k)) sum += census(p.past_probation(k), p.last_epoch[k] == p.clock[0]);
  }
  return sum;
}

// Moves the clock after a stored upload of the client, and returns the factor of this round's step. Run by one thread.
SECUREAFL_FN double count_upload(const Presence& p, int64_t client, int64_t others) {
  const auto plus_one = [](int64_t value) { return static_cast<int64_t>(static_cast<uint64_t>(value) + 1); };
  p.uploads[client] = plus_one(p.uploads[client]);
  p.last_epoch[client] = p.clock[0];
  const int64_t all = others + census(p.past_probation(client), true);
  const bool applies = 4 * counted_in(all, 1) >= 3 * counted_in(all, 0);
  const int64_t count = counted_in(all, applies), done = counted_in(all, 2 + applies), rounds = plus_one(p.clock[1]);
  const bool ends = 3 * done >= 2 * count || rounds >= kStall * count;
  if (ends) p.clock[0] = plus_one(p.clock[0]);
  p.clock[1] = ends ? 0 : rounds;
  p.clock[2] = applies;
  const double share = kPace * static_cast<double>(count) / static_cast<double>(rounds), square = share * share;
  return p.expiry == kNever || !(rounds > 0 && share < 1) ? 1 : square * square;
}

}  // namespace secureafl::SECUREAFL_KIND
