#include "round/pass_launch.cuh"

namespace secureafl::cuda {

template int64_t min_shared_bytes<__half>(int64_t, int64_t);
template PassPlan plan_pass<__half>(const Launcher&, const Round&);
template void launch_pass<__half>(const Launcher&, const PassPlan&, const Round&, const Scratch&);

}  // namespace secureafl::cuda
