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
    std::map<std::string, std::uint64_t> found{{"bytes_sent", 0}, {"bytes_received", 0}};
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (!counts_[kind].num_operations) continue;
      const std::string name(name_of(static_cast<Kind>(kind)));
      found["ops_" + name] = counts_[kind].num_operations;
      found["bytes_" + name] = counts_[kind].num_bytes;
    }
    return found;
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
    Count& count = counts_[static_cast<std::size_t>(spec.kind)];
    count.num_operations += 1;
    count.num_bytes += bytes;
  }

  static constexpr std::size_t kKinds = kNumKinds;
  struct Count {
    std::uint64_t num_operations = 0, num_bytes = 0;
  };

  std::mutex mutex_;
  std::uint64_t next_ = 0;
  Count counts_[kKinds];
  std::string error_;
};

}  // namespace shoal
