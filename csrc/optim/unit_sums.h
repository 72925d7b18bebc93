// Sums of squares of a tensor that is cut into pieces at multiples of kSumUnit, each piece elsewhere.
#pragma once

#include <cstddef>
#include <span>

#include "optim/two_passes.h"

namespace shoal {

// Of a unit, and of a whole tensor: of the gradients, of the weights before the update, and of what the optimizer also
// needs: LAMB the update, LARS the gradients with decay.
struct UnitSums {
  double grad_sq = 0.0, weight_sq = 0.0, other_sq = 0.0;
};

inline std::size_t num_units(std::size_t count) { return (count + kSumUnit - 1) / kSumUnit; }

// Returns the sums of a tensor from those of its units, added in the order of the passes over whole tensors. Adds the
// gradients' sums to `grad_sq`, over all tensors, in the order of sum_of_squares().
inline UnitSums total_of(std::span<const UnitSums> units, double& grad_sq) {
  constexpr std::size_t kUnits = kBlock / kSumUnit;
  UnitSums total;
  for (std::size_t begin = 0; begin < units.size(); begin += kUnits) {
    UnitSums block;
    for (const UnitSums& unit : units.subspan(begin, std::min(kUnits, units.size() - begin))) {
      block.grad_sq += unit.grad_sq;
      block.weight_sq += unit.weight_sq;
      block.other_sq += unit.other_sq;
    }
    total.grad_sq += block.grad_sq;
    total.weight_sq += block.weight_sq;
    total.other_sq += block.other_sq;
    grad_sq += block.grad_sq;
  }
  return total;
}

}  // namespace shoal
