#pragma once

#include <cuda_fp16.h>

#include <utility>

#include "common/launch.cuh"
#include "common/loads.cuh"
#include "round/judge.h"
#include "round/launches.h"
#include "round/round.h"
#include "round/tile_pipeline.cuh"
#include "round/tiles.h"
#include "rules/select.cuh"

namespace secureafl::cuda {

__device__ inline void store(float* to, float value) { *to = value; }
__device__ inline void store(__half* to, float value) { *to = __float2half_rn(value); }

// sum + a.b
template <int kColumns>
__device__ inline float add_dot(float sum, const float (&a)[kColumns], const float (&b)[kColumns]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sum += a[c] * b[c];
  return sum;
}

// One row of kSize floats, in the widest loads that its alignment allows.
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

// What the compiler knows of one pass. Sums over rows: each thread of a team has rows of its own, all through the
// kernel, so that nothing is added up between threads before the end.
template <int kPairs, typename S, int kThreads_, int kColumns_, int kHeld_>
struct Pass {
  static constexpr int kThreads = kThreads_, kColumns = kColumns_, kHeld = kHeld_;
  static constexpr int kPlanes = 2 * kPairs, kFactors = kPlanes + 2, kLanes = kThreads / kColumns;
  static constexpr int kClients = kLanes * kHeld;
  static constexpr int kSlotSums = (kPlanes * kClients + kThreads - 1) / kThreads;
  static constexpr int kXSums = (kClients + kThreads - 1) / kThreads;
  // Threads of a block: its teams. Where many sums are in registers there are fewer of them.
  static constexpr int kMost = kThreads > 32 ? kThreads : kSlotSums <= 24 ? 512 : kSlotSums <= 60 ? 384 : 256;
  static constexpr int kBlocksEach = kThreads > 32 ? 2 : 1;  // of a multiprocessor
  static constexpr bool kReadsOn = kThreads == 32;           // see Stage
  static constexpr int kExchangeBytes = 2 * 4 * 8, kBarrierBytes = 2 * 8 * (kMost / kThreads);
  using Stored = S;

  static constexpr int kFactorBytes = 4 * kClients * kFactors;  // a multiple of 16
};

// A tile of the history in shared memory. The threads of a warp read and write on past its n clients without asking, up
// to the number that their shape can hold: what they find there is not used, and there is room for it.
template <typename P>
struct Stage {
  using S = typename P::Stored;
  S* slots;     // (2m, n, kColumns)
  float* last;  // (2, n, kColumns): w, g; and room

  __device__ Stage(char* at, int n) {
    slots = reinterpret_cast<S*>(at);
    last = reinterpret_cast<float*>(at + slot_bytes(n));
  }
  __host__ __device__ static int slot_bytes(int n) {
    return P::kPlanes * n * P::kColumns * static_cast<int>(sizeof(S));
  }
  __host__ __device__ static int last_bytes(int n) { return 8 * n * P::kColumns; }
  __host__ __device__ static int bytes(int n) {
    const int walked = slot_bytes(n) + last_bytes(n) + 4 * (P::kClients - n) * P::kColumns;
    const int summed = slot_bytes(P::kSlotSums * P::kThreads / P::kPlanes + 1);
    return ((walked > summed ? walked : summed) + 15) / 16 * 16;
  }
};

// Hides where a value comes from. The compiler would else work all comparisons with it out ahead of the loop, and get
// each back from a packed register in more instructions than it takes to compare anew.
__device__ inline int hidden(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// What a round brings to one coordinate.
struct Coordinate {
  float model, update, trained_on, previous;
};

// One team's walk over its tiles: while it works on one, the next is on its way.
template <typename P>
__global__ void __launch_bounds__(P::kMost, P::kBlocksEach) pass_kernel(Round r, Scratch scratch) {
  using S = typename P::Stored;
  constexpr int kThreads = P::kThreads, kColumns = P::kColumns, kHeld = P::kHeld, kLanes = P::kLanes;
  constexpr int kPlanes = P::kPlanes, kPairs = kPlanes / 2, kFactors = P::kFactors;
  extern __shared__ char shared[];
  const int n = static_cast<int>(r.n), tiles = static_cast<int>(r.tiles);
  const int team = threadIdx.x / kThreads, teams = blockDim.x / kThreads, rank = threadIdx.x % kThreads;
  const int lane = rank / kColumns, column = rank % kColumns, plane = n * kColumns;
  float* factors = reinterpret_cast<float*>(shared);                               // (kClients, kFactors)
  uint32_t* exchange = reinterpret_cast<uint32_t*>(shared + P::kFactorBytes);      // (2, 8)
  auto* barriers = reinterpret_cast<uint64_t*>(exchange + P::kExchangeBytes / 4);  // (teams, 2)
  char* stages = reinterpret_cast<char*>(barriers) + P::kBarrierBytes;             // (teams, 2, stage)
  const int slot_bytes = Stage<P>::slot_bytes(n), last_bytes = Stage<P>::last_bytes(n);
  const int stage_bytes = hidden(Stage<P>::bytes(n)), first_stage = hidden(team * 2 * stage_bytes);
  const auto stage_at = [&](int buffer) { return Stage<P>(stages + first_stage + buffer * stage_bytes, n); };

  const Deliveries<kThreads> deliveries(barriers + 2 * team, rank);
  __syncthreads();
  const int stride = gridDim.x * teams;
  const auto tile_at = [&](int i) { return static_cast<int64_t>(r.backwards ? tiles - 1 - i : i); };
  const auto fetch = [&](int i, int buffer) {
    const int64_t tile = tile_at(i), c = tile * kColumns + column;
    const Stage<P> stage = stage_at(buffer);
    deliveries.bring(buffer, {stage.slots, static_cast<const char*>(r.slots) + tile * slot_bytes, slot_bytes},
                     {stage.last, reinterpret_cast<const char*>(r.last) + tile * last_bytes, last_bytes}, i < tiles);
    Coordinate here{};
    if (i < tiles && c < r.d) here = {r.model[c], r.update[c], r.trained_on[c], r.previous[c]};
    return here;
  };
  int index = team * gridDim.x + blockIdx.x;  // so that what is left for the last turn is spread over all blocks
  Coordinate here = fetch(index, 0);

  for (int i = threadIdx.x; i < P::kClients * kFactors; i += blockDim.x) {
    factors[i] = i < n * kFactors ? r.factors[i] : 0.0f;
  }
  wait_for_last();  // nothing above depends on the verdict
  const Verdict v = *scratch.verdict;
  const int client = v.client;
  const Lanes<kThreads, kColumns> lanes{exchange};
  Ranks<kLanes, kHeld> ranks(lanes, lane, [&](int k) { return k < n && r.wants(k, v); }, r.rule);
  __syncthreads();

  const float* own_factors = factors + lane * kFactors;
  const float inverse_lr = static_cast<float>(1 / r.lr);
  float slot_sums[P::kSlotSums] = {}, x_sums[P::kXSums] = {};
  double own_x = 0, own_s = 0, own_y = 0, step_square = 0;
  for (int turn = 0; index < tiles; index += stride, ++turn) {
    const int buffer = turn % 2;
    const Coordinate next_here = fetch(index + stride, buffer ^ 1);
    deliveries.wait(buffer, turn / 2);
    const Stage<P> stage = stage_at(buffer);

    const float received = here.update * v.clip;
    // Of the client's last upload, where it will be replaced. A block reads it in the thread that needs it alone:
    // another thread may already write x there.
    float old_w = 0, old_g = 0;
    if (P::kReadsOn || (lane == 0 && v.stored)) {
      old_w = stage.last[client * kColumns + column];
      old_g = stage.last[plane + client * kColumns + column];
    }

    // Estimates of the clients lane, lane + kLanes, ..; then x = model - w takes the place of w.
    uint32_t keys[kHeld];
    float x[kHeld];
    const S* u[kPlanes];  // this thread's first client in each plane; its next ones are kThreads apart
#pragma unroll
    for (int j = 0; j < kPlanes; ++j) u[j] = stage.slots + hidden(rank + j * plane);
    float *w = stage.last + rank, *g = stage.last + hidden(rank + plane);
    const int own = hidden(client - lane), left = hidden(n - lane);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      float estimate = received;
      if (P::kReadsOn || i * kLanes < left) {
        float factor[kFactors];
        load_row(own_factors + i * kLanes * kFactors, factor);
        x[i] = here.model - w[i * kThreads];
        estimate = g[i * kThreads] + factor[kPlanes] * x[i];
#pragma unroll
        for (int j = 0; j < kPlanes; ++j) estimate += factor[j] * widened(u[j][i * kThreads]);
      }
      keys[i] = ranks.key(i, i * kLanes == own ? received : estimate);
    }
    if constexpr (P::kReadsOn) __syncwarp();
    const int replaced = v.stored ? own : -1;  // a block does not meet before its first thread has read what is there
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (P::kReadsOn || (i * kLanes < left && i * kLanes != replaced)) w[i * kThreads] = x[i];
    }

    // A median moves little from round to round: look for it where the last step says that it was.
    const float guess = (here.previous - here.model) * inverse_lr;
    const float direction = ranks.reduce(lanes, keys, r.rule, r.trim, guess);
    const int64_t tile = tile_at(index), c = tile * kColumns + column;
    const bool inside = c < r.d;
    const float next = stepped(r, v, here.model, direction), step = inside ? next - here.model : 0.0f;
    if constexpr (P::kReadsOn) __syncwarp();  // a block has met in the rule
    if (lane == 0 && inside) {
      r.next_model[c] = next;
      step_square += static_cast<double>(step) * step;
      if (v.stored) {  // the client's row becomes that of this upload, here and in the history
        const int at = client * kColumns + column;
        float* last = r.last + tile * 2 * plane + at;
        S* slots = static_cast<S*>(r.slots) + tile * kPlanes * plane + at;
        last[0] = here.trained_on;
        last[plane] = received;
        stage.last[at] = next - here.trained_on;
        if (v.pushed) {
          const float y = (received - old_g) / v.y_scale, s = (here.trained_on - old_w) / v.s_scale;
          store(slots + v.slot * plane, y);
          store(slots + (kPairs + v.slot) * plane, s);
          store(stage.slots + v.slot * plane + at, y);
          store(stage.slots + (kPairs + v.slot) * plane + at, s);
        }
      }
    }
    float steps[kColumns];
    lanes.spread(step, steps);
    team_sync<kThreads>();

    // Products of every row with the step, and of the client's new rows with each other.
    const S* slot_rows = stage.slots + rank * kColumns;
    const float* x_rows = stage.last + rank * kColumns;
#pragma unroll
    for (int q = 0; q < P::kSlotSums; ++q) {
      float row[kColumns];
      load_columns(slot_rows + q * kThreads * kColumns, row);
      slot_sums[q] = add_dot(slot_sums[q], row, steps);
    }
#pragma unroll
    for (int q = 0; q < P::kXSums; ++q) {
      float row[kColumns];
      load_columns(x_rows + q * kThreads * kColumns, row);
      x_sums[q] = add_dot(x_sums[q], row, steps);
    }
    if (v.stored && rank <= kPlanes) {
      const auto own_row = [&](int j, float (&out)[kColumns]) {
        if (j == kPlanes) return load_columns(stage.last + client * kColumns, out);
        load_columns(stage.slots + (j * n + client) * kColumns, out);
      };
      float row[kColumns], with[kColumns];
      own_row(rank, row);
      own_row(kPlanes, with);
      own_x += add_dot(0.0f, row, with);
      if (v.pushed) {
        own_row(kPairs + v.slot, with);
        own_s += add_dot(0.0f, row, with);
        own_row(v.slot, with);
        own_y += add_dot(0.0f, row, with);
      }
    }
    deliveries.release();
    team_sync<kThreads>();
    here = next_here;
  }

  let_next_start();
  // The teams of a block have seen different coordinates of the same rows: add them up, in order.
  __syncthreads();
  const PassSums at{n, kPairs};
  const int rows = static_cast<int>(at.own_x(0)), count = static_cast<int>(at.count()), owned = count - rows;
  double* own = reinterpret_cast<double*>(stages);                // (teams, owned)
  float* staged = reinterpret_cast<float*>(own + teams * owned);  // (teams, rows)
#pragma unroll
  for (int q = 0; q < P::kSlotSums; ++q) {
    const int row = rank + q * kThreads;
    if (row < kPlanes * n) staged[team * rows + row] = slot_sums[q];
  }
#pragma unroll
  for (int q = 0; q < P::kXSums; ++q) {
    const int k = rank + q * kThreads;
    if (k < n) staged[team * rows + kPlanes * n + k] = x_sums[q];
  }
  if (rank <= kPlanes) own[team * owned + rank] = own_x;
  if (rank < kPlanes) {
    own[team * owned + kPlanes + 1 + rank] = own_s;
    own[team * owned + 2 * kPlanes + 1 + rank] = own_y;
  }
#pragma unroll
  for (int distance = 1; distance < kColumns; distance *= 2) {
    step_square += __shfl_xor_sync(~0u, step_square, distance);
  }
  if (rank == 0) own[team * owned + owned - 1] = step_square;
  __syncthreads();
  double* changes = scratch.changes + blockIdx.x * static_cast<int64_t>(count);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    double sum = 0;
    for (int t = 0; t < teams; ++t) sum += i < rows ? staged[t * rows + i] : own[t * owned + i - rows];
    changes[i] = sum;
  }
}

// Calls f with the Pass for so many clients and pairs.
template <int kPairs, typename S, typename F>
void visit_shape(const Shape& shape, const F& f) {
  if constexpr (kPairs == kDefaultMemory) {
    if (shape.columns == 2) return f(Pass<kPairs, S, 32, 2, 8>());
    if (shape.held == 7) return f(Pass<kPairs, S, 32, 1, 7>());
    if (shape.held == 10) return f(Pass<kPairs, S, 32, 1, 10>());
  }
  if (shape.columns == 4) return f(Pass<kPairs, S, 32, 4, 8>());
  if (shape.threads == 32) return f(Pass<kPairs, S, 32, 1, 14>());
  f(Pass<kPairs, S, 256, 1, 4>());
}
template <typename S, typename F>
void visit_pass(int64_t n, int64_t m, const F& f) {
  const Shape shape = shape_of(n, m);
  switch (m) {
    case 1: return visit_shape<1, S>(shape, f);
    case 2: return visit_shape<2, S>(shape, f);
    case 3: return visit_shape<3, S>(shape, f);
    case 4: return visit_shape<4, S>(shape, f);
    default: visit_shape<5, S>(shape, f);
  }
}

// Shared memory of a block: what its teams share, and what each of them has.
template <typename P>
constexpr int64_t shared_by_teams() {
  return P::kFactorBytes + P::kExchangeBytes + P::kBarrierBytes;
}
template <typename P>
int64_t shared_by_team(int64_t n) {
  return 2 * Stage<P>::bytes(static_cast<int>(n));
}

template <typename S>
int64_t least_shared(int64_t n, int64_t m) {
  int64_t bytes = 0;
  visit_pass<S>(n, m, [&](auto pass) {
    using P = decltype(pass);
    bytes = shared_by_teams<P>() + shared_by_team<P>(n);
  });
  return bytes;
}

// As many teams in a block as shared memory feeds, and blocks to fill the GPU once.
template <typename S>
PassPlan plan_pass(const Launcher& launch, const Round& r) {
  PassPlan plan{};
  visit_pass<S>(r.n, r.m, [&](auto pass) {
    using P = decltype(pass);
    const int64_t fixed = shared_by_teams<P>(), each_team = shared_by_team<P>(r.n);
    const int64_t most = launch.most_shared(), fed = (most - fixed) / each_team, most_teams = P::kMost / P::kThreads;
    const int64_t teams = fed < most_teams ? fed : most_teams;
    if (fixed > most || teams < 1) {
      throw std::runtime_error("secureafl::step_: a coordinate of " + std::to_string(r.n) + " clients does not fit " +
                               "this GPU's shared memory of " + std::to_string(most) + " bytes");
    }
    plan.threads = teams * P::kThreads;
    plan.shared_bytes = fixed + teams * each_team;
    const int64_t each = P::kBlocksEach > 1 ? launch.blocks_fed(plan.shared_bytes, P::kBlocksEach) : 1;
    const int64_t needed = (r.tiles + teams - 1) / teams, room = launch.multiprocessors() * each;
    plan.blocks = needed < 1 ? 1 : needed < room ? needed : room;
  });
  return plan;
}

template <typename S>
void launch_pass(const Launcher& launch, const PassPlan& plan, const Round& r, const Scratch& scratch) {
  visit_pass<S>(r.n, r.m, [&](auto pass) {
    launch.early(pass_kernel<decltype(pass)>, plan.blocks, static_cast<int>(plan.threads), plan.shared_bytes, r,
                 scratch);
  });
}

}  // namespace secureafl::cuda
