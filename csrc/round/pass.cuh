#pragma once

#include <cuda_fp16.h>

#include "common/launch.cuh"
#include "common/loads.cuh"
#include "coordinate_wise/select.cuh"
#include "round/begin.cuh"
#include "round/judge.h"
#include "round/launches.h"
#include "round/members.cuh"
#include "round/pass_shape.cuh"
#include "round/round.h"
#include "round/tile_pipeline.cuh"

namespace secureafl::cuda {

__device__ inline void store(float* to, float value) { *to = value; }
__device__ inline void store(__half* to, float value) { *to = __float2half_rn(value); }

// Loads a row of kSize floats, with the widest loads that its alignment allows.
template <int kSize>
__device__ inline void load_row(const float* row, float (&out)[kSize]) {
  constexpr int kWide = kSize % 4 == 0 ? 4 : 2;
#pragma unroll
  for (int j = 0; j < kSize; j += kWide) {
    float piece[kWide];
    load_columns(row + j, piece);
#pragma unroll
    for (int i = 0; i < kWide; ++i) out[j + i] = piece[i];
  }
}

// Hides the origin of a value from the compiler. Otherwise it computes all comparisons with the value before the loop
// and unpacks them from a register, which takes more instructions than comparing again.
__device__ inline int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The values of one coordinate in this round.
struct ModelValues {
  float model, update, trained_on, previous;
};

// The sums of a thread over the tiles of its team.
template <typename P>
struct ThreadSums {
  const float (&slots)[P::kSlotSums];  // the step times rows rank, rank + kThreads, .. of the slots
  const float (&x)[P::kXSums];         // the step times these rows of x
  double own_x, own_s, own_y;          // row `rank` of the client, if it is new, times its x, s and y
  double step_square;
};

// Adds up the sums of the teams of a block, in order: they have processed different coordinates of the same rows.
//   memory: (teams, owned) doubles, then (teams, rows) floats   changes (PassSums::count, blocks)
template <typename P>
__device__ __forceinline__ void store_changes(const ThreadSums<P>& sums, int n, int planes, char* memory,
                                              double* changes) {
  constexpr int kThreads = P::kThreads;
  const int team = threadIdx.x / kThreads, teams = blockDim.x / kThreads, rank = threadIdx.x % kThreads;
  const PassSums at{n, planes / 2};
  const int rows = static_cast<int>(at.own_x(0)), count = static_cast<int>(at.count()), owned = count - rows;
  double* own = reinterpret_cast<double*>(memory);                // (teams, owned)
  float* staged = reinterpret_cast<float*>(own + teams * owned);  // (teams, rows)
#pragma unroll
  for (int q = 0; q < P::kSlotSums; ++q) {
    const int row = rank + q * kThreads;
    if (row < planes * n) staged[team * rows + row] = sums.slots[q];
  }
#pragma unroll
  for (int q = 0; q < P::kXSums; ++q) {
    const int k = rank + q * kThreads;
    if (k < n) staged[team * rows + planes * n + k] = sums.x[q];
  }
  if (rank <= planes) own[team * owned + rank] = sums.own_x;
  if (rank < planes) {
    own[team * owned + planes + 1 + rank] = sums.own_s;
    own[team * owned + 2 * planes + 1 + rank] = sums.own_y;
  }
  double step_square = sums.step_square;
#pragma unroll
  for (int distance = 1; distance < P::kColumns; distance *= 2) {
    step_square += __shfl_xor_sync(~0u, step_square, distance);
  }
  if (rank == 0) own[team * owned + owned - 1] = step_square;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    double sum = 0;
    for (int t = 0; t < teams; ++t) sum += i < rows ? staged[t * rows + i] : own[t * owned + i - rows];
    changes[i * static_cast<int64_t>(gridDim.x) + blockIdx.x] = sum;
  }
}

// A whole round with pairs (`step_`); of `apply_`, where the verdict is given, the pass alone. Each team processes its
// tiles; with two buffers the next tile is copied meanwhile. The copies of the first ones start before the verdict.
template <typename P>
__global__ void __launch_bounds__(P::kMaxThreads, P::kBlocksPerSm) round_kernel(Round r, Scratch scratch) {
  using S = typename P::Stored;
  constexpr int kThreads = P::kThreads, kColumns = P::kColumns, kItems = P::kItems, kLanes = P::kLanes;
  constexpr int kPlanes = P::kPlanes, kFactors = P::kFactors, kBuffers = P::kBuffers;
  constexpr int kSharedFactors = P::kSharedFactors;
  SECUREAFL_SHARED(char, shared);
  const int n = static_cast<int>(r.n), tiles = static_cast<int>(r.tiles);
  const int planes = P::kAnyPairs ? 2 * static_cast<int>(r.m) : kPlanes, pairs = planes / 2;
  const int team = threadIdx.x / kThreads, teams = blockDim.x / kThreads, rank = threadIdx.x % kThreads;
  const int lane = rank / kColumns, column = rank % kColumns, plane = n * kColumns;
  float* factors = reinterpret_cast<float*>(shared);  // (kClients, kSharedFactors), or (planes + 1, kClients)
  uint32_t* members = reinterpret_cast<uint32_t*>(shared + P::kFirstBytes);        // (kClients / 32)
  uint32_t* exchange = members + P::kMemberBytes / 4;                              // (2, warps)
  auto* barriers = reinterpret_cast<uint64_t*>(exchange + P::kExchangeBytes / 4);  // (teams, kBuffers)
  char* stages = shared + P::kHeaderBytes;                                         // (teams, kBuffers, stage)
  const int slot_bytes = Stage<P>::slot_bytes(n, planes), last_bytes = Stage<P>::last_bytes(n);
  const int stage_bytes = opaque(Stage<P>::bytes(n, planes)), first_stage = opaque(team * kBuffers * stage_bytes);
  const auto stage_at = [&](int buffer) { return Stage<P>(stages + first_stage + buffer * stage_bytes, n, planes); };

  const TilePipeline<kThreads, kBuffers> pipeline(barriers + kBuffers * team, rank);
  __syncthreads();
  const int stride = gridDim.x * teams;
  const auto tile_at = [&](int i) { return static_cast<int64_t>(r.backwards ? tiles - 1 - i : i); };
  const auto fetch = [&](int i, int buffer) {
    const int64_t tile = tile_at(i), c = tile * kColumns + column;
    const Stage<P> stage = stage_at(buffer);
    pipeline.copy(buffer, {stage.slots, static_cast<const char*>(r.slots) + tile * slot_bytes, slot_bytes},
                  {stage.last, reinterpret_cast<const char*>(r.last) + tile * last_bytes, last_bytes}, i < tiles);
    ModelValues here{};
    if (i < tiles && c < r.d) here = {r.model[c], r.update[c], r.trained_on[c], r.previous[c]};
    return here;
  };
  int index = team * gridDim.x + blockIdx.x;  // the remaining tiles of the last turn are spread over all blocks
  ModelValues here, next_here;
  const auto start_copies = [&] {
    here = fetch(index, 0);
    if constexpr (kBuffers == 2) next_here = fetch(index + stride, 1);
  };
  const auto load_factors = [&] {
    for (int i = threadIdx.x; P::kAnyPairs && i < (planes + 1) * P::kClients; i += blockDim.x) {
      const int j = i / P::kClients, k = i % P::kClients;
      factors[i] = k < n ? r.factors[k * (planes + 2) + j] : 0.0f;
    }
#pragma unroll 8  // that many loads at a time
    for (int i = threadIdx.x; !P::kAnyPairs && i < P::kClients * kSharedFactors; i += blockDim.x) {
      const int from = kSharedFactors == kFactors ? i : i / kSharedFactors * kFactors + i % kSharedFactors;
      factors[i] = from < n * kFactors ? r.factors[from] : 0.0f;
    }
  };
  const bool whole = scratch.parts > 0;
  if (!whole) {
    start_copies();
    pdl_wait();  // nothing above depends on the verdict
    load_factors();
  }
  const Verdict v = whole ? begin_round<P>(r, scratch, shared, load_factors, start_copies) : *scratch.verdict;
  const int client = v.client;
  float x_factors[kItems];  // those that are not in shared memory
  if constexpr (kSharedFactors == kPlanes) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int k = lane + i * kLanes;
      x_factors[i] = k < n ? r.factors[k * kFactors + kPlanes] : 0.0f;
    }
  }
  find_members(r, v, P::kClients, members);
  __syncthreads();
  const Lanes<kThreads, kColumns> lanes{exchange};
  ColumnRule<kLanes, kItems> rule(lanes, lane, [&](int k) { return is_member(members, k); }, r.rule);

  const float* own_factors = factors + lane * kSharedFactors;
  const float inverse_rate = static_cast<float>(1 / v.last_rate);
  float slot_sums[P::kSlotSums] = {}, x_sums[P::kXSums] = {};
  double own_x = 0, own_s = 0, own_y = 0, step_square = 0;
  if (v.changes_nothing()) {  // so a flood of rejected updates does not cost a pass each
    pipeline.drain(index < tiles, index + stride < tiles);
    for (int64_t c = blockIdx.x * blockDim.x + threadIdx.x; c < r.d; c += gridDim.x * blockDim.x) {
      r.next_model[c] = r.model[c];
    }
    index = tiles;
  }
  for (int turn = 0; index < tiles; index += stride, ++turn) {
    const int buffer = turn % kBuffers;
    pipeline.wait(buffer, turn / kBuffers);
    const Stage<P> stage = stage_at(buffer);

    const float received = here.update * v.clip;
    // The last upload of the client, if it will be replaced. In a team of a whole block only lane 0 reads it, and only
    // in that case: otherwise another thread may already have stored x there.
    float old_w = 0, old_g = 0;
    if (P::kPaddedReads || (lane == 0 && v.stored)) {
      old_w = stage.last[client * kColumns + column];
      old_g = stage.last[plane + client * kColumns + column];
    }

    // Estimates of the clients lane, lane + kLanes, ..; then x = model - w replaces w in shared memory (kStoresX).
    uint32_t keys[kItems];
    float x[P::kStoresX ? kItems : 1];
    const S* u[kPlanes];  // first client of this thread in each plane; the next ones follow at a distance of kThreads
#pragma unroll
    for (int j = 0; j < kPlanes; ++j) u[j] = stage.slots + opaque(rank + j * plane);
    float *w = stage.last + rank, *g = stage.last + opaque(rank + plane);
    const int own = opaque(client - lane), left = opaque(n - lane);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      float estimate = received;
      if constexpr (P::kAnyPairs) {
        if (i * kLanes < left) {
          const float* factor = factors + lane + i * kLanes;  // those of a client are kClients apart
          x[i] = here.model - w[i * kThreads];
          estimate = g[i * kThreads] + factor[planes * P::kClients] * x[i];
#pragma unroll 4
          for (int j = 0; j < planes; ++j) {
            estimate += factor[j * P::kClients] * to_float(stage.slots[rank + i * kThreads + j * plane]);
          }
        }
      } else if (P::kPaddedReads || i * kLanes < left) {
        float factor[kSharedFactors];
        load_row(own_factors + i * kLanes * kSharedFactors, factor);
        const float moved = here.model - w[i * kThreads];
        if constexpr (P::kStoresX) x[i] = moved;
        estimate = g[i * kThreads] + (kSharedFactors > kPlanes ? factor[kSharedFactors - 2] : x_factors[i]) * moved;
#pragma unroll
        for (int j = 0; j < kPlanes; ++j) estimate += factor[j] * to_float(u[j][i * kThreads]);
      }
      keys[i] = rule.key(i, i * kLanes == own ? received : estimate);
    }
    if constexpr (P::kPaddedReads) __syncwarp();
    const int replaced = v.stored ? own : -1;  // a block has no barrier here: lane 0 may not have read these values yet
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!P::kStoresX) break;
      if (P::kPaddedReads || (i * kLanes < left && i * kLanes != replaced)) w[i * kThreads] = x[i];
    }

    // The median changes little from round to round, so the search starts at the last direction.
    const float guess = (here.previous - here.model) * inverse_rate;
    const float direction = rule.reduce(lanes, keys, r.rule, r.trim, guess);
    const int64_t tile = tile_at(index), c = tile * kColumns + column;
    const bool inside = c < r.d;
    const float next = stepped(v, here.model, direction), step = inside ? next - here.model : 0.0f;
    if constexpr (P::kPaddedReads) __syncwarp();  // a block has passed a barrier in the rule
    if (lane == 0 && inside) {
      r.next_model[c] = next;
      step_square += static_cast<double>(step) * step;
      if (v.stored) {  // replaces the row of the client, in shared memory and in the history
        const int at = client * kColumns + column;
        float* last = r.last + tile * 2 * plane + at;
        S* slots = static_cast<S*>(r.slots) + tile * planes * plane + at;
        last[0] = here.trained_on;
        last[plane] = received;
        stage.last[at] = next - here.trained_on;
        if (v.pushed) {
          const float y = (received - old_g) / v.y_scale, s = (here.trained_on - old_w) / v.s_scale;
          store(slots + v.slot * plane, y);
          store(slots + (pairs + v.slot) * plane, s);
          store(stage.slots + v.slot * plane + at, y);
          store(stage.slots + (pairs + v.slot) * plane + at, s);
        }
      }
    }
    float steps[kColumns];
    lanes.broadcast(step, steps);
    team_sync<kThreads>();

    // Products of every row with the step, and of the new rows of the client with each other.
    const S* slot_rows = stage.slots + rank * kColumns;
    const float* x_rows = stage.last + rank * kColumns;
#pragma unroll
    for (int q = 0; q < P::kSlotSums; ++q) {
      if (P::kAnyPairs && q * kThreads >= planes * n) break;
      float row[kColumns];
      load_columns(slot_rows + q * kThreads * kColumns, row);
      slot_sums[q] = add_dot(slot_sums[q], row, steps);
    }
#pragma unroll
    for (int q = 0; q < P::kXSums; ++q) {
      float row[kColumns];
      load_columns(x_rows + q * kThreads * kColumns, row);
      if constexpr (!P::kStoresX) row[0] = here.model - row[0];  // of the client, if its row is new: not used
      x_sums[q] = add_dot(x_sums[q], row, steps);
    }
    if (v.stored && rank <= planes) {
      const auto own_row = [&](int j, float (&out)[kColumns]) {
        if (j == planes) return load_columns(stage.last + client * kColumns, out);
        load_columns(stage.slots + (j * n + client) * kColumns, out);
      };
      float row[kColumns], with[kColumns];
      own_row(rank, row);
      own_row(planes, with);
      own_x += add_dot(0.0f, row, with);
      if (v.pushed) {
        own_row(pairs + v.slot, with);
        own_s += add_dot(0.0f, row, with);
        own_row(v.slot, with);
        own_y += add_dot(0.0f, row, with);
      }
    }
    pipeline.release();
    team_sync<kThreads>();
    if constexpr (kBuffers == 2) here = next_here;
    (kBuffers == 2 ? next_here : here) = fetch(index + kBuffers * stride, buffer);
  }

  if (whole && threadIdx.x / 32 == blockDim.x / 32 - 1) end_round(r, v);
  __syncthreads();  // no thread reads the tiles any more: the sums take their place
  store_changes<P>({slot_sums, x_sums, own_x, own_s, own_y, step_square}, n, planes, stages, scratch.changes);
}

}  // namespace secureafl::cuda
