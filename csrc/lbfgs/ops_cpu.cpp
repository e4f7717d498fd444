#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "common/team.h"
#include "coordinate_wise/columns_cpu.h"
#include "lbfgs/ops_impl.h"
#include "lbfgs/products_cpu.h"

namespace secureafl {

struct CpuLbfgs {
  static constexpr bool kHostReads = true;

  explicit CpuLbfgs(const Tensor&) {}

  template <typename T>
  void solve_all(const History<T>& h, const Wanted& wanted, double trust, double* factors, Status* status,
                 const Tensor&) const {
    torch::stable::parallel_for(0, h.n, 1, [&](int64_t begin, int64_t end) {
      std::vector<double> gram(static_cast<size_t>(products_of(h.m)));
      std::vector<double> scratch(static_cast<size_t>(scratch_of(h.m)));
      for (int64_t k = begin; k < end; ++k) {
        status[k] = Status::kAbsent;
        if (!wanted(k)) continue;
        const int64_t pairs = h.pairs_of(k);
        if (pairs > 0) cpu::inner_products(h, k, pairs, gram.data());
        status[k] =
            coefficients(Solo(), gram.data(), pairs, trust, kWideRounding, scratch.data(), factors + k * rows_of(h.m));
      }
    });
  }

  template <typename T>
  void write_estimates(const History<T>& h, const Corrections& corrections, T* out) const {
    torch::stable::parallel_for(0, h.n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        T* row = out + k * h.d;  // (d)
        T run[64];
        int64_t c = 0;
        for (; c + 64 <= h.d; c += 64) {
          estimate_run(h, corrections, k, c, run);
          std::copy(run, run + 64, row + c);
        }
        for (; c < h.d; ++c) row[c] = estimate_at(h, corrections, k, c);
      }
    });
  }

  template <typename Rows, typename out_t>
  void reduce_columns(const Rows& rows, Rule rule, int64_t trim, out_t* out) const {
    cpu::reduce_columns(rows, rule, trim, out);
  }
};

}  // namespace secureafl

SECUREAFL_REGISTER_LBFGS(CpuLbfgs, CPU)
