#include <cuda_fp16.h>
#include <torch/csrc/stable/library.h>

#include "common/launch.cuh"
#include "round/judge.cuh"
#include "round/launches.h"
#include "round/ops_impl.h"
#include "round/renew.cuh"
#include "round/tiles.h"

// A round in three kernels and one pass over the history: judge.cuh, pass.cuh, renew.cuh. Without pairs in two:
// judge.cuh, pass_last.cuh. Nothing waits for the device.

namespace secureafl {

class CudaRound {
 public:
  static constexpr bool kHostReads = false;

  explicit CudaRound(const Tensor& on) : launch_(on.get_device_index()) {}

  static int64_t columns(const char* op, int64_t n, int64_t m) {
    if (m < 0 || m > kMaxGpuPairs) refuse(op, "slots must hold 0 to ", kMaxGpuPairs, " pairs, got ", m);
    if (n < 1 || n > kMaxClients) refuse(op, "slots must hold 1 to ", kMaxClients, " clients, got ", n);
    const int64_t columns = shape_of(n, m).columns;
    if (columns < 4 && n % 4 != 0) refuse(op, "slots must hold a multiple of 4 clients, got ", n);
    return columns;
  }

  bool fits(int64_t n, int64_t m, bool half, std::optional<int64_t> shared_bytes) const {
    const int64_t least = half ? cuda::min_shared_bytes<__half>(n, m) : cuda::min_shared_bytes<float>(n, m);
    return least <= shared_bytes.value_or(launch_.max_shared_bytes());
  }

  void step(const Round& r, const Tensor& like) const {
    const int64_t judges = judge_blocks(r);
    const auto plan = plan_pass(r);
    const int64_t sums = kSums * judges, changes = plan.blocks * pass_sums(r.n, r.m);
    constexpr int64_t kVerdict = (sizeof(Verdict) + sizeof(double) - 1) / sizeof(double);
    const Tensor memory = allocate(like, ScalarType::Double, {kVerdict + sums + changes});
    double* at = mutable_data<double>(memory);
    const cuda::Scratch scratch{at + kVerdict, reinterpret_cast<Verdict*>(at), at + kVerdict + sums, plan.blocks};
    launch_(cuda::judge_kernel, judges, cuda::kJudgeThreads, 0, r, scratch);
    launch_pass(plan, r, scratch);
    if (r.m == 0) return;  // no products to renew
    const int threads = cuda::renew_threads(r.n, launch_.multiprocessors());
    launch_.launch_pdl(cuda::renew_kernel, r.n, threads, bytes(cuda::renew_scratch(r.m)), r, scratch);
  }

  void refresh(const Round& r) const { launch_(cuda::refresh_kernel, r.n, 32, bytes(solve_scratch(r.m)), r); }

  void update_sums(const Round& r, double* out, const Tensor& like) const {
    const int64_t judges = judge_blocks(r);
    const Tensor judged = allocate(like, ScalarType::Double, {kSums, judges});
    cuda::launch_update_sums(launch_, judges, r, mutable_data<double>(judged), out);
  }

  void apply(const Round& r, const double* sums, Verdict* verdict, double* changes, const Tensor& like) const {
    const auto plan = plan_pass(r);
    const Tensor memory = allocate(like, ScalarType::Double, {plan.blocks, pass_sums(r.n, r.m)});
    const cuda::Scratch scratch{nullptr, verdict, mutable_data<double>(memory), plan.blocks};
    cuda::launch_decide(launch_, r, sums, verdict);
    launch_pass(plan, r, scratch);
    if (r.m == 0) return;  // no sums to collect
    cuda::launch_collect(launch_, r, scratch, changes);
  }

  void renew(const Round& r, const Verdict* verdict, const double* changes) const {
    cuda::launch_renew(launch_, r, verdict, changes);
  }

 private:
  static int64_t judge_blocks(const Round& r) {
    const int64_t wanted = (r.d + cuda::kJudgeThreads - 1) / cuda::kJudgeThreads;
    return wanted < 1 ? 1 : wanted < cuda::kJudgeBlocks ? wanted : cuda::kJudgeBlocks;
  }

  cuda::PassPlan plan_pass(const Round& r) const {
    return r.half ? cuda::plan_pass<__half>(launch_, r) : cuda::plan_pass<float>(launch_, r);
  }

  void launch_pass(const cuda::PassPlan& plan, const Round& r, const cuda::Scratch& scratch) const {
    if (r.half) return cuda::launch_pass<__half>(launch_, plan, r, scratch);
    cuda::launch_pass<float>(launch_, plan, r, scratch);
  }

  static int64_t bytes(int64_t doubles) { return doubles * static_cast<int64_t>(sizeof(double)); }

  cuda::Launcher launch_;
};

}  // namespace secureafl

SECUREAFL_REGISTER_STEP(CudaRound, CUDA)
