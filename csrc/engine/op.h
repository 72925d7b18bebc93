// One collective under way on this rank.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/topology.h"
#include "engine/types.h"
#include "transport/frame.h"

namespace shoal {

struct Op {
  enum class Step : std::uint8_t { idle, waiting, done };

  // What this rank knows of a chunk that it speaks for.
  struct Part {
    Step step = Step::idle;
    bool contributed = false;
    int server = 0;                       // differs from the plan's where that one is lost
    Payload contribution;                 // stays until the result is here: a lost server makes us send it again
    Element input = Element::uint8;       // its type
    std::byte* destination = nullptr;     // where the result goes
    std::uint64_t sent_ns = 0;
  };

  OpSpec spec;
  std::uint64_t seq = 0;
  std::uint64_t signature = 0;
  std::vector<Chunk> chunks;
  std::vector<Part> parts;                    // network thread
  std::map<std::uint64_t, Payload> retained;  // results that came from helpers, in case one is lost
  std::atomic<int> pending{1};                // what is still to be done before the operation has ended here
  std::chrono::steady_clock::time_point begun;
  bool ordered = false;                       // rank 0 says when its chunks go
  bool announced = false, named = false;      // to the others; its stragglers to people
  std::uint64_t first_ticket = 0;             // host stage: place of the first chunk in the host's stream

  std::size_t width() const { return size_of(spec.element); }

  // Where chunk `index` lies in this rank's input or output. Only for ranks that have it.
  const std::byte* input_at(std::uint64_t index, int rank) const {
    const std::uint64_t base = spec.kind == Kind::all_gather ? static_cast<std::uint64_t>(rank) * spec.count : 0;
    return spec.input + (chunks[index].begin - base) * width();
  }
  std::byte* output_at(std::uint64_t index, int rank) const {
    const std::uint64_t base = spec.kind == Kind::reduce_scatter ? static_cast<std::uint64_t>(rank) * spec.count : 0;
    return spec.output + (chunks[index].begin - base) * width();
  }
  std::size_t bytes_of(std::uint64_t index) const { return chunks[index].count * width(); }
  bool sums() const { return adds_up(spec.kind); }
};

using OpPtr = std::shared_ptr<Op>;

}  // namespace shoal
