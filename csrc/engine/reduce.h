// Sum of n buffers of equal length, in rank order, with fp32 accumulation.
#pragma once

#include <cstddef>

#include "base/cpu.h"

namespace shoal {

enum class DType { float32, bfloat16, float16 };

std::size_t size_of(DType dtype);

// out[i] = round(((float(x0[i]) + float(x1[i])) + float(x2[i])) + ...), where each addition is in fp32 and the sum is
// rounded once, to nearest even, to `dtype`. A NaN result is the quiet NaN without payload. The bits depend only on
// the inputs: not on the level, the number of threads or the alignment.
//
// Buffers need no alignment. `out` may be one of the inputs; any other overlap is an error. Scratch memory is
// bounded: none up to eight inputs, 8 KiB per thread beyond.
//
// Throws std::invalid_argument if there is no input, `out` overlaps an input partly, num_threads < 1 or the level is
// not supported here.
void sum_in_rank_order(void* out, const void* const* inputs, std::size_t num_inputs, std::size_t count,
                       DType dtype, int num_threads, Level level = best_level());

}  // namespace shoal
