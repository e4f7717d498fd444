#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "round/round.h"

// A round of a row-wise rule without corrections: the rows are the last updates of the clients (reasons:
// secureafl_ext/rules/kinship.py, support.py, row_rules.py). Three steps that both devices share:
//   sums     over d: products of the update with every last update, and the sums of the judge
//   choose   on n and n x n numbers: the verdict, the updated mean similarities, the chosen clients, their weights
//   step     over d: the weighted sum of the chosen rows, or the update alone; the next model, the client's new row

namespace secureafl {

// Most clients of a row-wise round: its tables are (n, n).
constexpr int64_t kMaxRowClients = 1024;

}  // namespace secureafl

namespace secureafl::SECUREAFL_KIND {

// The constants of secureafl_ext/rules/kinship.py, in the same order.
struct Bounds {
  double span, known, kin, crowd, turned, least, least_sum, least_apart, near;
};

struct KinRound : Round {
  Bounds bounds;
  int64_t compared;     // last updates that the update is multiplied by: n, or 0 if the rule does not need it
  float* last_updates;  // (n, d); null: last updates and models are not kept, and updates have no factors
  float* last_models;   // (n, d)
  double* products;     // (n, n): inner products of the last updates
  double* means;        // (n, n): running means of the products of clipped updates, in units of (median norm)^2
  int64_t* met;         // (n): number of updates that entered the means
  double* mean_center;  // (n): the center of the mean updates, as their weights in it (state `centre`); kinship alone
  bool centered;        // `center` is used: rule "centered_clip" alone
  float* center;        // (d): the center of centered_clip, the last aggregate
  const double* shift;  // (n): of each client's weight from 1 / count; support alone, null for kinship
  bool alone;           // the model steps along the update alone, times its weight and the number of kept clients
  int64_t quorum;       // the model takes no step while fewer clients have a row
  double* weight;       // (): result, the weight of the update before it is clipped to the median norm
  int64_t* rounds;      // ()
  unsigned* barrier;    // (): barrier counter of a later refresh on a GPU, set to zero by kernel 2; or null

  // Number of sums over d: the update times each last update, then the sums of the judge. With a center also the
  // center times each last update, times the update and times itself.
  SECUREAFL_BOTH int64_t sums() const { return compared + kSums + (centered ? n + 2 : 0); }
};

// Result of `choose`: rows and weights (n); the first `count` are used.
struct Choice {
  Verdict verdict;
  int32_t count;
  float own_weight;     // of the update
  float center_weight;  // of the center; only with a center
  bool any;             // whether a row takes part; only with a center
  double mean_share;    // share of the update in the mean of its client; only with averages of steps
  double mean_length;   // norm that the update is divided by in this mean; only with averages of steps
  int32_t* rows;
  float* weights;
};

// True if a client has enough recorded similarities to be judged.
SECUREAFL_FN bool is_known(const KinRound& r, int64_t k) { return static_cast<double>(r.met[k]) >= r.bounds.known; }

// Adds one coordinate to the sums of the judge: update g, the model w it was computed on, and the last ones of the
// client. In float64: the difference of two floats may overflow a float.
// Sums: double[kSums], or like it
template <typename Sums>
SECUREAFL_FN void add_to_judge(double g, double w, double last_g, double last_w, Sums& sums) {
  const double s = w - last_w, y = g - last_g;
  sums[kNonFinite] += !isfinite(g);
  sums[kGG] += g * g;
  sums[kYY] += y * y;
  sums[kSS] += s * s;
  sums[kSY] += s * y;
}

// The update as it is used and stored.
SECUREAFL_FN float clipped(const Verdict& v, float g) { return g * v.clip; }

// A coordinate of the mean of a client's updates after this one. g: clipped
SECUREAFL_FN float averaged(const Choice& choice, double mean, double g) {
  return static_cast<float>(mean + choice.mean_share * (g / choice.mean_length - mean));
}

}  // namespace secureafl::SECUREAFL_KIND
