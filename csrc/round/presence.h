#pragma once

#include <cstdint>

#include "common/host_device.h"

// Which clients count in the aggregate (reasons: secureafl_ext/engines/presence.py, which does the same in torch). No
// value here is an index, and sums wrap: a state with odd numbers does no harm beyond a wrong choice of clients.

namespace secureafl::SECUREAFL_KIND {

constexpr int64_t kStall = 16;         // STALL of presence.py
constexpr int64_t kFree = 3;           // FREE["all"] of presence.py
constexpr int64_t kFreeAlone = 1;      // FREE["received"]
constexpr double kAhead = 1.5;         // AHEAD of presence.py
constexpr int64_t kGone = -1;          // GONE of config.py
constexpr int64_t kNever = INT64_MAX;  // NEVER of presence.py

struct Presence {
  int64_t expiry, probation;
  int64_t* clock;        // (3): the epoch, stored uploads in it, whether probation applies
  int64_t* last_epoch;   // (n): epoch of the last stored upload of each client, or kGone
  int64_t* uploads;      // (n, 2): stored uploads of each client, and those of them in its last epoch
  int64_t free = kFree;  // uploads of a client in an epoch that everybody keeps up with

  // seen: whether the client has a history
  SECUREAFL_FN bool live(bool seen, int64_t k) const {
    const int64_t last = last_epoch[k];
    return seen && last >= 0 && static_cast<uint64_t>(clock[0]) - static_cast<uint64_t>(last) <= uint64_t(expiry);
  }
  SECUREAFL_FN bool past_probation(int64_t k) const { return uploads[2 * k] >= probation; }
  SECUREAFL_FN bool counts(bool seen, int64_t k) const { return live(seen, k) && (past_probation(k) || clock[2] == 0); }
  SECUREAFL_FN int64_t in_this_epoch(int64_t k) const { return last_epoch[k] == clock[0] ? uploads[2 * k + 1] : 0; }

  // True if a client with this many uploads in the epoch keeps up with one that has `other` many.
  SECUREAFL_FN bool keeps_up(int64_t count, int64_t other) const {
    return kAhead * static_cast<double>(count) >= static_cast<double>(other) - static_cast<double>(free);
  }
};

// Counts of clients, all of them and those that are past their probation: two in an integer, so that sums over threads
// add up both. Below 2^53 for n < 4096.
constexpr int kCensusBits = 24;

SECUREAFL_FN int64_t counted(bool past_probation) { return 1 | static_cast<int64_t>(past_probation) << kCensusBits; }

SECUREAFL_FN int64_t counted_in(int64_t census, bool past_probation) {
  return past_probation ? census >> kCensusBits : census & ((int64_t{1} << kCensusBits) - 1);
}

// Of the live clients: all, those that have uploaded in this epoch, those that keep up with the arriving client.
struct Census {
  int64_t live, current, keeping;
};

SECUREAFL_FN int64_t plus_one(int64_t value) { return static_cast<int64_t>(static_cast<uint64_t>(value) + 1); }

// Contribution of this thread to the census of all clients but the arriving one.
template <typename Team>
SECUREAFL_FN Census census_of_others(const Team& team, const Presence& p, const bool* seen, int64_t n, int64_t client) {
  const int64_t own = plus_one(p.in_this_epoch(client));
  Census sum{};
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < static_cast<int>(n); k += Team::kSize) {
    if (k == client || !p.live(seen[k], k)) continue;
    const int64_t one = counted(p.past_probation(k)), uploads = p.in_this_epoch(k);
    sum.live += one;
    sum.current += p.last_epoch[k] == p.clock[0] ? one : 0;
    sum.keeping += p.keeps_up(uploads, own) ? one : 0;
  }
  return sum;
}

// Moves the clock after a stored upload of the client, and returns the factor of this round's step. Run by one thread.
SECUREAFL_FN double count_upload(const Presence& p, int64_t client, const Census& others) {
  const int64_t own = plus_one(p.in_this_epoch(client));
  p.uploads[2 * client] = plus_one(p.uploads[2 * client]);
  p.uploads[2 * client + 1] = own;
  p.last_epoch[client] = p.clock[0];
  const int64_t one = counted(p.past_probation(client)), live = others.live + one;
  const bool applies = 4 * counted_in(live, true) >= 3 * counted_in(live, false);
  const int64_t count = counted_in(live, applies), done = counted_in(others.current + one, applies);
  const int64_t keeping = counted_in(others.keeping + one, applies), rounds = plus_one(p.clock[1]);
  const bool ends = 3 * done >= 2 * count || rounds >= kStall * count;
  if (ends) p.clock[0] = plus_one(p.clock[0]);
  p.clock[1] = ends ? 0 : rounds;
  p.clock[2] = applies;
  if (p.expiry == kNever || own <= p.free || 2 * keeping >= count) return 1;
  const double share = static_cast<double>(p.free) / static_cast<double>(own), square = share * share;
  return square * square;
}

}  // namespace secureafl::SECUREAFL_KIND
