// Reduction of n contributions in order, as a server does for a chunk.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/types.h"

namespace shoal {

struct CombineSpec {
  Combine combine = Combine::sum;
  Element result = Element::float32;  // type of the result
  Element input = Element::float32;   // type of the contributions: as the result, or float32 partial sums
  int divisor = 1;                    // avg: number of ranks
};

// out[i] = round(((x0[i] op x1[i]) op x2[i]) op ...). 16-bit floats are combined in fp32 and rounded once; integers
// wrap around. `out` may be one of the inputs. Addresses need no alignment.
//
// Throws std::invalid_argument for bitwise operations on floats, averages of integers and incompatible types.
void combine_in_order(void* out, const std::vector<const void*>& inputs, std::size_t count,
                      const CombineSpec& spec);

// Throws what combine_in_order would throw.
void require_possible(const CombineSpec& spec);

// Widens 16-bit floats to fp32, for a contribution that is combined with partial sums of other hosts.
void widen(float* out, const void* input, std::size_t count, Element element);

}  // namespace shoal
