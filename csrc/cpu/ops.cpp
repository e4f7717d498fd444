#include <torch/csrc/stable/library.h>

#include "../front.h"
#include "../kin.h"
#include "../math/norm.h"
#include "../step.h"
#include "columns.h"
#include "kin.h"
#include "products.h"
#include "round.h"

// Loops over memory on torch's own threads. What a thread sums does not depend on how many threads there are,
// so a result does not either.

namespace secureafl {
namespace cpu {

// |a - b|^2 over d.
template <typename T>
double squared_distance(const T* a, const T* b, int64_t d) {
  constexpr int64_t kChunk = 4096;
  std::vector<double> sums(static_cast<size_t>((d + kChunk - 1) / kChunk));
  torch::stable::parallel_for(0, static_cast<int64_t>(sums.size()), 16, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      double sum = 0;
      for (int64_t c = chunk * kChunk; c < std::min(d, (chunk + 1) * kChunk); ++c) {
        sum += squared_difference(a[c], b[c]);
      }
      sums[chunk] = sum;
    }
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace cpu

struct Cpu {
  static constexpr bool kHostReads = true;

  explicit Cpu(const Tensor&) {}

  template <typename Rows, typename out_t>
  void reduce_columns(const Rows& rows, Rule rule, int64_t trim, out_t* out) const {
    cpu::reduce_columns(rows, rule, trim, out);
  }

  template <typename T>
  void factor(const T* g, const T* last_g, const T* w, const T* last_w, int64_t d, double* out, const Tensor&) const {
    *out = lipschitz_factor(cpu::squared_distance(g, last_g, d), cpu::squared_distance(w, last_w, d));
  }

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

  static int64_t columns(const char* op, int64_t n, int64_t m) {
    if (n < 1 || n > kMostClients || m < 1 || m > kMaxPairs) {
      refuse(op, "slots must hold 1 to ", kMostClients, " clients and 1 to ", kMaxPairs, " pairs of each, got ", n,
             " and ", m);
    }
    return kCpuColumns;
  }

  bool fits(int64_t, int64_t, bool, std::optional<int64_t>) const { return true; }

  void step(const Round& r, const Tensor&) const { cpu::step(r); }

  void update_sums(const Round& r, double* out, const Tensor&) const {
    const std::vector<double> sums = cpu::update_sums(r);
    std::copy(sums.begin(), sums.end(), out);
  }

  void apply(const Round& r, const double* sums, Verdict* verdict, double* changes, const Tensor&) const {
    *verdict = cpu::judge_update(r, sums);
    const std::vector<double> found = cpu::apply(r, *verdict);
    std::copy(found.begin(), found.end(), changes);
  }

  void renew(const Round& r, const Verdict* verdict, const double* changes) const { cpu::renew(r, *verdict, changes); }

  void refresh(const Round& r) const { cpu::refresh(r); }

  void kin_step(const Kin& r, const Tensor&) const { cpu::kin_step(r); }
};

}  // namespace secureafl

SECUREAFL_REGISTER(Cpu, CPU)
SECUREAFL_REGISTER_STEP(Cpu, CPU)
SECUREAFL_REGISTER_KIN(Cpu, CPU)
