// Server process of a helper host, for any number of groups.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>

#include "base/log.h"
#include "engine/sum_memory.h"
#include "engine/sum_server.h"
#include "transport/identity.h"
#include "transport/open.h"

namespace shoal {

class HelperServer : private Sink {
 public:
  static constexpr std::size_t kMaxGroups = 4096;

  // Starts listening. `max_weight_bytes` bounds the weights that it keeps for all groups, `max_sum_bytes` what waits for
  // other processes; 0: half of the memory.
  // `num_threads` read and write its connections.
  // Throws std::runtime_error if it cannot.
  HelperServer(const std::string& address, int port, Bytes secret, int send_buffer_bytes,
               const std::string& fabric = "", std::uint64_t shuffle = 0, std::size_t max_groups = kMaxGroups,
               std::size_t max_weight_bytes = 0, int num_threads = 1, std::size_t max_sum_bytes = 0);
  ~HelperServer() override;

  int port() const { return transport_->port(); }
  void start() { transport_->start(); }
  void stop();
  std::map<std::string, std::uint64_t> counters();

 private:
  struct Member {
    int rank = 0;
    int host = 0;
    bool said_goodbye = false;
    bool left = false;  // nothing is sent to it; frames that it sent before may still come
  };
  struct Group {
    std::string name;
    int size = 0;
    int num_hosts = 1;
    std::string marks;  // as in Identity
    std::unique_ptr<SumServer> server;
    std::map<int, Member> members;  // by peer
    std::map<int, std::uint64_t> completed;  // by rank
  };
  using Groups = std::map<std::uint32_t, Group>;  // by number

  using ChunkKey = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>;  // group, operation, chunk

  int on_introduction(const Introduction& who, std::string& why_not) override;
  void on_connected(int) override {}
  bool admits(int peer, const FrameHeader& header) override;
  void on_frame(int peer, const FrameHeader& header, Payload payload) override;
  void on_down(int peer, const std::string& why) override;
  void on_tick() override;
  void on_error(const std::string& what) override;

  void on_join(int peer, const FrameHeader& header, const Payload& payload);
  std::string admit(int peer, std::uint32_t number, const Identity& who);
  void open_group(std::uint32_t number, const Identity& who);
  void on_data(int peer, const FrameHeader& header, Payload payload);
  SumMemory& memory();
  void require_memory(int peer);
  void resume(int peer);
  void resume_stalled(const ChunkKey& begun);
  void leave(Groups::iterator group, int peer, const std::string& why);
  std::string name_of(int peer);
  void drop_peer(int peer, const std::string& why);
  void give_memory_back();
  int send_copy(std::uint32_t number, FrameHeader header, const Payload& sum);
  void report_conflict(std::uint32_t number, const SumServer::Conflict& conflict);
  void send(int peer, std::uint32_t number, FrameHeader header, const Payload& payload);
  void tell_group(std::uint32_t number, FrameHeader header, const std::string& text);
  void log(const std::string& line);

  const std::size_t max_groups_;
  WeightBudget budget_;
  SumMemory memory_;
  bool members_changed_ = false;  // since it was shared out
  LineLimit lines_;
  Groups groups_;
  LeftGroups left_;
  Processes processes_;
  std::multimap<ChunkKey, int> awaits_;  // chunks of frames that were not admitted, and their peers
  std::set<int> stalled_;                // these peers
  std::set<int> may_add_;                // peers that have had no frame above the usual bytes since the last tick
  bool group_ended_ = false;  // since the last tick
  std::atomic<std::uint64_t> num_groups_{0}, num_summed_{0}, held_bytes_{0};
  std::unique_ptr<Transport> transport_;
};

}  // namespace shoal
