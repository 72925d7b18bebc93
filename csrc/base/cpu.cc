#include "base/cpu.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace shoal {

#if defined(__x86_64__)
namespace {

// Clang 14 does not know the name "f16c" in __builtin_cpu_supports.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && __builtin_cpu_supports("avx");
}

}  // namespace
#endif

std::vector<std::pair<std::string_view, bool>> cpu_features() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return {{"avx2", __builtin_cpu_supports("avx2") != 0},
          {"fma", __builtin_cpu_supports("fma") != 0},
          {"f16c", has_f16c()},
          {"avx512f", __builtin_cpu_supports("avx512f") != 0},
          {"avx512_bf16", __builtin_cpu_supports("avx512bf16") != 0}};
#else
  return {};
#endif
}

std::vector<Level> supported_levels() {
  std::vector<Level> levels{Level::portable};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
    levels.push_back(Level::avx2);
    if (__builtin_cpu_supports("avx512f")) levels.push_back(Level::avx512);
  }
#endif
  return levels;
}

Level best_level() {
  static const Level best = supported_levels().back();
  return best;
}

void require_level(Level level) {
  const std::vector<Level> levels = supported_levels();
  if (std::find(levels.begin(), levels.end(), level) == levels.end()) {
    throw std::invalid_argument("this processor cannot run the level '" + std::string(name_of(level)) + "'");
  }
}

std::string_view name_of(Level level) {
  switch (level) {
    case Level::portable: return "portable";
    case Level::avx2: return "avx2";
    case Level::avx512: return "avx512";
  }
  return "";
}

std::optional<Level> level_named(std::string_view name) {
  for (Level level : {Level::portable, Level::avx2, Level::avx512}) {
    if (name_of(level) == name) return level;
  }
  return std::nullopt;
}

}  // namespace shoal
