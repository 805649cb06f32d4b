// The threads that share one call. They spin for a moment when it ends, then park.
#pragma once

#include <cstdint>
#include <functional>

namespace mlxcel {

int num_threads();
void set_num_threads(int count);

// Tells the processor that this thread waits for another one.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Runs task(0) to task(count - 1), some of them on other threads, and returns when all have ended. Which thread takes
// which is left to chance, so that a thread that gets no processor holds up at most the task it has begun; task(0)
// alone is always the calling thread's. Where tasks fail, some may not run, and one of their exceptions is thrown.
void share(int64_t count, const std::function<void(int64_t)>& task);

// `count` floats of this thread's own, until it asks again.
float* scratch(int64_t count);

}  // namespace mlxcel
