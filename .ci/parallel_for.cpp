// torch's parallel loop on plain threads, preloaded for ThreadSanitizer. It does not see how torch's own OpenMP threads
// wait for each other, and would call every loop a race. c++ -shared -fPIC -fsanitize=thread -O1 -g
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*each)(int64_t, int64_t, void*),
                                      void* context) {
  constexpr int64_t kThreads = 4;
  const int64_t pieces = std::clamp<int64_t>((end - begin) / std::max<int64_t>(grain, 1), 1, kThreads);
  const auto cut = [&](int64_t piece) { return begin + (end - begin) * piece / pieces; };
  std::vector<std::thread> threads;
  for (int64_t piece = 0; piece < pieces && begin < end; ++piece) {
    threads.emplace_back([=] { each(cut(piece), cut(piece + 1), context); });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}
