// Parts of a matrix whose second moment has a number for each row and each column (optim/adafactor.h).
#pragma once

#include <algorithm>
#include <cstddef>

namespace shoal {

inline constexpr std::size_t kFactorPart = 8192;
// Numbers of a part that belong to rows, and to columns: its sums of squares, or its factors. A part has a number for each
// row that it may touch, counted from its first one, and for each of its first elements up to the length of a row: element
// k belongs to number k % columns.
inline std::size_t factor_rows(std::size_t columns) { return kFactorPart / columns + 2; }
inline std::size_t factor_numbers(std::size_t columns) { return factor_rows(columns) + std::min(columns, kFactorPart); }
inline std::size_t factor_parts(std::size_t count) { return (count + kFactorPart - 1) / kFactorPart; }

// A part of a matrix; its first element is number `offset` of a row.
struct FactorPart {
  std::size_t count;
  std::size_t offset;
  std::size_t columns;
};

}  // namespace shoal
