#include <torch/csrc/stable/library.h>

// Arguments that `step_` and `apply_` share.
#define SECUREAFL_ROUND                                                                                           \
  "Tensor update, Tensor client, Tensor trained_on, int now_row, int next_row, Tensor(a!) models, "               \
  "Tensor(b!) slots, Tensor(c!) last, Tensor(d!) scales, Tensor(e!) gram, Tensor(f!) along, Tensor(g!) factors, " \
  "Tensor(h!) status, Tensor(i!) pairs, Tensor(j!) oldest, Tensor(k!) seen, Tensor(l!) clock, "                   \
  "Tensor(m!) last_epoch, Tensor(n!) uploads, Tensor(o!) seen_factors, Tensor(p!) recorded, "                     \
  "Tensor(q!) factor_counts, Tensor(r!) counts, Tensor(s!) arrived, float lr, float quantile, float max_norm, "   \
  "float trust, str rule, int trim, bool filter, bool estimate, bool receive, bool store_all, bool hold, "        \
  "int expiry, int probation"

// All schemas of the namespace secureafl. The comment above a schema names the file of its kernel; ops_cpu.cpp and
// ops_cuda.cu of the same folder register the kernels. Fake kernels and docstrings: secureafl_ext/ops.py.
STABLE_TORCH_LIBRARY(secureafl, m) {
  // coordinate_wise/in_registers.cuh, coordinate_wise/columns_cpu.h
  m.def("median(Tensor updates, Tensor? mask=None) -> Tensor");
  // coordinate_wise/in_registers.cuh, coordinate_wise/columns_cpu.h
  m.def("trimmed_mean(Tensor updates, int trim, Tensor? mask=None) -> Tensor");
  // lipschitz/lipschitz.cuh
  m.def("lipschitz(Tensor update, Tensor last_update, Tensor model, Tensor last_model) -> Tensor");
  // lbfgs/products.cuh, lbfgs/estimate.cuh
  m.def(
      "estimate(Tensor model, Tensor last_updates, Tensor last_models, Tensor dw, Tensor dg, Tensor pairs, "
      "float trust=1.0) -> Tensor");
  // lbfgs/products.cuh, then the rule over lbfgs/aggregate.h: coordinate_wise/columns.cuh
  m.def(
      "aggregate(Tensor model, Tensor update, int client, Tensor accepted, Tensor last_updates, "
      "Tensor last_models, Tensor dw, Tensor dg, Tensor pairs, Tensor seen, float trust=1.0, "
      "str rule=\"median\", int trim=0) -> Tensor");
  m.def(
      "aggregate_status(Tensor model, Tensor update, int client, Tensor accepted, Tensor last_updates, "
      "Tensor last_models, Tensor dw, Tensor dg, Tensor pairs, Tensor seen, float trust=1.0, "
      "str rule=\"median\", int trim=0) -> (Tensor, Tensor)");
  // round/begin.cuh, round/pass.cuh, without pairs round/judge.cuh, round/pass_last.cuh; round/step_cpu.h
  m.def("step_(Tensor(t!) verdict, Tensor(u!) changes, " SECUREAFL_ROUND ") -> (Tensor, Tensor, Tensor)");
  m.def("round_fits(Tensor like, int clients, int pairs, bool half, int? shared_bytes=None) -> bool");
  // round/sharded.cu
  m.def("update_sums(Tensor update, Tensor client, Tensor trained_on, Tensor last) -> Tensor");
  m.def("apply_(Tensor sums, Tensor(t!) verdict, Tensor(u!) changes, " SECUREAFL_ROUND ") -> (Tensor, Tensor, Tensor)");
  m.def(
      "renew_(Tensor verdict, Tensor changes, Tensor scales, Tensor(a!) gram, Tensor(b!) along, Tensor(c!) factors, "
      "Tensor(d!) status, Tensor pairs, Tensor oldest, Tensor(e!) seen, float trust) -> ()");
  // round/settle.cuh
  m.def("pass_blocks(Tensor like, int clients, int pairs, bool half, int tiles) -> int");
  m.def(
      "settle_(Tensor(a!) verdict, Tensor changes, Tensor scales, Tensor(b!) gram, Tensor(c!) along, "
      "Tensor(d!) factors, Tensor(e!) status, Tensor pairs, Tensor oldest, Tensor(f!) seen, float trust) -> ()");
  m.def(
      "refresh_(Tensor scales, Tensor gram, Tensor along, Tensor(a!) factors, Tensor(b!) status, Tensor pairs, "
      "Tensor oldest, Tensor seen, float trust) -> ()");
  // row_wise/kinship/kin_step.cuh, row_wise/kinship/kin_step_cpu.h
  m.def(
      "kin_step_(Tensor update, Tensor client, Tensor trained_on, int now_row, int next_row, Tensor(a!) models, "
      "Tensor(b!) last_updates, Tensor(c!) last_models, Tensor(d!) seen, Tensor(e!) products, Tensor(f!) kinship, "
      "Tensor(g!) met, Tensor(h!) centre, Tensor(i!) rounds, Tensor(j!) clock, Tensor(k!) last_epoch, "
      "Tensor(l!) uploads, Tensor(m!) seen_factors, Tensor(n!) recorded, Tensor(o!) factor_counts, "
      "Tensor(p!) counts, float lr, float quantile, float max_norm, bool filter, bool receive, bool store_all, "
      "bool hold, int expiry, int probation, bool alone, int quorum, int span, int known, float kin, float crowd, "
      "float turned, float least, float least_sum, float least_apart, float near) -> (Tensor, Tensor, Tensor, Tensor)");
  // row_wise/support/refresh.cuh, row_wise/support/refresh.h; the round itself as kin_step_
  m.def(
      "support_step_(Tensor update, Tensor client, Tensor trained_on, int now_row, int next_row, Tensor(a!) models, "
      "Tensor(b!) last_updates, Tensor(c!) last_models, Tensor(d!) seen, Tensor(e!) products, Tensor(f!) similarity, "
      "Tensor(g!) met, Tensor(h!) basis, Tensor(i!) shift, Tensor(j!) rounds, Tensor(k!) clock, "
      "Tensor(l!) last_epoch, Tensor(m!) uploads, Tensor(n!) seen_factors, Tensor(o!) recorded, "
      "Tensor(p!) factor_counts, Tensor(q!) counts, float lr, float quantile, float max_norm, bool filter, "
      "bool receive, bool store_all, bool hold, int expiry, int probation, bool alone, int quorum, int span, "
      "int every, float cut, float crowd, float crowd_least, float odd, float odd_least, float kin, "
      "float short_square, float few_kin, float short_level, float fade, float again, float most, float group, "
      "float group_spreads, float group_least, float group_end, float group_left, float opposed, float opposed_end, "
      "float fill, float apart, float apart_end) -> (Tensor, Tensor, Tensor, Tensor)");
  // row_wise/mean_steps/mean_steps.cuh, row_wise/mean_steps/mean_steps_cpu.h; the round itself as kin_step_
  m.def(
      "mean_step_(Tensor update, Tensor client, Tensor trained_on, int now_row, int next_row, Tensor(a!) models, "
      "Tensor(b!) last_updates, Tensor(c!) last_models, Tensor(d!) seen, Tensor(e!) means, Tensor(f!) total, "
      "Tensor(g!) noise, Tensor(h!) norms, Tensor(i!) basis, Tensor(j!) shift, Tensor(k!) rounds, Tensor(l!) clock, "
      "Tensor(m!) last_epoch, Tensor(n!) uploads, Tensor(o!) seen_factors, Tensor(p!) recorded, "
      "Tensor(q!) factor_counts, Tensor(r!) counts, float lr, float quantile, float max_norm, bool filter, "
      "bool receive, bool store_all, bool hold, int expiry, int probation, int quorum, int span, float least_share, "
      "float noisy, int every, float cut, float crowd, float crowd_least, float odd, float odd_least, float kin, "
      "float short_square, float few_kin, float short_level, float fade, float again, float most, float group, "
      "float group_spreads, float group_least, float group_end, float group_left, float opposed, float opposed_end, "
      "float fill, float apart, float apart_end) -> (Tensor, Tensor, Tensor, Tensor)");
  // row_wise/row_rules/weights.h; the round itself as kin_step_
  m.def(
      "row_step_(Tensor update, Tensor client, Tensor trained_on, int now_row, int next_row, Tensor(a!) models, "
      "Tensor(b!) last_updates, Tensor(c!) last_models, Tensor(d!) seen, Tensor(e!) products, Tensor(f!) centre, "
      "Tensor(g!) rounds, Tensor(h!) clock, Tensor(i!) last_epoch, Tensor(j!) uploads, Tensor(k!) seen_factors, "
      "Tensor(l!) recorded, Tensor(m!) factor_counts, Tensor(n!) counts, float lr, float quantile, float max_norm, "
      "bool filter, bool receive, bool store_all, bool hold, int expiry, int probation, bool alone, int quorum, "
      "str rule, float remove, float radius, int iterations) -> (Tensor, Tensor, Tensor, Tensor)");
  // row_wise/sketch/sketch_step.cuh, row_wise/sketch/sketch_step_cpu.h
  m.def(
      "sketch_step_(Tensor update, Tensor client, Tensor trained_on, int now_row, int next_row, Tensor(a!) models, "
      "Tensor places, Tensor(b!) update_sketches, Tensor(c!) model_sketches, Tensor(d!) seen, "
      "Tensor(e!) means, Tensor(f!) squares, Tensor(g!) met, Tensor(h!) total, Tensor(i!) noise, Tensor(j!) norms, "
      "Tensor shift, Tensor(k!) clock, Tensor(l!) last_epoch, Tensor(m!) uploads, Tensor(n!) seen_factors, "
      "Tensor(o!) recorded, Tensor(p!) factor_counts, Tensor(q!) counts, float lr, float quantile, float max_norm, "
      "bool filter, bool receive, bool store_all, bool hold, int expiry, int probation, int quorum, int span, "
      "float least_share) -> (Tensor, Tensor, Tensor, Tensor)");
}
