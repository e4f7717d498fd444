#pragma once

namespace secureafl::cuda {

// One warp of a block, as a grid of 4 x 8 threads (see team.h).
struct WarpTeam {
  static constexpr int kSize = 32, kDown = 4, kAcross = 8;
  __device__ int rank() const { return threadIdx.x % kSize; }
  __device__ int down() const { return rank() / kAcross; }
  __device__ int across() const { return rank() % kAcross; }
  __device__ void sync() const { __syncwarp(); }
};

}  // namespace secureafl::cuda
