#include "round/pass_launch.cuh"

namespace secureafl::cuda {

template int64_t min_shared_bytes<float>(int64_t, int64_t);
template PassPlan plan_pass<float>(const Launcher&, const Round&);
template void launch_pass<float>(const Launcher&, const PassPlan&, const Round&, const Scratch&);

}  // namespace secureafl::cuda
