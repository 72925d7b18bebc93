// The members of a group as this rank knows them: who they are, what it sends them, which helpers are lost, and how far
// the others have come.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/errors.h"
#include "engine/journal.h"
#include "engine/op_table.h"
#include "engine/topology.h"
#include "transport/connections.h"

namespace shoal {

struct PeerInfo {
  std::string host;
  std::string address;
  int port = 0;
  int global_rank = 0;
  int pid = 0;
  PublicKey key = {};  // of its process; if it is not known, that of the first that takes its name

  Place place() const { return {address, port, pid, key}; }
};

struct HelperInfo {
  std::string address;
  int port = 0;
  std::string name;
  PublicKey key = {};  // as a rank's

  Place place() const { return {address, port, -1, key}; }
};

// The group's ranks and helpers, and their names in messages. Servers are numbered: ranks first, then helpers.
struct Members {
  std::string group;
  int rank = 0;
  std::vector<PeerInfo> peers;      // by rank
  std::vector<HelperInfo> helpers;

  int size() const { return static_cast<int>(peers.size()); }
  int num_servers() const { return static_cast<int>(peers.size() + helpers.size()); }
  bool is_helper(int server) const { return server >= size(); }
  const PeerInfo& peer(int rank_of) const { return peers[static_cast<std::size_t>(rank_of)]; }
  const HelperInfo& helper(int server) const { return helpers[static_cast<std::size_t>(server - size())]; }

  // "rank 3 (10.0.0.4, pid 812)", with the rank in the whole job; "helper h1 (10.0.1.7:4000)".
  std::string name_of(int server) const;
};

// Sends frames to the members of a group, each stamped with this rank's progress. Notices go to its neighbours, each of
// which passes them on to those of its host that are none; there they count as the first one's own. On the network thread.
class Mailbox {
 public:
  // A frame without elements, for all members.
  struct Notice {
    FrameType type;
    std::uint64_t seq = 0, chunk = 0, signature = 0;
    std::string text = {};
    int root = -1;
  };

  Mailbox(Sender& sender, const Members& members, const Topology& topology, const OpTable& ops)
      : sender_(sender), members_(members), topology_(topology), ops_(ops) {}

  void send(int peer, FrameHeader header, Payload payload) REQUIRES(network_thread) {
    header.submitted = ops_.num_submitted();
    header.completed = ops_.num_completed();
    sender_.send(peer, header, std::move(payload));
  }
  // Sends to all other ranks; a heartbeat and a goodbye to helpers too. Heartbeats of this kind are not passed on.
  void broadcast(const Notice& notice) REQUIRES(network_thread);
  void beat(int peer, bool to_all = false) REQUIRES(network_thread);

  // Passes on a frame of `peer` if that is for this rank to do. Returns the member whose frame it is, or -1 for a notice that
  // is not for this peer to pass on.
  int pass_on(int peer, const FrameHeader& header, const Payload& payload) REQUIRES(network_thread);
  // Tells those that are no neighbours of a neighbour that it is lost, or has left.
  void tell_lost(int peer, const std::string& why) REQUIRES(network_thread);

 private:
  void relay(int origin, FrameHeader header, const Payload& payload) REQUIRES(network_thread);

  Sender& sender_;
  const Members& members_;
  const Topology& topology_;
  const OpTable& ops_;
};

// Server of each chunk: the one of the pattern, or its stand-in once that helper is lost. On the network thread.
class Router {
 public:
  Router(const Members& members, const Topology& topology, bool workers_serve)
      : members_(members), topology_(topology), workers_serve_(workers_serve), lost_(members.helpers.size()) {}

  // Returns the server that reduces the chunk, where the pattern gives `server`. Throws GroupFailure if none is left.
  int route(std::uint64_t seq, std::uint64_t index, int server) const REQUIRES(network_thread) {
    return is_lost(server) ? stand_in(seq, index, server) : server;
  }

  bool is_lost(int server) const REQUIRES(network_thread) {
    return members_.is_helper(server) && lost_[static_cast<std::size_t>(server - members_.size())];
  }
  // Returns false if there is no such helper or it was lost before.
  bool lose(int server) REQUIRES(network_thread);

 private:
  int stand_in(std::uint64_t seq, std::uint64_t index, int server) const REQUIRES(network_thread);

  const Members& members_;
  const Topology& topology_;
  const bool workers_serve_;
  std::vector<bool> lost_ GUARDED_BY(network_thread);  // by helper
};

// Progress of the other members: heartbeats, stragglers, deadlines, ranks that have left. On the network thread.
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
  // Whether a rank that has not left has completed fewer, as far as is known here.
  bool anybody_lacks(std::uint64_t num_completed) const REQUIRES(network_thread);

  // Sends heartbeats and looks at pending operations: `announce` is called once for each that waits too long. Throws
  // GroupFailure for a passed deadline and for one that waits for a rank that has left.
  void tick(const std::function<void(const Op&)>& announce) REQUIRES(network_thread);

  // Returns the helpers that have said nothing for so long while operations were pending.
  std::vector<int> silent_helpers(double patience_s) const REQUIRES(network_thread);

 private:
  struct State {
    std::uint64_t submitted = 0, completed = 0;
    double quiet_s = 0;  // as far as this process was awake to hear it
    bool left = false;
    std::uint64_t gone_at = ~std::uint64_t{0};  // tick
    std::uint64_t last_frame_ns = 0;
  };

  State& at(int peer) REQUIRES(network_thread) { return states_[static_cast<std::size_t>(peer)]; }
  const State& at(int peer) const REQUIRES(network_thread) { return states_[static_cast<std::size_t>(peer)]; }
  void beat() REQUIRES(network_thread);
  void count_silence(bool waits) REQUIRES(network_thread);
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
  std::uint64_t last_tick_ns_ GUARDED_BY(network_thread) = 0;
};

}  // namespace shoal
