#pragma once

#include <float.h>
#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "round/judge.h"
#include "round/round.h"

// A round of rule "support" on sketches: k numbers of each client's update and model in place of all d (reasons:
// secureafl_ext/engines/sketch.py, rules/sketched_support.py). Three steps that both devices share:
//   sums     over d: the sketches of the update and of the model it was computed on, the square of the update
//   choose   on n and k numbers: the verdict, the median norm, the weight of the update, the client's new sketches
//   step     over d: the next model, along the update alone

namespace secureafl::SECUREAFL_KIND {

constexpr int32_t kNoCoordinate = INT32_MIN;              // of a place
constexpr int64_t kMaxSketched = (1 << kCensusBits) - 1;  // clients that a census can count

struct SketchRound : Round {
  int64_t k, rows;         // numbers of a sketch, coordinates in each
  const int32_t* places;   // (rows, k): of each place its coordinate c if it is added, -1 - c if it is subtracted
  float* update_sketches;  // (n, k): of the last updates; null: they are not kept, and updates have no factors
  float* model_sketches;   // (n, k): of the models they were computed on, or null
  float* means;            // (n, k): mean sketch of each client's updates, clipped to the median norm, in units of it
  bool steps;              // averages of steps (reasons: rules/mean_steps.py), else of uploads
  // averages of uploads alone
  double* squares;  // (n): mean inner product of consecutive updates of a client
  int64_t* met;     // (n): uploads of each client but its first
  // averages of steps alone
  double* total;       // (n): sum of the shares of the updates in the mean
  double* noise;       // (n): sum of the squared weights of the updates in the mean
  double least_share;  // of an update that does not move the model
  // both
  double* norms;        // (n): of the last updates
  const double* shift;  // (n): of each client's weight from 1 / count
  double span;          // uploads or full steps that a mean is over
  int64_t quorum;       // the model takes no step while fewer clients have a row
  double* weight;       // (): result, the weight of the update before it is clipped to the median norm
};

// Sums over the coordinates of a bucket.
enum BucketSum { kOfUpdate, kOfModel, kOfSquare, kBucketSums };

SECUREAFL_FN void add_place(const SketchRound& r, int64_t place, double (&sums)[kBucketSums]) {
  const int32_t at = r.places[place];
  const int64_t c = clamped(at < 0 ? -1 - at : at, 0, r.d - 1);
  const double sign = at == kNoCoordinate ? 0 : at < 0 ? -1 : 1, g = sign * r.update[c];  // no branch before a load
  sums[kOfUpdate] += g;
  if (r.model_sketches) sums[kOfModel] += sign * r.trained_on[c];
  sums[kOfSquare] += g * g;
}

// One number of a sketch. It stays finite if the coordinates are; NaN stays NaN.
SECUREAFL_FN float sketched(double sum) {
  return sum > FLT_MAX ? FLT_MAX : sum < -FLT_MAX ? -FLT_MAX : static_cast<float>(sum);
}

// Writes bucket b of sketches (2, k), those of the update and of its model, and adds it to the sums of the judge.
SECUREAFL_FN void finish_bucket(const SketchRound& r, int64_t client, int64_t b, const double (&of)[kBucketSums],
                                float* sketches, double (&judged)[kSums]) {
  const float g = sketches[b] = sketched(of[kOfUpdate]), w = sketches[r.k + b] = sketched(of[kOfModel]);
  judged[kGG] += of[kOfSquare];
  if (!r.update_sketches) return;
  const double y = static_cast<double>(g) - r.update_sketches[client * r.k + b];
  const double s = static_cast<double>(w) - r.model_sketches[client * r.k + b];
  judged[kYY] += y * y;
  judged[kSS] += s * s;
}

// Squares of floats do not overflow a double: their sum is finite if all coordinates are.
SECUREAFL_FN double non_finite(const double (&judged)[kSums]) { return !isfinite(judged[kGG]); }

// Result of `choose_step`.
struct SketchStep {
  Verdict verdict;
  float scale;   // of the update
  double moved;  // how far the model moves along it, in full steps
};

// Next value of coordinate c.
SECUREAFL_FN float next_value(const SketchRound& r, const SketchStep& step, int64_t c) {
  return stepped(step.verdict, r.model[c], step.verdict.received ? r.update[c] * step.scale : 0.0f);
}

}  // namespace secureafl::SECUREAFL_KIND
