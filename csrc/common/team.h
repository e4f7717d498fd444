#pragma once

#include "common/host_device.h"

namespace secureafl::SECUREAFL_KIND {

// A team: threads that work together on one small matrix, numbered in a row (rank) or as a grid (down, across). This is
// the team of one thread, for the host; team.cuh has a warp.
struct Solo {
  static constexpr int kSize = 1, kDown = 1, kAcross = 1;
  SECUREAFL_FN int rank() const { return 0; }
  SECUREAFL_FN int down() const { return 0; }
  SECUREAFL_FN int across() const { return 0; }
  SECUREAFL_FN void sync() const {}
  template <typename T>
  SECUREAFL_FN T sum_across(T value) const {
    return value;
  }
};

}  // namespace secureafl::SECUREAFL_KIND
