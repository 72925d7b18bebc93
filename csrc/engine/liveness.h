// Progress of the other members: heartbeats, stragglers, deadlines, ranks that have left. On the network thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/journal.h"
#include "engine/mailbox.h"
#include "engine/router.h"

namespace shoal {

class Liveness {
 public:
  Liveness(const Members& members, const Topology& topology, const Router& router, OpTable& ops, Mailbox& mailbox,
           Journal& journal, double straggler_s);

  // A frame of this peer has arrived. Returns whether it has begun operations that it had not before.
  bool heard(int peer, const FrameHeader& header) REQUIRES(network_thread);
  void left(int rank) REQUIRES(network_thread) { at(rank).left = true; }
  bool has_left(int rank) const REQUIRES(network_thread) { return at(rank).left; }
  // Nothing more comes from this rank, but for what is in this host's buffers already.
  void gone(int rank) REQUIRES(network_thread) { at(rank).gone_at = num_ticks_; }

  // Operations that the rank has begun, as far as is known here; those that every rank has begun, or completed.
  std::uint64_t num_begun(int rank) const REQUIRES(network_thread) { return at(rank).submitted; }
  std::uint64_t num_begun_by_all() const REQUIRES(network_thread);
  std::uint64_t num_completed_by_all() const REQUIRES(network_thread);

  // Sends heartbeats and looks at pending operations: `announce` is called once for each that waits too long. Throws
  // GroupFailure for a passed deadline and for one that waits for a rank that has left.
  void tick(const std::function<void(const Op&)>& announce) REQUIRES(network_thread);

 private:
  struct State {
    std::uint64_t submitted = 0, completed = 0;
    bool left = false;
    std::uint64_t gone_at = ~std::uint64_t{0};  // tick
    std::uint64_t last_frame_ns = 0;
  };

  State& at(int peer) REQUIRES(network_thread) { return states_[static_cast<std::size_t>(peer)]; }
  const State& at(int peer) const REQUIRES(network_thread) { return states_[static_cast<std::size_t>(peer)]; }
  void beat() REQUIRES(network_thread);
  void check(Op& op, const std::function<void(const Op&)>& announce) REQUIRES(network_thread);
  void check_message(const Op& op) REQUIRES(network_thread);
  bool name_stragglers(const Op& op, double age_s) REQUIRES(network_thread);
  std::string missing(const Op& op, bool& somebody) const REQUIRES(network_thread);
  double silent_s(int peer) const REQUIRES(network_thread);

  const Members& members_;
  const Topology& topology_;
  const Router& router_;
  OpTable& ops_;
  Mailbox& mailbox_;
  Journal& journal_;
  const double straggler_s_;
  std::vector<State> states_ GUARDED_BY(network_thread);  // by server
  std::uint64_t num_ticks_ GUARDED_BY(network_thread) = 0;
};

}  // namespace shoal
