// Vector instruction sets of this processor, and the kernel level that they allow.
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace shoal {

// Every kernel exists once per level; all levels give the same bits.
enum class Level { portable, avx2, avx512 };

// Returns the levels that this processor and this build support, the fastest last.
std::vector<Level> supported_levels();

Level best_level();

// Throws std::invalid_argument for a level that is not supported.
void require_level(Level level);

std::string_view name_of(Level level);
std::optional<Level> level_named(std::string_view name);

// (name, present) of instruction sets that users may query.
std::vector<std::pair<std::string_view, bool>> cpu_features();

}  // namespace shoal
