#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace secureafl::SECUREAFL_KIND {

// A team: threads that work together on one small matrix, numbered in a row (rank) or as a grid (down, across). This is
// the team of one thread, for the host; team.cuh has a warp, block_team.cuh a block.
struct Solo {
  static constexpr int kSize = 1, kDown = 1, kAcross = 1;
  SECUREAFL_FN int size() const { return kSize; }
  SECUREAFL_FN int rank() const { return 0; }
  SECUREAFL_FN int down() const { return 0; }
  SECUREAFL_FN int across() const { return 0; }
  SECUREAFL_FN void sync() const {}
  template <typename T>
  SECUREAFL_FN T sum_across(T value) const {
    return value;
  }
  // Replaces the values by their sums over the team, in a fixed order.
  template <typename T, int kCount>
  SECUREAFL_FN void sum_all(T (&)[kCount]) const {}
  // Sum of the values of the threads before this one.
  SECUREAFL_FN int sum_before(int) const { return 0; }
  // Adds 1 to a number that the threads share.
  SECUREAFL_FN void increment(uint32_t* number) const { ++*number; }
};

}  // namespace secureafl::SECUREAFL_KIND
