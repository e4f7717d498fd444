#pragma once

#include "common/block_team.cuh"
#include "common/meet.cuh"

namespace secureafl::cuda {

// All threads of kBlocks blocks as one team (see team.h); each warp is one row of the grid. For a cooperative launch:
// the blocks wait for each other. barrier (): counts the arrivals of all blocks, zero before the launch
template <int kBlocks>
struct MeetingTeam {
  static constexpr int kSize = kBlocks * BlockTeam::kSize, kDown = kBlocks * BlockTeam::kDown;
  static constexpr int kAcross = BlockTeam::kAcross;

  unsigned* barrier;
  mutable unsigned meetings = 0;

  __device__ int size() const { return kSize; }
  __device__ int rank() const { return blockIdx.x * BlockTeam::kSize + threadIdx.x; }
  __device__ int down() const { return rank() / kAcross; }
  __device__ int across() const { return rank() % kAcross; }
  template <typename T>
  __device__ T sum_across(T value) const {
    return BlockTeam().sum_across(value);
  }

  __device__ void sync() const {
    ++meetings;
    __syncthreads();
    if (threadIdx.x == 0) {
      arrive(barrier);
      wait_for_count(barrier, meetings * kBlocks);
    }
    __syncthreads();
  }
};

}  // namespace secureafl::cuda
