// Finds out which ranks issued different collectives under the same number.
//
// A frame that conflicts with another one, or with this rank's operation, raises a suspicion, which all ranks share. One of
// a frame that agrees with a rank's own operation says nothing to it: of two that conflict, the other one does.
// Every rank then announces the operation that it issued. Different announcements fail the group with both; a frame
// that contradicts its sender's own announcement fails it with that rank. Until then nothing completes, since a
// result may be of tensors that do not belong together. On the network thread; all throw GroupFailure with the diagnosis.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/members.h"
#include "engine/sum_server.h"

namespace shoal {

class MismatchDetector {
 public:
  MismatchDetector(const Members& members, OpTable& ops, Mailbox& mailbox)
      : members_(members), ops_(ops), mailbox_(mailbox) {}

  // This rank has issued an operation that was in question.
  void begun(const Op& op) REQUIRES(network_thread);
  // Tells the other ranks which operation this one has issued.
  void announce(const Op& op) REQUIRES(network_thread);
  void on_announcement(int rank, const FrameHeader& header, const std::string& text) REQUIRES(network_thread);

  // A server has received two frames of a chunk that conflict.
  void on_conflict(const SumServer::Conflict& conflict) REQUIRES(network_thread);
  // A frame of `rank`, which `through` has passed on (-1: nobody), about operation `seq` has another signature than
  // expected: tells all ranks.
  void suspect(std::uint64_t seq, int rank, std::uint64_t signature, int through = -1) REQUIRES(network_thread);
  void on_mismatch(int reporter, const FrameHeader& header) REQUIRES(network_thread);
  // A result with this header is not of this rank's operation of that number. A helper reduces only what matches, so
  // it is broken; a rank may have issued another operation. A forwarded result is attributed to its root.
  void on_unexpected_result(int peer, const FrameHeader& header) REQUIRES(network_thread);
  // Whether this rank's operation `seq`, which may have completed, has another signature than the frame.
  bool differs(const FrameHeader& header) REQUIRES(network_thread);

  // Ranks have diverged: nothing may complete.
  bool diverged() const REQUIRES(network_thread) { return diverged_; }
  // All ranks have completed the operations below `seq`.
  void forget_below(std::uint64_t seq) REQUIRES(network_thread);

 private:
  struct Announcement {
    std::uint64_t signature;
    std::string text;
  };
  struct Suspicion {  // a frame of `rank` with this signature, the rank or helper that reports it, and who has passed it on
    int rank;
    std::uint64_t signature;
    int reporter, through;
  };

  void compare(std::uint64_t seq) REQUIRES(network_thread);
  void add(std::uint64_t seq, const Suspicion& suspicion) REQUIRES(network_thread);
  void diagnose(std::uint64_t seq) REQUIRES(network_thread);

  const Members& members_;
  OpTable& ops_;
  Mailbox& mailbox_;

  std::map<std::uint64_t, std::map<int, Announcement>> announced_ GUARDED_BY(network_thread);  // by operation and rank
  std::map<std::uint64_t, std::vector<Suspicion>> suspicions_ GUARDED_BY(network_thread);
  bool diverged_ GUARDED_BY(network_thread) = false;
};

}  // namespace shoal
