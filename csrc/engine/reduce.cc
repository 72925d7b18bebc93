#include "engine/reduce.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/parallel.h"
#include "base/simd.h"

namespace shoal {
namespace {

// Inputs that are read together: more streams exceed the prefetchers and the registers.
constexpr std::size_t kGroup = 8;
// With more inputs, partial sums of this many elements stay in the L1 cache.
constexpr std::size_t kBlock = 2048;
// Elements that a thread claims at a time.
constexpr std::size_t kChunk = 65536;
// Below this traffic per thread, starting it does not pay.
constexpr std::size_t kBytesPerThread = std::size_t{1} << 20;
// From this size on, the output is written with streaming stores: it would evict inputs from the caches, and each
// line would be fetched before it is overwritten (8 inputs of 25 MiB: 10 transfers instead of 9).
constexpr std::size_t kStreamBytes = std::size_t{4} << 20;

// State of one call, shared by its threads.
template <class T>
struct Task {
  T* out;
  const T* const* inputs;
  std::size_t num_inputs;
  bool streams;
};

}  // namespace

#define SHOAL_KERNELS "engine/reduce_kernels.inc"
#include "base/every_level.inc"

namespace {

template <class T>
using RangeSum = void (*)(const Task<T>&, std::size_t begin, std::size_t end);

template <class T>
RangeSum<T> range_sum_of(Level level) {
  switch (level) {
#if defined(__x86_64__)
    case Level::avx512: return avx512::sum_range<T>;
    case Level::avx2: return avx2::sum_range<T>;
#endif
    default: return portable::sum_range<T>;
  }
}

template <class T>
void sum(void* out, const void* const* inputs, std::size_t num_inputs, std::size_t count, int num_threads,
         Level level) {
  std::vector<const T*> typed(num_inputs);
  bool in_place = false;
  for (std::size_t k = 0; k < num_inputs; ++k) {
    typed[k] = static_cast<const T*>(inputs[k]);
    in_place = in_place || inputs[k] == out;
  }
  const bool can_align = reinterpret_cast<std::uintptr_t>(out) % sizeof(T) == 0;
  const bool streams = count * sizeof(T) >= kStreamBytes && can_align && !in_place;
  const Task<T> task{static_cast<T*>(out), typed.data(), num_inputs, streams};
  const std::size_t traffic = count * sizeof(T) * (num_inputs + 1);
  const auto worthwhile = static_cast<int>(std::min<std::size_t>(1 + traffic / kBytesPerThread, 1024));
  const RangeSum<T> range_sum = range_sum_of<T>(level);
  Claims claims((count + kChunk - 1) / kChunk);
  run_on_threads(std::min(num_threads, worthwhile), [&] {
    for (std::size_t chunk; claims.next(chunk);) {
      range_sum(task, chunk * kChunk, std::min(count, (chunk + 1) * kChunk));
    }
  });
}

void check(const void* out, const void* const* inputs, std::size_t num_inputs, std::size_t num_bytes,
           int num_threads, Level level) {
  if (num_inputs == 0) throw std::invalid_argument("a sum needs at least one input");
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + " must be at least 1");
  }
  const std::vector<Level> levels = supported_levels();
  if (std::find(levels.begin(), levels.end(), level) == levels.end()) {
    throw std::invalid_argument("this processor cannot run the level '" + std::string(name_of(level)) + "'");
  }
  const auto first = reinterpret_cast<std::uintptr_t>(out);
  for (std::size_t k = 0; k < num_inputs; ++k) {
    const auto other = reinterpret_cast<std::uintptr_t>(inputs[k]);
    if (other != first && other < first + num_bytes && first < other + num_bytes) {
      throw std::invalid_argument("input " + std::to_string(k) +
                                  " overlaps the output partly; the output may only be one of the inputs");
    }
  }
}

}  // namespace

std::size_t size_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

void sum_in_rank_order(void* out, const void* const* inputs, std::size_t num_inputs, std::size_t count,
                       DType dtype, int num_threads, Level level) {
  check(out, inputs, num_inputs, count * size_of(dtype), num_threads, level);
  switch (dtype) {
    case DType::float32: return sum<float>(out, inputs, num_inputs, count, num_threads, level);
    case DType::bfloat16: return sum<Bf16>(out, inputs, num_inputs, count, num_threads, level);
    case DType::float16: return sum<Fp16>(out, inputs, num_inputs, count, num_threads, level);
  }
}

}  // namespace shoal
