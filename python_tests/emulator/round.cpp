#include "arguments.h"
#include "round/pass_last.cu"
#include "round/pass_launch.cuh"
#include "round/settle.cuh"
#include "round/sharded.cu"

// `step_` and `settle_` on a CPU, as one rank of `update_sums`, `apply_` and `renew_` too, and `refresh_`: runs the
// kernels of csrc/round.

using namespace secureafl;

template <typename S>
static int64_t shared_bytes(const Round& r) {
  constexpr int64_t kTeams = 3;  // about so many per block: few, so that each processes several tiles
  return kTeams * cuda::min_shared_bytes<S>(r.n, r.m);
}

template <typename S>
static cuda::PassPlan plan(const Round& r) {
  return cuda::plan_pass<S>(cuda::Launcher(0, shared_bytes<S>(r)), r);
}

// The launches of CudaRound in csrc/round/ops_cuda.cu. phases: those of a server with several ranks
template <typename S>
static void run(const Round& r, Verdict* verdict, double* changes, bool phases, unsigned seed) {
  const int64_t parts = cuda::judge_parts(r.d), count = pass_sums(r.n, r.m);
  const auto pass = plan<S>(r);
  std::vector<double> judged(kSums * parts, std::nan(""));
  std::vector<double> sums(kSums, std::nan("")), collected(count, std::nan(""));
  const cuda::Launcher launch(seed, shared_bytes<S>(r));  // behind the buffers: kernels run until it is destroyed
  const cuda::Scratch scratch{judged.data(), phases ? 0 : parts, verdict, changes, pass.blocks};
  if (phases) {
    cuda::launch_update_sums(launch, parts, r, judged.data(), sums.data());
    cuda::launch_decide(launch, r, sums.data(), verdict);
    cuda::launch_pass<S>(launch, pass, r, scratch);
    if (r.m == 0) return;
    cuda::launch_collect(launch, r, scratch, collected.data());
    return cuda::launch_renew(launch, r, verdict, collected.data());
  }
  if (r.m == 0) cuda::launch_judge(launch, r, scratch);
  cuda::launch_pass<S>(launch, pass, r, scratch);
}

static void read_clients(Reader& tensor, Round& r) {
  tensor(r.scales), tensor(r.gram), tensor(r.along), tensor(r.factors), tensor(r.status);
  tensor(r.pairs), tensor(r.oldest), tensor(r.seen);
}

// at: the tensors of the op in their order, with three rows of models (now, next, previous), then the results
extern "C" void step(void** at, const int64_t* whole, const double* real, unsigned seed) {
  Reader tensor{at};
  Round r{};
  Verdict* verdict;
  double* changes;
  tensor(verdict), tensor(changes);
  tensor(r.update), tensor(r.client), tensor(r.trained_on), tensor(r.model), tensor(r.next_model), tensor(r.previous);
  tensor(r.slots), tensor(r.last);
  read_clients(tensor, r);
  tensor(r.presence.clock), tensor(r.presence.last_epoch), tensor(r.presence.uploads);
  tensor(r.seen_factors), tensor(r.recorded), tensor(r.factor_counts), tensor(r.counts), tensor(r.arrived);
  tensor(r.accepted), tensor(r.factor), tensor(r.reason);
  r.tiles = whole[0], r.m = whole[1] / 2, r.n = whole[2], r.columns = whole[3], r.d = whole[4];
  r.lists = whole[5], r.room = whole[6], r.half = whole[7], r.backwards = whole[8];
  r.rule = static_cast<Rule>(whole[10]), r.trim = whole[11];
  r.filter = whole[12], r.estimate = whole[13], r.receive = whole[14], r.store_all = whole[15], r.hold = whole[16];
  r.presence.expiry = whole[17], r.presence.probation = whole[18];
  r.lr = real[0], r.quantile = real[1], r.max_norm = real[2], r.trust = real[3];
  const auto run_it = r.half ? run<__half> : run<float>;
  run_it(r, verdict, changes, whole[9], seed);
}

extern "C" void settle(void** at, const int64_t* whole, const double* real, unsigned seed) {
  Reader tensor{at};
  Round r{};
  Verdict* verdict;
  double* changes;
  tensor(verdict), tensor(changes);
  read_clients(tensor, r);
  r.n = whole[0], r.m = whole[1], r.trust = real[0];
  const cuda::Launcher launch(seed);
  cuda::launch_settle(launch, r, verdict, changes, whole[2]);
}

extern "C" int64_t pass_blocks(int64_t n, int64_t m, bool half, int64_t tiles) {
  Round r{};
  r.n = n, r.m = m, r.tiles = tiles;
  return (half ? plan<__half>(r) : plan<float>(r)).blocks;
}

extern "C" int64_t min_shared_bytes(int64_t n, int64_t m, bool half) {
  return half ? cuda::min_shared_bytes<__half>(n, m) : cuda::min_shared_bytes<float>(n, m);
}

extern "C" void refresh(void** at, const int64_t* whole, const double* real, unsigned seed) {
  Reader tensor{at};
  Round r{};
  read_clients(tensor, r);
  r.n = whole[0], r.m = whole[1], r.trust = real[0];
  const cuda::Launcher launch(seed);
  launch(cuda::refresh_kernel, r.n, 32, solve_scratch(r.m) * sizeof(double), r);
}
