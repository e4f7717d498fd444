#include <cuda_fp16.h>
#include <torch/csrc/stable/library.h>

#include "common/launch.cuh"
#include "round/judge.cuh"
#include "round/launches.h"
#include "round/ops_impl.h"
#include "round/settle.cuh"
#include "round/tiles.h"

// A round in one kernel and one pass over the history: begin.cuh, pass.cuh. Without pairs in two: judge.cuh,
// pass_last.cuh. Nothing waits for the device.

namespace secureafl {

class CudaRound {
 public:
  static constexpr bool kHostReads = false;

  explicit CudaRound(const Tensor& on) : launch_(on.get_device_index()) {}

  static int64_t columns(const char* op, int64_t n, int64_t m) {
    if (m < 0 || m > kMaxGpuPairs) refuse(op, "slots must hold 0 to ", kMaxGpuPairs, " pairs, got ", m);
    const int64_t most = most_gpu_clients(m);
    if (n < 1 || n > most) refuse(op, "slots must hold 1 to ", most, " clients with ", m, " pairs of each, got ", n);
    const int64_t columns = shape_of(n, m).columns;
    if (columns < 4 && n % 4 != 0) refuse(op, "slots must hold a multiple of 4 clients, got ", n);
    return columns;
  }

  bool fits(int64_t n, int64_t m, bool half, std::optional<int64_t> shared_bytes) const {
    const int64_t least = half ? cuda::min_shared_bytes<__half>(n, m) : cuda::min_shared_bytes<float>(n, m);
    return least <= shared_bytes.value_or(launch_.max_shared_bytes());
  }

  int64_t pass_blocks(int64_t n, int64_t m, bool half, int64_t tiles) const {
    Round r{};
    r.n = n;
    r.m = m;
    r.half = half;
    r.tiles = tiles;
    return plan_pass(r).blocks;
  }

  void step(const Round& r, Verdict* verdict, double* changes, const Tensor& like) const {
    const int64_t parts = cuda::judge_parts(r.d);
    const auto plan = plan_pass(r);
    const Tensor judged = allocate(like, ScalarType::Double, {kSums, parts});
    if (r.m > 0 && launch_.shares_gpu()) {  // in phases, whose kernels wait for nothing; nothing stays pending
      const Tensor sums = allocate(like, ScalarType::Double, {kSums});
      const Tensor collected = allocate(like, ScalarType::Double, {pass_sums(r.n, r.m)});
      cuda::launch_update_sums(launch_, parts, r, mutable_data<double>(judged), mutable_data<double>(sums));
      apply(r, data<double>(sums), verdict, mutable_data<double>(collected), like);
      return renew(r, verdict, data<double>(collected));
    }
    const cuda::Scratch scratch{mutable_data<double>(judged), parts, verdict, changes, plan.blocks};
    if (r.m == 0) cuda::launch_judge(launch_, r, scratch);
    launch_pass(plan, r, scratch);
  }

  void settle(const Round& r, Verdict* verdict, const double* changes, int64_t blocks) const {
    cuda::launch_settle(launch_, r, verdict, changes, blocks);
  }

  void refresh(const Round& r) const { launch_(cuda::refresh_kernel, r.n, 32, bytes(solve_scratch(r.m)), r); }

  void update_sums(const Round& r, double* out, const Tensor& like) const {
    const int64_t parts = cuda::judge_parts(r.d);
    const Tensor judged = allocate(like, ScalarType::Double, {kSums, parts});
    cuda::launch_update_sums(launch_, parts, r, mutable_data<double>(judged), out);
  }

  void apply(const Round& r, const double* sums, Verdict* verdict, double* changes, const Tensor& like) const {
    const auto plan = plan_pass(r);
    const Tensor memory = allocate(like, ScalarType::Double, {pass_sums(r.n, r.m), plan.blocks});
    const cuda::Scratch scratch{nullptr, 0, verdict, mutable_data<double>(memory), plan.blocks};
    cuda::launch_decide(launch_, r, sums, verdict);
    launch_pass(plan, r, scratch);
    if (r.m == 0) return;  // no sums to collect
    cuda::launch_collect(launch_, r, scratch, changes);
  }

  void renew(const Round& r, const Verdict* verdict, const double* changes) const {
    cuda::launch_renew(launch_, r, verdict, changes);
  }

 private:
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
