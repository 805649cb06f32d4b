#include "levels.h"

#include <atomic>

namespace mlxcel {

extern const Level level_plain, level_avx2, level_avx512, level_neon;

static std::vector<const Level*> found() {
  std::vector<const Level*> all;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    all.push_back(&level_avx512);
  if (avx2) all.push_back(&level_avx2);
#elif defined(__aarch64__)
  all.push_back(&level_neon);
#endif
  all.push_back(&level_plain);
  return all;
}

const std::vector<const Level*>& levels() {
  static const std::vector<const Level*> all = found();
  return all;
}

static std::atomic<const Level*>& chosen() {
  static std::atomic<const Level*> level{levels().front()};
  return level;
}

const Level& level() { return *chosen(); }

bool use_level(const std::string& name) {
  for (const Level* one : levels())
    if (name == one->name) {
      chosen() = one;
      return true;
    }
  return false;
}

}  // namespace mlxcel
