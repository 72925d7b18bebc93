// Operations of a group of one rank: each completes on submission, since the reduction of one tensor is a copy.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace shoal {

class SingleRank {
 public:
  // All operations, or none if it throws.
  std::vector<std::uint64_t> submit_all(const std::vector<OpSpec>& specs) {
    const std::lock_guard lock(mutex_);
    if (!error_.empty()) throw GroupError(error_);
    for (const OpSpec& spec : specs) {
      if (spec.root != 0) throw std::invalid_argument("the root is rank " + std::to_string(spec.root) + " of 1");
      if (by_messages(spec.kind)) require_blocks(spec, 0, 1);
    }
    std::vector<std::uint64_t> numbers;
    for (const OpSpec& spec : specs) {
      complete(spec);
      numbers.push_back(next_++);
    }
    return numbers;
  }

  std::map<std::string, std::uint64_t> counters() {
    const std::lock_guard lock(mutex_);
    auto counts = counts_.by_name();
    counts["bytes_sent"] = counts["bytes_received"] = 0;
    return counts;
  }

  // Refuses later operations.
  void end(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (error_.empty()) error_ = reason;
  }

 private:
  void complete(const OpSpec& spec) {
    if (by_messages(spec.kind)) copy_own_block(spec, 0);
    const bool moves = !by_messages(spec.kind) && spec.kind != Kind::barrier && spec.kind != Kind::delegated && spec.kind != Kind::broadcast;
    const std::size_t bytes = spec.count * size_of(spec.element);
    if (moves && bytes && spec.input != spec.output) std::memmove(spec.output, spec.input, bytes);
    counts_.add(spec);
  }

  std::mutex mutex_;
  std::uint64_t next_ = 0;
  OpCounts counts_;
  std::string error_;
};

}  // namespace shoal
