// The combination of n contributions to one result, in order: what a server does with a chunk.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/types.h"

namespace shoal {

struct CombineSpec {
  Combine combine = Combine::sum;
  Element result = Element::float32;  // type of the result
  Element input = Element::float32;   // type of the contributions: that of the result, or float32 partial sums
  int divisor = 1;                    // avg: number of ranks
};

// out[i] = round(((x0[i] op x1[i]) op x2[i]) op ...). 16-bit floats are combined in fp32 and rounded once;
// integers wrap around. `out` may be one of the inputs. Anything may lie at any address.
//
// Throws std::invalid_argument for bit operations on floats, averages of integers and types that do not go together.
void combine_in_order(void* out, const std::vector<const void*>& inputs, std::size_t count,
                      const CombineSpec& spec);

// Throws like combine_in_order where it would.
void require_possible(const CombineSpec& spec);

// Widens 16-bit floats to fp32: a contribution that travels beside the partial sums of other hosts.
void widen(float* out, const void* input, std::size_t count, Element element);

}  // namespace shoal
