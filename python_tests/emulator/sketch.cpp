#include <vector>

#include "arguments.h"
#include "row_wise/sketch/sketch_step.cuh"

// `sketch_step_` on a CPU: runs the kernels of csrc/row_wise/sketch/sketch_step.cuh, block after block.

using namespace secureafl;

extern "C" void sketch_step(void** at, const int64_t* whole, const double* real, unsigned seed) {
  Reader tensor{at};
  SketchRound r{};
  double* shift;
  int32_t* places;
  tensor(r.update), tensor(r.client), tensor(r.trained_on), tensor(r.model), tensor(r.next_model);
  tensor(places), tensor(r.update_sketches), tensor(r.model_sketches), tensor(r.seen), tensor(r.means);
  tensor(r.squares), tensor(r.met), tensor(r.total), tensor(r.noise), tensor(r.norms), tensor(shift);
  tensor(r.presence.clock), tensor(r.presence.last_epoch), tensor(r.presence.uploads);
  tensor(r.seen_factors), tensor(r.recorded), tensor(r.factor_counts), tensor(r.counts);
  tensor(r.accepted), tensor(r.factor), tensor(r.reason), tensor(r.weight);
  r.places = places, r.shift = shift;
  r.n = whole[0], r.k = whole[1], r.d = whole[2], r.rows = (r.d + r.k - 1) / r.k;
  r.lists = whole[3], r.room = whole[4];
  r.filter = whole[5], r.receive = whole[6], r.store_all = whole[7], r.hold = whole[8];
  r.presence.expiry = whole[9], r.presence.probation = whole[10], r.presence.free = kFreeAlone;
  r.quorum = whole[11], r.span = static_cast<double>(whole[12]);
  r.lr = real[0], r.quantile = real[1], r.max_norm = real[2], r.least_share = real[3];
  r.steps = whole[13];
  const auto plan = cuda::SketchPlan::of(r.rows, r.k);
  std::vector<double> memory(cuda::SketchScratch::doubles(r, plan), std::nan(""));
  const cuda::Launcher launch(seed);
  cuda::launch_sketch_step(launch, r, plan, memory.data());
}
