#pragma once

#include <cstdint>

#include "common/host_device.h"

// Which clients count in the aggregate (reasons: secureafl_ext/engines/presence.py, which does the same in torch). No
// value here is an index, and sums wrap: a state with odd numbers does no harm beyond a wrong choice of clients.

namespace secureafl::SECUREAFL_KIND {

constexpr int64_t kStall = 16;         // STALL of presence.py
constexpr int64_t kFree = 3;           // FREE["all"] of presence.py
constexpr int64_t kFreeAlone = 2;      // FREE["received"]
constexpr double kAhead = 1.5;         // AHEAD of presence.py
constexpr int64_t kGone = -1;          // GONE of config.py
constexpr int64_t kNever = INT64_MAX;  // NEVER of presence.py
// UPLOAD, MOST_RECENT, FADED and LEVELS of presence.py
constexpr int64_t kUpload = 1024, kMostRecent = int64_t{1} << 40;
constexpr uint64_t kFaded = 64;
constexpr int kLevels = 6;

struct Presence {
  int64_t expiry, probation;
  int64_t* clock;        // (3): the epoch, stored uploads in it, whether probation applies
  int64_t* last_epoch;   // (n): epoch of the last stored upload of each client, or kGone
  int64_t* uploads;      // (n, 3): stored uploads of each client; those of them in its last epoch; its recent ones
  int64_t free = kFree;  // uploads of a client in an epoch that everybody keeps up with

  // seen: whether the client has a history
  SECUREAFL_FN bool live(bool seen, int64_t k) const {
    return seen & (last_epoch[k] >= 0) & (age(k) <= uint64_t(expiry));
  }
  SECUREAFL_FN bool past_probation(int64_t k) const { return uploads[3 * k] >= probation; }
  // No short circuit: a GPU loads all values at once, not one after the other.
  SECUREAFL_FN bool counts(bool seen, int64_t k) const { return live(seen, k) & (past_probation(k) | (clock[2] == 0)); }

  // Epochs since the last upload of the client.
  SECUREAFL_FN uint64_t age(int64_t k) const {
    return static_cast<uint64_t>(clock[0]) - static_cast<uint64_t>(last_epoch[k]);
  }
  SECUREAFL_FN int64_t in_this_epoch(int64_t k) const { return last_epoch[k] == clock[0] ? uploads[3 * k + 1] : 0; }

  // Recent uploads of the client, in units of 1 / kUpload. They fade by an eighth per epoch. Integers: all devices
  // agree.
  SECUREAFL_FN int64_t recent(int64_t k) const {
    if (last_epoch[k] < 0 || age(k) > kFaded || age(k) > uint64_t(expiry)) return 0;
    int64_t left = uploads[3 * k + 2];
    left = left < 0 ? 0 : left > kMostRecent ? kMostRecent : left;
    SECUREAFL_NO_UNROLL
    for (uint64_t i = age(k); i > 0; --i) left -= (left + 7) / 8;
    return left;
  }
};

// Counts of clients, all of them and those that are past their probation: two in an integer, so that sums over threads
// add up both. Below 2^48 for up to 2^24 - 1 clients.
constexpr int kCensusBits = 24;

SECUREAFL_FN int64_t counted(bool past_probation) { return 1 | static_cast<int64_t>(past_probation) << kCensusBits; }

SECUREAFL_FN int64_t counted_in(int64_t census, bool past_probation) {
  return past_probation ? census >> kCensusBits : census & ((int64_t{1} << kCensusBits) - 1);
}

// Of the live clients: all, those that have uploaded in this epoch, those that keep up with the arriving client in it,
// and those with at least a 2^-level-th of its recent uploads, with a margin.
struct Census {
  enum { kLive, kCurrent, kKeeping, kNear, kNumbers = kNear + kLevels };
  int64_t of[kNumbers];

  // Size of a group: all its clients, or only those past their probation. The arriving client is in every group; one:
  // its `counted`.
  SECUREAFL_FN int64_t with(int64_t one, int group, bool past_probation) const {
    return counted_in(of[group] + one, past_probation);
  }
};

SECUREAFL_FN int64_t plus_one(int64_t value) { return static_cast<int64_t>(static_cast<uint64_t>(value) + 1); }

// Contribution of this thread to the census of all clients but the arriving one.
template <typename Team>
SECUREAFL_FN Census census_of_others(const Team& team, const Presence& p, const bool* seen, int64_t n, int64_t client) {
  const int64_t own = plus_one(p.in_this_epoch(client)), own_recent = p.recent(client) + kUpload;
  Census sum{};
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < static_cast<int>(n); k += team.size()) {
    if (k == client || !p.live(seen[k], k)) continue;
    const int64_t one = counted(p.past_probation(k)), margin = 3 * (p.recent(k) + kUpload);
    const double ahead = static_cast<double>(own) - static_cast<double>(p.free);
    sum.of[Census::kLive] += one;
    sum.of[Census::kCurrent] += p.last_epoch[k] == p.clock[0] ? one : 0;
    sum.of[Census::kKeeping] += kAhead * static_cast<double>(p.in_this_epoch(k)) >= ahead ? one : 0;
    SECUREAFL_UNROLL
    for (int level = 0; level < kLevels; ++level) {
      sum.of[Census::kNear + level] += margin << level >= 2 * own_recent ? one : 0;
    }
  }
  return sum;
}

// Moves the clock after a stored upload of the client, and returns the factor of this round's step. Run by one thread.
SECUREAFL_FN double count_upload(const Presence& p, int64_t client, const Census& others) {
  const int64_t own = plus_one(p.in_this_epoch(client)), recent = p.recent(client) + kUpload;
  p.uploads[3 * client] = plus_one(p.uploads[3 * client]);
  p.uploads[3 * client + 1] = own;
  p.uploads[3 * client + 2] = recent;
  p.last_epoch[client] = p.clock[0];
  const int64_t one = counted(p.past_probation(client)), rounds = plus_one(p.clock[1]);
  const bool applies = 4 * others.with(one, Census::kLive, true) >= 3 * others.with(one, Census::kLive, false);
  const int64_t count = others.with(one, Census::kLive, applies), done = others.with(one, Census::kCurrent, applies);
  const bool ends = 3 * done >= 2 * count || rounds >= kStall * count;
  if (ends) p.clock[0] = plus_one(p.clock[0]);
  p.clock[1] = ends ? 0 : rounds;
  p.clock[2] = applies;
  if (p.expiry == kNever) return 1;
  double factor = 1;
  if (own > p.free && 2 * others.with(one, Census::kKeeping, applies) < count) {
    const double share = static_cast<double>(p.free) / static_cast<double>(own), square = share * share;
    factor = square * square;
  }
  double often = 1;
  SECUREAFL_NO_UNROLL
  for (int i = 0; i < kLevels && 2 * others.with(one, Census::kNear + i, applies) < count; ++i) often /= 4;
  return often < factor ? often : factor;
}

}  // namespace secureafl::SECUREAFL_KIND
