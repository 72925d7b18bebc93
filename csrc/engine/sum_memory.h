// What processes hold in a helper's memory: contributions that wait for others, frames that arrive and that are queued.
//
// Every process has a part of its own. What is left of the limit is for all jobs alike, whatever their number of
// processes. A job is the processes that have groups in common, with each other or by others between them.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "transport/frame.h"

namespace shoal {

class SumMemory {
 public:
  // An honest process has a window of 8 MiB under way in each group. With the usual bytes, three parts of five, its
  // connections are read no further, but for chunks that others have begun, and one frame a tick: it may wait for the very
  // frames behind, on other connections or of other groups. With the most, for such chunks only.
  static constexpr std::size_t kLeastBytes = std::size_t{16} << 20, kMostBytes = std::size_t{40} << 20;

  // For all processes together; 0: half of the machine's memory.
  explicit SumMemory(std::size_t max_bytes);

  // The peers that are members of each group, from now on.
  void share(const std::vector<std::vector<int>>& groups);
  const std::vector<std::vector<int>>& jobs() const { return jobs_; }  // their peers
  std::size_t most_processes() const { return max_bytes_ / kLeastBytes; }
  bool has_room_for(int peer) const { return shares_.count(peer) || shares_.size() < most_processes(); }
  std::size_t most_bytes(int peer) const;
  std::size_t usual_bytes(int peer) const { return most_bytes(peer) / 5 * 3; }

  // Bytes of a peer's frames that are kept.
  std::size_t held_bytes(int peer) const;
  // Returns the payload, which the peer's account counts, with bytes beside it, as long as somebody has it.
  Payload charged(int peer, std::size_t beside, const Payload& payload);
  // Whether the limit is passed, and its job holds more than its part: only frames that cannot wait bring it there.
  bool exceeds(int peer) const;
  // The part of the limit that the peer's job has.
  std::size_t job_bytes(int peer) const;
  void forget(int peer) { accounts_.erase(peer); }

 private:
  // Any thread gives bytes back.
  using Account = std::shared_ptr<std::atomic<std::size_t>>;
  struct Share {
    std::size_t job = 0, most_bytes = kLeastBytes;
  };

  const std::size_t max_bytes_;
  const Account held_ = std::make_shared<std::atomic<std::size_t>>(0);  // of all
  std::map<int, Account> accounts_;      // by peer
  std::map<int, Share> shares_;          // by peer
  std::vector<std::vector<int>> jobs_;
};

// Returns the peers of each job: of groups that have peers in common.
std::vector<std::vector<int>> jobs_of(const std::vector<std::vector<int>>& groups);

}  // namespace shoal
