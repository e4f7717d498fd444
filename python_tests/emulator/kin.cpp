#include <type_traits>

#include "kinship/kin_step.cuh"

// `kin_step_` on a CPU: runs the kernels of csrc/kinship/kin_step.cuh, block after block.

using namespace secureafl;

template <int kVector>
static void run(const KinRound& r, unsigned seed) {
  const auto plan = cuda::KinPlan::of(r.n, r.d);
  const int64_t warps = plan.groups * plan.chunks, columns = 32 * kVector, each = cuda::kSumThreads / 32;
  std::vector<double> parts(r.sums() * plan.chunks, std::nan(""));
  std::vector<int32_t> rows(r.n);
  std::vector<float> weights(r.n);
  Choice choice;
  emulator::launch((warps + each - 1) / each, cuda::kSumThreads, 0, seed,
                   [&] { cuda::kin_sums_kernel<kVector>(r, plan, parts.data()); });
  emulator::launch(1, cuda::BlockTeam::kSize, cuda::choose_bytes(r) / sizeof(float), seed, [&] {
    cuda::kin_choose_kernel(r, plan.chunks, parts.data(), &choice, rows.data(), weights.data());
  });
  emulator::launch((r.d + columns - 1) / columns, cuda::kStepThreads, 0, seed,
                   [&] { cuda::kin_step_kernel<kVector>(r, &choice); });
}

// Tensors and numbers in the order of the arguments of the op. models: the current row and the next one. Then the
// results.
extern "C" void kin_step(void** at, const int64_t* whole, const double* real, unsigned seed) {
  const auto tensor = [&](auto*& field) { field = static_cast<std::remove_reference_t<decltype(field)>>(*at++); };
  KinRound r{};
  tensor(r.update), tensor(r.client), tensor(r.trained_on), tensor(r.model), tensor(r.next_model);
  tensor(r.last_updates), tensor(r.last_models), tensor(r.seen), tensor(r.products), tensor(r.means), tensor(r.met);
  tensor(r.centre), tensor(r.rounds), tensor(r.presence.clock);
  tensor(r.presence.last_epoch), tensor(r.presence.uploads), tensor(r.seen_factors), tensor(r.recorded), tensor(r.counts);
  tensor(r.accepted), tensor(r.factor), tensor(r.reason);
  r.n = whole[0], r.d = whole[1], r.lists = whole[2], r.room = whole[3];
  r.filter = whole[4], r.receive = whole[5], r.store_all = whole[6], r.hold = whole[7];
  r.presence.expiry = whole[8], r.presence.probation = whole[9];
  r.lr = real[0], r.quantile = real[1], r.max_norm = real[2];
  std::memcpy(&r.bounds, real + 3, sizeof(r.bounds));
  r.d % 4 == 0 ? run<4>(r, seed) : run<1>(r, seed);
}
