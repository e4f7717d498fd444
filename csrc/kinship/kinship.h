#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "round/round.h"

// A whole round of the rule "kinship" without corrections, where the clients' last updates are the rows
// (secureafl_ext/kinship.py and rowwise.py say why), in three steps that both devices share:
//   sums     over d: the update with every last update, and what the judge needs
//   choose   on n and n x n numbers: the verdict, the averages brought up to date, who is kept with which weight
//   step     over d: the weighted sum of the kept rows, the next model, the client's new row

namespace secureafl::SECUREAFL_KIND {

// The constants of secureafl_ext/kinship.py, in their order.
struct Bounds {
  double span, known, kin, crowd, turned, least, least_sum, least_apart, near;
};

struct KinRound : Round {
  Bounds bounds;
  float* last_updates;  // (n, d)
  float* last_models;   // (n, d)
  double* products;     // (n, n): inner products of the last updates
  double* means;        // (n, n): the averages
  int64_t* met;         // (n)
  double* centre;       // (n): weights
  int64_t* rounds;      // ()

  // Sums over d: the update with each client's last, then the judge's.
  SECUREAFL_BOTH int64_t sums() const { return n + kSums; }
};

// What `choose` leaves for the step: rows and weights (n), the first `count` of them filled.
struct Choice {
  Verdict verdict;
  int32_t count;
  float own_weight;  // of the update
  int32_t* rows;
  float* weights;
};

// Whether a client has met the others often enough to be judged.
SECUREAFL_FN bool is_known(const KinRound& r, int64_t k) { return static_cast<double>(r.met[k]) >= r.bounds.known; }

// The sums that the judge needs, of one coordinate: of update g, the model w that it was computed on and the client's
// last ones. In float64 throughout: the difference of two floats may be too large for one.
SECUREAFL_FN void add_to_judge(double g, double w, double last_g, double last_w, double (&sums)[kSums]) {
  const double s = w - last_w, y = g - last_g;
  sums[kNonFinite] += !isfinite(g);
  sums[kGG] += g * g;
  sums[kYY] += y * y;
  sums[kSS] += s * s;
  sums[kSY] += s * y;
}

// A coordinate of the update as it takes part and is stored.
SECUREAFL_FN float clipped(const Verdict& v, float g) { return g * v.clip; }

}  // namespace secureafl::SECUREAFL_KIND
