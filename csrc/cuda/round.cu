#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "../check.h"
#include "../tensors.h"
#include "judge.cuh"
#include "launch.cuh"
#include "pass.cuh"
#include "solve.cuh"
namespace secureafl::cuda {
namespace {

// How the rows of a coordinate are spread over the threads of a warp, by the number of clients. All of these are
// built for the default memory; other memories make do with two, which keeps the build short.
struct Spread {
  int64_t lanes, held;
  bool common;
};
constexpr Spread kSpreads[] = {{8, 7, true}, {16, 7, false}, {32, 7, false}, {32, 14, true}};
constexpr int64_t kDefaultMemory = 3, kMostClients = 32 * 14;

Spread spread_of(int64_t n, int64_t m) {
  for (const Spread& spread : kSpreads) {
    if (n <= spread.lanes * spread.held && (spread.common || m == kDefaultMemory)) return spread;
  }
  refuse("step_", "history must hold at most ", kMostClients, " clients, got ", n);
}

template <int M, int L, int R>
void launch_pass(const Launcher& launch, const Round& round) {
  const int64_t extra = ((kRoundThreads / L) * (4 * M + 1) + 1) / 2 * 2, factors = (2 * M + 2) * round.n;
  const int64_t staging = kRoundThreads * R;
  const int64_t shared = extra * sizeof(double) + (factors + staging) * sizeof(float);
  launch(pass_kernel<M, L, R>, round.pass_blocks, kRoundThreads, shared, round);
}

template <int M>
void launch_pass(const Launcher& launch, const Round& round, const Spread& spread) {
  if constexpr (M == kDefaultMemory) {
    if (spread.lanes == 16) return launch_pass<M, 16, 7>(launch, round);
    if (spread.lanes == 32 && spread.held == 7) return launch_pass<M, 32, 7>(launch, round);
  }
  if (spread.lanes == 8) return launch_pass<M, 8, 7>(launch, round);
  launch_pass<M, 32, 14>(launch, round);
}

int64_t solve_bytes(int64_t m) {
  return (products_of(m) + scratch_of(m) + rows_of(m)) * static_cast<int64_t>(sizeof(double));
}

std::tuple<Tensor, Tensor, Tensor> step(const Tensor& update, int64_t client, int64_t trained_row, int64_t now_row,
                                        int64_t next_row, Tensor models, Tensor history, Tensor gram, Tensor along,
                                        Tensor factors, Tensor status, Tensor pairs, Tensor oldest, Tensor seen,
                                        Tensor seen_factors, Tensor recorded, Tensor counts, Tensor arrived, double lr,
                                        double quantile, double max_norm, double trust, std::string rule, int64_t trim,
                                        bool filter, bool estimate, bool receive, bool store_all) {
  constexpr const char* op = "step_";
  const Check check(op, "models", models, /*two_byte_types=*/false);
  check.shape("models", models, "(rows, d)", {-1, -1});
  check.shape("history", history, "(d, n, 2m + 2)", {models.size(1), -1, -1});
  const int64_t n = history.size(1), m = history.size(2) / 2 - 1, d = models.size(1);
  if (m < 1 || m > 5) refuse(op, "history must hold 1 to 5 pairs, got ", m);
  const Spread spread = spread_of(n, m);
  check.state("models", models, ScalarType::Float, "(rows, d)", {models.size(0), d});
  check.state("history", history, ScalarType::Float, "(d, n, 2m + 2)", {d, n, 2 * m + 2});
  check.floats("update", update, "(d,)", {d});
  check.state("gram", gram, ScalarType::Double, "(n, m (2m + 1))", {n, m * (2 * m + 1)});
  check.state("along", along, ScalarType::Double, "(n, 2m + 2)", {n, 2 * m + 2});
  check.state("factors", factors, ScalarType::Float, "(n, 2m + 2)", {n, 2 * m + 2});
  check.state("status", status, ScalarType::Int, "(n,)", {n});
  check.state("pairs", pairs, ScalarType::Long, "(n,)", {n});
  check.state("oldest", oldest, ScalarType::Long, "(n,)", {n});
  check.state("seen", seen, ScalarType::Bool, "(n,)", {n});
  check.state("seen_factors", seen_factors, ScalarType::Double, "(room,)", {seen_factors.numel()});
  check.state("recorded", recorded, ScalarType::Long, "()", {});
  check.state("counts", counts, ScalarType::Long, "(5,)", {5});
  check.state("arrived", arrived, ScalarType::Int, "()", {});
  if (client < 0 || client >= n) refuse(op, "client must lie in 0..", n - 1, ", got ", client);
  for (const int64_t row : {trained_row, now_row, next_row}) {
    if (row < 0 || row >= models.size(0)) refuse(op, "rows must lie in 0..", models.size(0) - 1, ", got ", row);
  }
  if (next_row == now_row || next_row == trained_row) refuse(op, "next_row must be a row of its own, got ", next_row);

  const Launcher launch(models.get_device_index());
  const Tensor received = dense(update);
  const Tensor accepted = allocate(models, ScalarType::Bool, {}), factor = allocate(models, ScalarType::Double, {});
  const Tensor reason = allocate(models, ScalarType::Long, {});
  const int64_t wanted_blocks = (d + kRoundThreads - 1) / kRoundThreads;
  const int64_t judge_blocks = wanted_blocks < 1 ? 1 : wanted_blocks < kJudgeBlocks ? wanted_blocks : kJudgeBlocks;
  const int64_t groups = kRoundThreads / spread.lanes;
  const int64_t most = launch.multiprocessors() * (m <= 3 && spread.held <= 7 ? 2 : 1);
  const int64_t needed = (d + groups - 1) / groups;
  const int64_t pass_blocks = needed < 1 ? 1 : needed < most ? needed : most;
  const Tensor judged = allocate(models, ScalarType::Double, {kSums * judge_blocks});
  const Tensor changes = allocate(models, ScalarType::Double, {changes_of(n, m, pass_blocks)});
  const Tensor verdict = allocate(models, ScalarType::Byte, {static_cast<int64_t>(sizeof(Verdict))});

  float* rows = mutable_data<float>(models);
  Round round{lr,
              quantile,
              max_norm,
              trust,
              Rule::kMedian,
              trim,
              filter,
              estimate,
              receive,
              store_all,
              data<float>(received),
              client,
              rows + trained_row * d,
              rows + now_row * d,
              rows + next_row * d,
              n,
              m,
              d,
              seen_factors.numel(),
              mutable_data<float>(history),
              mutable_data<double>(gram),
              mutable_data<double>(along),
              mutable_data<float>(factors),
              mutable_data<Status>(status),
              mutable_data<int64_t>(pairs),
              mutable_data<int64_t>(oldest),
              mutable_data<bool>(seen),
              mutable_data<double>(seen_factors),
              mutable_data<int64_t>(recorded),
              mutable_data<int64_t>(counts),
              mutable_data<bool>(accepted),
              mutable_data<double>(factor),
              mutable_data<Reason>(reason),
              mutable_data<Verdict>(verdict),
              mutable_data<unsigned>(arrived),
              mutable_data<double>(judged),
              mutable_data<double>(changes),
              pass_blocks};
  round.rule = rule_named(op, rule);
  launch(judge_kernel, judge_blocks, kRoundThreads, 0, round);
  switch (m) {
    case 1: launch_pass<1>(launch, round, spread); break;
    case 2: launch_pass<2>(launch, round, spread); break;
    case 3: launch_pass<3>(launch, round, spread); break;
    case 4: launch_pass<4>(launch, round, spread); break;
    default: launch_pass<5>(launch, round, spread);
  }
  launch(solve_kernel, n, 32, solve_bytes(m), round);
  return {accepted, factor, reason};
}

// Factors from products alone, for a state that was put together elsewhere.
void refresh(const Tensor& gram, const Tensor& along, Tensor factors, Tensor status, const Tensor& pairs,
             const Tensor& oldest, const Tensor& seen, double trust) {
  const Launcher launch(gram.get_device_index());
  const int64_t n = pairs.size(0), m = along.size(1) / 2 - 1;
  launch(refresh_kernel, n, 32, solve_bytes(m),
         Products{n, m, mutable_data<double>(gram), mutable_data<double>(along), mutable_data<float>(factors),
                  mutable_data<Status>(status), data<int64_t>(pairs), data<int64_t>(oldest), data<bool>(seen), trust});
}

}  // namespace
}  // namespace secureafl::cuda

STABLE_TORCH_LIBRARY_IMPL(secureafl, CUDA, m) {
  m.impl("step_", TORCH_BOX(&secureafl::cuda::step));
  m.impl("refresh_", TORCH_BOX(&secureafl::cuda::refresh));
}
