// Which vector instructions this processor has, and the level of kernels that follows from it.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace shoal {

// Every kernel exists once a level; all levels give the same bits.
enum class Level { portable, avx2, avx512 };

// The levels that this processor and this build can run, the fastest last.
std::vector<Level> supported_levels();

Level best_level();

// Throws std::invalid_argument for a level that is not among the supported ones.
void require_level(Level level);

std::string_view name_of(Level level);
std::optional<Level> level_named(std::string_view name);

// (name, present) of the instruction sets that a user or a recipe may ask about.
std::vector<std::pair<std::string_view, bool>> cpu_features();

}  // namespace shoal
