// A group of one rank: each operation completes on submission, since the reduction of one tensor is a copy. It has the
// functions of Engine that a program calls.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"

namespace shoal {

class SingleRank : public std::enable_shared_from_this<SingleRank> {
 public:
  std::uint64_t submit(OpSpec spec) { return submit_all({std::move(spec)}).front(); }

  // All operations, or none if it throws.
  std::vector<std::uint64_t> submit_all(const std::vector<OpSpec>& specs) {
    const MutexLock lock(mutex_);
    if (!error_.empty()) throw GroupError(error_);
    if (closed_) throw GroupError("the group was closed");
    for (const OpSpec& spec : specs) require_possible(spec);
    std::vector<std::uint64_t> numbers;
    for (const OpSpec& spec : specs) {
      complete(spec);
      numbers.push_back(num_submitted_++);
    }
    return numbers;
  }

  void finish_delegated(std::uint64_t) {}
  bool wait(std::uint64_t, double) { return true; }
  bool is_done(std::uint64_t) { return true; }
  void on_end(std::uint64_t, const std::function<void()>& then) { then(); }
  void then(std::uint64_t, const std::function<void()>& then) { then(); }

  std::uint64_t num_submitted() {
    const MutexLock lock(mutex_);
    return num_submitted_;
  }

  std::map<std::string, std::uint64_t> counters() {
    const MutexLock lock(mutex_);
    auto counts = counts_.by_name();
    counts["bytes_sent"] = counts["bytes_received"] = 0;
    return counts;
  }
  std::vector<std::string> take_events() { return {}; }

  std::string error() {
    const MutexLock lock(mutex_);
    return closed_ ? "" : error_;
  }
  // Refuses later operations; the first reason stays.
  void abort(const std::string& reason) {
    const MutexLock lock(mutex_);
    if (error_.empty()) error_ = reason;
  }
  void close() {
    const MutexLock lock(mutex_);
    closed_ = true;
  }

 private:
  static void require_possible(const OpSpec& spec) {
    if (is_message(spec.kind)) {
      throw std::invalid_argument("a message between rank 0 and rank " + std::to_string(spec.root) + " of a group of 1");
    }
    if (spec.kind != Kind::delegated && spec.root != 0) {
      throw std::invalid_argument("the root is rank " + std::to_string(spec.root) + " of 1");
    }
    if (by_messages(spec.kind)) require_blocks(spec, 0, 1);
  }

  void complete(const OpSpec& spec) REQUIRES(mutex_) {
    if (by_messages(spec.kind)) copy_own_block(spec, 0);
    const bool moves = !by_messages(spec.kind) && spec.kind != Kind::barrier && spec.kind != Kind::delegated && spec.kind != Kind::broadcast;
    const std::size_t bytes = spec.count * size_of(spec.element);
    if (moves && bytes && spec.input != spec.output) std::memmove(spec.output, spec.input, bytes);
    counts_.add(spec);
  }

  Mutex mutex_;
  std::uint64_t num_submitted_ GUARDED_BY(mutex_) = 0;
  OpCounts counts_ GUARDED_BY(mutex_);
  std::string error_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace shoal
