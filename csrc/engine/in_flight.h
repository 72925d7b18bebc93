// Accounts for the bytes that an outbox has sent to other hosts' servers and that are not answered.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

#include "engine/op.h"

namespace shoal {

class InFlight {
 public:
  // Chunks served by `rank` itself do not count.
  static std::size_t counted(const Op& op, std::uint64_t index, int rank) {
    const Op::Part& part = op.parts[index];
    return part.server == rank ? 0 : op.in_flight_bytes(index);
  }

  // Chunks that do not count need no window, and neither does the first chunk in flight.
  bool fits(std::size_t bytes, std::size_t window) const { return !bytes || !bytes_ || bytes_ + bytes <= window; }

  // Returns whether the operation or an earlier one has bytes in flight.
  bool any_up_to(std::uint64_t seq) const { return !of_.empty() && of_.begin()->first <= seq; }

  void sent(std::uint64_t seq, std::size_t bytes) {
    if (!bytes) return;
    of_[seq] += bytes;
    bytes_ += bytes;
  }

  void arrived(const Op& op, std::uint64_t index) {
    const auto found = of_.find(op.seq);
    if (found == of_.end()) return;
    const std::size_t bytes = std::min(found->second, op.in_flight_bytes(index));
    found->second -= bytes;
    bytes_ -= bytes;
    if (!found->second) of_.erase(found);
  }

  std::size_t bytes() const { return bytes_; }

 private:
  std::map<std::uint64_t, std::size_t> of_;  // bytes by operation number
  std::size_t bytes_ = 0;
};

}  // namespace shoal
