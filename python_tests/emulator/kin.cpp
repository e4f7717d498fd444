#include <memory>

#include "arguments.h"
#include "row_wise/kinship/kin_step.cuh"
#include "row_wise/mean_steps/mean_steps.cuh"
#include "row_wise/row_rules/choose.h"
#include "row_wise/support/refresh.cuh"

// `kin_step_`, `support_step_`, `row_step_` and `mean_step_` on a CPU: runs the kernels of
// csrc/row_wise/kinship/kin_step.cuh, csrc/row_wise/support/refresh.cuh and csrc/row_wise/mean_steps/mean_steps.cuh,
// block after block.

using namespace secureafl;

// Buffers between the kernels of a round.
struct Buffers {
  cuda::KinPlan plan;
  std::vector<double> parts;
  std::vector<int32_t> rows;
  std::vector<float> weights;
  Choice choice;

  explicit Buffers(const KinRound& r)
      : plan(cuda::KinPlan::of(r)), parts(r.sums() * plan.chunks, std::nan("")), rows(r.n), weights(r.n) {}
};

// The third kernel of a round.
template <int kVector>
static void run_step(const cuda::Launcher& launch, const KinRound& r, const Choice* choice) {
  const int64_t columns = 32 * kVector;
  launch.launch_pdl(cuda::kin_step_kernel<kVector>, (r.d + columns - 1) / columns, cuda::kStepThreads, 0, r, choice);
}
template <int kVector>
static void run_step(const cuda::Launcher& launch, const MeanRound& r, const Choice* choice) {
  const int64_t columns = cuda::kStepThreads * kVector;
  const auto step =
      r.two_bytes ? cuda::mean_step_kernel<__nv_bfloat16, kVector> : cuda::mean_step_kernel<float, kVector>;
  launch.launch_pdl(step, (r.d + columns - 1) / columns, cuda::kStepThreads, 0, r, choice);
}

template <int kVector, typename R>
static void run(const cuda::Launcher& launch, const R& r, Buffers& b) {
  const KinRound& kin = r;
  const int64_t warps = b.plan.groups * b.plan.chunks, each = cuda::kSumThreads / 32;
  launch(cuda::kin_sums_kernel<kVector>, (warps + each - 1) / each, cuda::kSumThreads, 0, kin, b.plan, b.parts.data());
  launch.launch_pdl(cuda::kin_choose_kernel<R>, 1, cuda::BlockTeam::kSize, cuda::choose_bytes(r), r, b.plan.chunks,
                    b.parts.data(), &b.choice, b.rows.data(), b.weights.data());
  run_step<kVector>(launch, r, &b.choice);
}

// A refresh: an odd number of clients on two blocks, an even one on a single block, with some of its tables in shared
// memory.
using TwoBlocks = cuda::MeetingTeam<2>;
static cuda::RefreshPlan plan_for(int64_t n) {
  return n % 2 ? cuda::RefreshPlan{n, 2} : cuda::RefreshPlan{n, 1, RefreshTables::doubles(n, 32) / 2};
}

template <typename R>
static void run(const cuda::Launcher& launch, const R& r, Buffers& b) {
  r.d % 4 == 0 ? run<4>(launch, r, b) : run<1>(launch, r, b);
}

// models: the current row and the next one
static void read_last(Reader& tensor, KinRound& r) {
  tensor(r.update), tensor(r.client), tensor(r.trained_on), tensor(r.model), tensor(r.next_model);
  tensor(r.last_updates), tensor(r.last_models), tensor(r.seen);
}
static void read_rows(Reader& tensor, KinRound& r) { read_last(tensor, r), tensor(r.products); }
static void read_arrival(Reader& tensor, KinRound& r) { read_rows(tensor, r), tensor(r.means), tensor(r.met); }

// Then the results.
static void read_rest(Reader& tensor, const int64_t* whole, const double* real, KinRound& r) {
  tensor(r.rounds), tensor(r.presence.clock), tensor(r.presence.last_epoch), tensor(r.presence.uploads);
  tensor(r.seen_factors), tensor(r.recorded), tensor(r.factor_counts), tensor(r.counts), tensor(r.accepted),
      tensor(r.factor), tensor(r.reason);
  tensor(r.weight);
  r.n = whole[0], r.d = whole[1], r.lists = whole[2], r.room = whole[3];
  r.filter = whole[4], r.receive = whole[5], r.store_all = whole[6], r.hold = whole[7];
  r.presence.expiry = whole[8], r.presence.probation = whole[9], r.alone = whole[10], r.quorum = whole[11];
  if (r.alone) r.presence.free = kFreeAlone;
  r.compared = r.products ? r.n : 0;
  r.lr = real[0], r.quantile = real[1], r.max_norm = real[2];
}

extern "C" void kin_step(void** at, const int64_t* whole, const double* real, unsigned seed) {
  Reader tensor{at};
  KinRound r{};
  read_arrival(tensor, r);
  tensor(r.mean_center);
  read_rest(tensor, whole, real, r);
  std::memcpy(&r.bounds, real + 3, sizeof(r.bounds));
  Buffers buffers(r);
  const cuda::Launcher launch(seed);
  run(launch, r, buffers);
}

// real: after max_norm the number of the rule, remove, radius and iterations
extern "C" void row_step(void** at, const int64_t* whole, const double* real, unsigned seed) {
  Reader tensor{at};
  RowRound r{};
  read_rows(tensor, r);
  tensor(r.center);
  read_rest(tensor, whole, real, r);
  r.weighs = static_cast<RowRule>(real[3]), r.remove = real[4], r.radius = real[5];
  r.iterations = static_cast<int64_t>(real[6]);
  r.centered = r.weighs == RowRule::kCenteredClip;
  Buffers buffers(r);
  const cuda::Launcher launch(seed);
  run(launch, r, buffers);
}

// real: after max_norm span, every and the bounds of the rule
extern "C" void support_step(void** at, const int64_t* whole, const double* real, unsigned seed) {
  Reader tensor{at};
  KinRound r{};
  Refresh refresh{};
  double* shift;
  read_arrival(tensor, r);
  tensor(refresh.basis), tensor(shift);
  read_rest(tensor, whole, real, r);
  r.bounds.span = real[3], r.shift = refresh.shift = shift;
  refresh.n = r.n, refresh.means = r.means;
  std::memcpy(&refresh.bounds, real + 5, sizeof(refresh.bounds));
  const cuda::RefreshPlan plan = plan_for(r.n);
  std::vector<double> memory(plan.doubles(), std::nan(""));
  const cuda::RefreshScratch scratch(memory.data(), plan);
  r.barrier = scratch.barrier;
  Buffers buffers(r);
  const cuda::Launcher launch(seed);
  run(launch, r, buffers);
  cuda::launch_refresh_kernel(launch, plan, cuda::support_refresh_kernel<cuda::BlockTeam>,
                              cuda::support_refresh_kernel<TwoBlocks>, r, refresh, static_cast<int64_t>(real[4]),
                              scratch, plan.room);
}

// real: after max_norm span, least, noisy, every and the bounds of the rule
extern "C" void mean_step(void** at, const int64_t* whole, const double* real, unsigned seed) {
  Reader tensor{at};
  MeanRound r{};
  Refresh refresh{};
  double* shift;
  read_last(tensor, r);
  tensor(r.own_means), tensor(r.total), tensor(r.noise), tensor(r.norms), tensor(refresh.basis), tensor(shift);
  read_rest(tensor, whole, real, r);
  r.two_bytes = whole[12];
  r.bounds.span = real[3], r.least_share = real[4], r.max_noise = real[5], r.every = static_cast<int64_t>(real[6]);
  r.shift = refresh.shift = shift;
  refresh.n = r.n;
  std::memcpy(&refresh.bounds, real + 7, sizeof(refresh.bounds));
  const auto means = cuda::MeansPlan::of(r.n, r.d);
  const cuda::RefreshPlan plan = plan_for(r.n);
  std::vector<double> memory(cuda::MeansScratch::doubles(r.n, means, plan), std::nan(""));
  const cuda::MeansScratch scratch(memory.data(), r.n, means, plan);
  r.barrier = scratch.refresh.barrier;
  Buffers buffers(r);
  const cuda::Launcher launch(seed);
  run(launch, r, buffers);
  r.two_bytes ? cuda::launch_refresh<TwoBlocks, __nv_bfloat16>(launch, r, means, plan, refresh, scratch)
              : cuda::launch_refresh<TwoBlocks, float>(launch, r, means, plan, refresh, scratch);
}
