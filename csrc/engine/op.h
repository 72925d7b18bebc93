// State of a pending collective on this rank.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "engine/topology.h"
#include "engine/types.h"
#include "transport/frame.h"

namespace shoal {

struct Op {
  enum class Step : std::uint8_t { idle, waiting, done };

  // State of a chunk that this rank owns on its host.
  struct Part {
    Step step = Step::idle;
    bool contributed = false;
    int server = 0;                       // differs from the chunk's if that one is lost
    Payload contribution;                 // kept until the result arrives, to resend it if the server is lost
    Element input = Element::uint8;       // type of the contribution
    std::byte* destination = nullptr;     // address for the result
    std::uint64_t sent_ns = 0;
  };

  OpSpec spec;
  std::uint64_t seq = 0;
  std::uint64_t signature = 0;
  std::vector<Chunk> chunks;
  std::vector<Part> parts;                    // network thread
  std::map<std::uint64_t, Payload> retained;  // results received from helpers, in case one is lost
  std::atomic<int> pending{1};                // see OpTable
  std::atomic<bool> ended{false};
  std::chrono::steady_clock::time_point begun;
  bool ordered = false;                       // sent in rank 0's order
  bool announced = false, named = false;      // to the other ranks; stragglers were logged
  bool has_messages = false;  // its receives are posted; network thread
  std::uint64_t ticket = 0;   //                  // host stage: of the first chunk, or of the direct exchange

  std::size_t width() const { return size_of(spec.element); }

  // Address of chunk `index` in this rank's input or output. Only for ranks that have it.
  const std::byte* input_at(std::uint64_t index, int rank) const {
    if (sends_coefficients(spec.kind)) return spec.input;
    const std::uint64_t base = spec.kind == Kind::all_gather ? static_cast<std::uint64_t>(rank) * spec.count : 0;
    return spec.input + (chunks[index].begin - base) * width();
  }
  std::byte* output_at(std::uint64_t index, int rank) const {
    if (returns_sums(spec.kind)) return spec.output + chunks[index].begin / kServedUnit * kSums * sizeof(double);
    if (returns_weights(spec.kind)) return spec.output + chunks[index].begin * size_of(spec.weights);
    const std::uint64_t base = spec.kind == Kind::reduce_scatter ? static_cast<std::uint64_t>(rank) * spec.count : 0;
    return spec.output + (chunks[index].begin - base) * width();
  }
  // Bytes of a chunk's contribution, and of its result.
  std::size_t bytes_of(std::uint64_t index) const {
    return sends_coefficients(spec.kind) ? kCoefficients * sizeof(float) : chunks[index].count * width();
  }
  std::size_t result_bytes_of(std::uint64_t index) const {
    const std::size_t count = chunks[index].count;
    if (returns_sums(spec.kind)) return (count + kServedUnit - 1) / kServedUnit * kSums * sizeof(double);
    return count * (returns_weights(spec.kind) ? size_of(spec.weights) : width());
  }
  // Bytes of a chunk that windows bound: those of an apply are on their way back.
  std::size_t in_flight_bytes(std::uint64_t index) const {
    return spec.kind == Kind::apply ? result_bytes_of(index) : parts[index].contribution.size;
  }
  bool sums() const { return adds_up(spec.kind); }
};

using OpPtr = std::shared_ptr<Op>;

// An empty tensor may have a null address.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

// Kinds whose results go to ranks that contribute nothing, and so may not have begun the operation.
inline bool forwards(Kind kind) { return kind == Kind::broadcast || kind == Kind::all_gather; }

}  // namespace shoal
