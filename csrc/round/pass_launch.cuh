#pragma once

#include <stdexcept>
#include <string>

#include "common/launch.cuh"
#include "round/launches.h"
#include "round/pass.cuh"
#include "round/pass_shape.cuh"

namespace secureafl::cuda {

// Shared memory of a block: the part that its teams share, and the part of each team.
template <typename P>
constexpr int64_t shared_by_teams() {
  return P::kHeaderBytes;
}
template <typename P>
int64_t shared_by_team(int64_t n, int64_t m) {
  return P::kBuffers * Stage<P>::bytes(static_cast<int>(n), static_cast<int>(2 * m));
}

template <typename S>
int64_t min_shared_bytes(int64_t n, int64_t m) {
  int64_t bytes = 0;
  if (m == 0) return bytes;
  dispatch_pass<S>(n, m, [&](auto pass) {
    using P = decltype(pass);
    bytes = shared_by_teams<P>() + shared_by_team<P>(n, m);
  });
  return bytes;
}

// As many teams per block as fit into shared memory, and enough blocks to fill the GPU once: all run at the same time.
template <typename S>
PassPlan plan_pass(const Launcher& launch, const Round& r) {
  PassPlan plan{};
  if (r.m == 0) return plan;  // launch_last_pass needs none
  dispatch_pass<S>(r.n, r.m, [&](auto pass) {
    using P = decltype(pass);
    const int64_t fixed = shared_by_teams<P>(), each_team = shared_by_team<P>(r.n, r.m);
    const int64_t most = launch.max_shared_bytes(), fed = (most - fixed) / each_team,
                  most_teams = P::kMaxThreads / P::kThreads;
    const int64_t teams = fed < most_teams ? fed : most_teams;
    if (fixed > most || teams < 1) {
      throw std::runtime_error("secureafl::step_: a coordinate of " + std::to_string(r.n) + " clients does not fit " +
                               "this GPU's shared memory of " + std::to_string(most) + " bytes");
    }
    plan.threads = teams * P::kThreads;
    plan.shared_bytes = fixed + teams * each_team;
    const int64_t each = P::kBlocksPerSm > 1 ? launch.blocks_per_multiprocessor(plan.shared_bytes, P::kBlocksPerSm) : 1;
    const int64_t needed = (r.tiles + teams - 1) / teams, room = launch.multiprocessors() * each;
    plan.blocks = needed < 1 ? 1 : needed < room ? needed : room;
  });
  return plan;
}

template <typename S>
void launch_pass(const Launcher& launch, const PassPlan& plan, const Round& r, const Scratch& scratch) {
  if (r.m == 0) return launch_last_pass(launch, r, scratch.verdict);
  dispatch_pass<S>(r.n, r.m, [&](auto pass) {
    const auto kernel = round_kernel<decltype(pass)>;
    const int threads = static_cast<int>(plan.threads);
    if (scratch.parts > 0)
      return launch.launch_cooperative(kernel, plan.blocks, threads, plan.shared_bytes, r, scratch);
    launch.launch_pdl(kernel, plan.blocks, threads, plan.shared_bytes, r, scratch);
  });
}

}  // namespace secureafl::cuda
