// The connections of this process to others, shared by its groups, and each group's channel on them.
//
//   Connections   one per process: owns the transport, knows which processes are connected, hands each frame to its
//                 group by the number in the header
//   Channel       one per group: knows which process is which member; what an engine sends and receives through
//
// A pair of processes has one set of connections, made when the first group needs it: of the two, the one with the
// greater name calls. Each member of a group then joins on them: it sends the other its identity, and sends it nothing
// else before it has heard of it. A member that leaves says so; the connections stay while any group is left. Members that
// connect `later` do so with the first frame between them that is no notice; if it is the other that calls, it is asked to:
// who knocks introduces itself and hangs up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "transport/identity.h"
#include "transport/open.h"

namespace shoal {

// A channel's events for its group. All calls come with the NetworkLock, one at a time.
class ChannelEvents {
 public:
  virtual ~ChannelEvents() = default;

  // Returns why the member cannot be what it claims to be, or an empty string.
  virtual std::string on_join(int member, const Identity& who) = 0;
  virtual std::shared_ptr<std::byte> place_for(int, const FrameHeader&) { return nullptr; }  // as in Sink
  virtual void on_frame(int member, const FrameHeader& header, Payload payload) = 0;
  // The member is lost, has left, or has refused this process. Frames that it sent before may still come.
  virtual void on_down(int member, const std::string& why) = 0;
  virtual void on_tick() = 0;
  // A posted task has thrown: a bug in this process.
  virtual void on_error(const std::string& what) = 0;
};

// Sends frames to the members of a group.
class Sender {
 public:
  virtual ~Sender() = default;
  virtual void send(int member, FrameHeader header, Payload payload) REQUIRES(network_thread) = 0;
};

class Channel;

class Connections final : private Sink {
 public:
  // Starts listening. Throws std::runtime_error if it cannot.
  explicit Connections(TransportOptions options);
  ~Connections() override;

  // Returns those of this process with these options and reserves them for the group. New ones are opened if there
  // are none, if they serve another rank of this group in this process, or if a peer of theirs was lost: it may still
  // believe in a connection that this process has given up. That does not matter where the caller knows which former
  // peers the group meets again (`returning`: their places), and none of those was lost.
  static std::shared_ptr<Connections> shared(const TransportOptions& options, const std::string& group,
                                             const std::optional<std::vector<Place>>& returning = {});
  void release(const std::string& group);

  // Any thread.
  Transport& transport() { return *transport_; }
  bool over_fabric() const { return !options_.fabric.empty(); }

  // For channels, with the NetworkLock, which the first one asserts.
  void assert_here() const ASSERT_CAPABILITY(network_thread) { transport_->assert_here(); }
  // Throws std::runtime_error if another group here has its number.
  void attach(Channel& channel) REQUIRES(network_thread);
  // Members that have joined before the channel was attached.
  void replay_joins(Channel& channel) REQUIRES(network_thread);
  void detach(Channel& channel) REQUIRES(network_thread);
  // `calls`: this process opens the connections.
  int peer_of(const Place& place, bool calls) REQUIRES(network_thread);
  std::size_t num_connections(int peer) REQUIRES(network_thread);
  // Of `wanted` connections that this process calls, the first one that nobody has called yet. The caller calls them.
  int begin_calls(int peer, int wanted) REQUIRES(network_thread);
  void calls_failed(int peer, int num_called) REQUIRES(network_thread);
  void tell(int peer, FrameType type, std::uint32_t group, Payload payload) REQUIRES(network_thread);
  void peer_was_lost(const Place& place);
  void drop_peer(int peer, const std::string& why) REQUIRES(network_thread);

 private:
  bool has_lost(const std::optional<std::vector<Place>>& returning) const;

  struct EarlyJoin {
    Identity who;
    bool left = false;
    std::string why;
  };

  // Sink
  int on_introduction(const Introduction& who, std::string& why_not) override;
  void on_connected(int peer) override;
  std::shared_ptr<std::byte> place_for(int peer, const FrameHeader& header) override;
  void on_frame(int peer, const FrameHeader& header, Payload payload) override;
  void on_down(int peer, const std::string& why) override;
  void on_tick() override;
  void on_error(const std::string& what) override;

  void on_join(int peer, const FrameHeader& header, const Payload& payload) REQUIRES(network_thread);
  void on_leave(int peer, std::uint32_t group, const std::string& why) REQUIRES(network_thread);
  std::vector<Channel*> channels() REQUIRES(network_thread);

  const TransportOptions options_;
  std::set<std::string> reserved_;  // groups; guarded by the registry's lock
  mutable Mutex lost_mutex_;
  std::set<std::string> lost_ GUARDED_BY(lost_mutex_);  // names of processes
  bool lost_a_helper_ GUARDED_BY(lost_mutex_) = false;
  std::unordered_map<std::uint32_t, Channel*> channels_ GUARDED_BY(network_thread);
  Processes processes_ GUARDED_BY(network_thread);
  std::map<std::pair<std::uint32_t, int>, EarlyJoin> early_ GUARDED_BY(network_thread);  // by group and peer
  LeftGroups left_ GUARDED_BY(network_thread);

  std::unique_ptr<Transport> transport_;
};

class Channel final : public Sender, public std::enable_shared_from_this<Channel> {
 public:
  struct Member {
    Place place;
    int num_data = 0;   // connections for data
    int most_data = 0;  // once there is data: until they stand, it goes over the control connection
    bool later = false;  // not connected before there is something for it
  };

  Channel(std::shared_ptr<Connections> connections, std::string name);
  ~Channel() override;

  int port() const { return port_; }
  // By which the process proves who it is.
  const PublicKey& public_key() const { return public_key_; }

  void assert_here() const ASSERT_CAPABILITY(network_thread) { connections_.assert_here(); }

  // Joins the group: `members[self]` is this process. Throws std::runtime_error if that is not possible.
  void open(const Identity& me, int self, const std::vector<Member>& members, ChannelEvents& events);
  // Connects to a member, if this process is the one that calls and no other group has. Throws std::runtime_error with
  // the address and the reason, and soon after `stopped` is set.
  void call(int member, double timeout_s, const std::atomic<bool>* stopped = nullptr) { call(member, false, timeout_s, stopped); }
  // Waits until all members have joined and are connected; returns those that have not after `timeout_s`.
  std::vector<int> await_members(double timeout_s);

  // Runs a task on the network thread, or not at all once the channel is closed. Any thread.
  void post(std::function<void()> task);
  // Waits until the members have received what is queued now; returns false if there is no progress for `timeout_s`.
  bool flush(double timeout_s);
  // Leaves the group. Afterwards nothing calls its events, and nothing that it has sent points into its memory. The
  // last channel of the connections closes them.
  void close(const std::string& why);
  // Bytes and frames of this group; the process's connections, rejected ones, and what libfabric carries.
  std::map<std::string, std::uint64_t> counters();

  void send(int member, FrameHeader header, Payload payload) override REQUIRES(network_thread);
  // Has no more to do with a member: what is queued for it points to memory that others' answers release.
  void drop(int member, const std::string& why) REQUIRES(network_thread);
  // Another member tells that this one is lost or has left. One that is connected tells it itself.
  void lost_elsewhere(int member, const std::string& why) REQUIRES(network_thread);
  void drop_data() REQUIRES(network_thread);
  void write_queued() REQUIRES(network_thread) { connections_.transport().write_queued(); }

  // For Connections, on the network thread.
  const std::string& group() const { return me_.group; }
  std::uint32_t number() const { return number_; }
  void connected(int peer) REQUIRES(network_thread);
  void knocked(int peer) REQUIRES(network_thread);
  void admit(int peer, const Identity& who) REQUIRES(network_thread);
  std::shared_ptr<std::byte> place_for(int peer, const FrameHeader& header) REQUIRES(network_thread);
  void receive(int peer, const FrameHeader& header, Payload payload) REQUIRES(network_thread);
  void lost(int peer, const std::string& why) REQUIRES(network_thread);
  void left(int peer, const std::string& why) REQUIRES(network_thread);
  void tick() REQUIRES(network_thread);
  void error(const std::string& what) REQUIRES(network_thread) { events_->on_error(what); }

 private:
  struct State {
    Place place;
    int num_data = 0, most_data = 0;
    bool later = false;
    int peer = -1;
    bool wants_data = false;  // there is data for more than `num_data` connections
    bool asked = false;    // it has our join
    bool joined = false;   // it has the group open: we may send
    bool gone = false;     // it has left or is lost: nothing is sent to it
    bool dropped = false;  // by us: nothing of it is heard
    std::vector<std::pair<FrameHeader, Payload>> waiting = {};  // until it is connected
    std::chrono::steady_clock::time_point since = {};           // the first of them came
    std::string problem = {};                                   // of the last attempt to connect
  };

  void start(const Identity& me, int self, const std::vector<Member>& members, ChannelEvents& events)
      REQUIRES(network_thread);
  void leave(const std::string& why) REQUIRES(network_thread);
  // Of two processes, the one with the greater name calls; a helper is called.
  bool calls(const Place& place) const { return place.is_helper() || my_name_ > place.name(); }
  void introduce(int member) REQUIRES(network_thread);
  void check(int member) REQUIRES(network_thread);
  void call(int member, bool for_data, double timeout_s, const std::atomic<bool>* stopped);
  bool stands(const State& state) REQUIRES(network_thread);
  void send_waiting(int member) REQUIRES(network_thread);
  void want_data(int member, const FrameHeader& header) REQUIRES(network_thread);
  void call_soon(int member) REQUIRES(network_thread);
  void call_for_data() EXCLUDES(mutex_);
  void call_failed(int member, const std::string& why) EXCLUDES(mutex_);
  void stop_calling() EXCLUDES(mutex_);
  void end(int member, const std::string& why) REQUIRES(network_thread);
  std::shared_ptr<Connections> owner();
  template <class Call>
  auto on_network(const Call& call);
  State& at(int member) REQUIRES(network_thread) { return members_[static_cast<std::size_t>(member)]; }

  const std::string name_;  // of the group, in messages
  Connections& connections_;  // valid while owner_ is
  const int port_;
  const PublicKey public_key_;
  Identity me_;  // set by open(), as are the next two
  std::string my_name_;
  std::uint32_t number_ = 0;
  ChannelEvents* events_ GUARDED_BY(network_thread) = nullptr;  // null: not open
  std::vector<State> members_ GUARDED_BY(network_thread);
  std::unordered_map<int, int> member_of_ GUARDED_BY(network_thread);  // by peer

  std::atomic<std::uint64_t> bytes_sent_{0}, bytes_received_{0}, frames_sent_{0}, frames_received_{0};
  Mutex mutex_;
  Condition changed_;
  std::set<int> missing_ GUARDED_BY(mutex_);  // members
  std::deque<int> to_call_ GUARDED_BY(mutex_);  // members with data and no connection for it
  std::thread caller_ GUARDED_BY(mutex_);       // calls them, once there are any
  std::atomic<bool> stops_calling_{false};
  std::shared_ptr<Connections> owner_ GUARDED_BY(mutex_);  // until close()
  std::map<std::string, std::uint64_t> last_counters_ GUARDED_BY(mutex_);  // of the process, at close()
};

}  // namespace shoal
