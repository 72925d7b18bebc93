// Reduction of n buffers of equal length in order, as a server does for the contributions to a chunk.
#pragma once

#include <cstddef>
#include <vector>

#include "base/cpu.h"
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

// Whether sum_in_rank_order has kernels for this type: float32, bfloat16 and float16.
inline bool has_kernels(Element element) { return element == Element::float32 || is_half(element); }

// The sum of combine_in_order by vector kernels, with fp32 accumulation:
// out[i] = round(((float(x0[i]) + float(x1[i])) + float(x2[i])) + ...), where each addition is in fp32 and the sum is
// rounded once, to nearest even, to `element`. A NaN result is the quiet NaN without payload. The bits depend only on
// the inputs: not on the level, the number of threads or the alignment.
//
// Buffers need no alignment. `out` may be one of the inputs; any other overlap is an error. Scratch memory is
// bounded: none up to eight inputs, 8 KiB per thread beyond.
//
// Throws std::invalid_argument if there is no input, `out` overlaps an input partly, num_threads < 1, the level is
// not supported here or there are no kernels.
void sum_in_rank_order(void* out, const void* const* inputs, std::size_t num_inputs, std::size_t count,
                       Element element, int num_threads, Level level = best_level());

}  // namespace shoal
