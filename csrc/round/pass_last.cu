#include "round/launches.h"
#include "round/pass_last.cuh"

namespace secureafl::cuda {

void launch_judge(const Launcher& launch, const Round& r, const Scratch& scratch) {
  launch(judge_kernel, scratch.parts, kPartThreads, r.lists * static_cast<int64_t>(sizeof(FactorList)), r, scratch);
}

void launch_last_pass(const Launcher& launch, const Round& r, const Verdict* verdict) {
  dispatch_shape<0, float>(shape_of(r.n, 0), [&](auto pass) {
    using P = decltype(pass);
    constexpr int64_t kTeams = kLastThreads<P> / P::kThreads;
    const int64_t needed = (r.tiles + kTeams - 1) / kTeams, room = launch.multiprocessors() * kLastBlocksPerSm<P>;
    const int64_t blocks = needed < 1 ? 1 : needed < room ? needed : room;
    launch.launch_pdl(last_pass_kernel<P>, blocks, kLastThreads<P>, 0, r, verdict);
  });
}

}  // namespace secureafl::cuda
