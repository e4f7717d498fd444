#pragma once

#include "warp.h"

// In place of the header of CUDA with this name: a warp of a block.

namespace cooperative_groups {

struct Warp {
  int thread_rank() const { return threadIdx.x % 32; }
  int meta_group_rank() const { return threadIdx.x / 32; }
  int meta_group_size() const { return blockDim.x / 32; }
};
template <int>
Warp tiled_partition(int) {
  return {};
}
inline int this_thread_block() { return 0; }
template <typename T>
struct plus {};
template <typename T>
T reduce(Warp, T value, plus<T>) {
  return emulator::Lanes<T>(value).combined(std::plus<T>());
}

}  // namespace cooperative_groups
