// Server process of a helper host, for any number of groups.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/log.h"
#include "engine/sum_server.h"
#include "transport/open.h"

namespace shoal {

class HelperServer : private Sink {
 public:
  // Starts listening. Throws std::runtime_error if it cannot.
  HelperServer(const std::string& address, int port, Bytes secret, int send_buffer_bytes,
               const std::string& fabric = "", std::uint64_t shuffle = 0);
  ~HelperServer() override;

  int port() const { return transport_->port(); }
  void start() { transport_->start(); }
  void stop();
  std::map<std::string, std::uint64_t> counters();

 private:
  struct Group {
    std::unique_ptr<SumServer> server;
    std::map<int, int> peer_of;  // rank -> peer
    std::map<int, std::uint64_t> completed;
    int size = 0;
    int num_hosts = 1;
  };
  struct Member {
    std::string group;
    int rank = 0;
    int host = 0;
    bool left = false;  // it has sent goodbye
  };

  int on_identity(const Identity& who, std::string& why_not) override;
  void on_frame(int peer, const FrameHeader& header, Payload payload) override;
  void on_down(int peer, const std::string& why) override;
  void on_tick() override;
  void on_error(const std::string& what) override;
  Group& open_group(const Identity& who);
  void report_conflict(const std::string& group, const SumServer::Conflict& conflict);
  void tell_group(const std::string& group, FrameHeader header, const std::string& text);
  void log(const std::string& line);

  BufferPool pool_;
  LineLimit lines_;
  std::map<std::string, Group> groups_;
  std::map<int, Member> members_;
  int next_peer_ = 0;
  std::atomic<std::uint64_t> num_groups_{0}, num_summed_{0}, held_bytes_{0};
  std::unique_ptr<Transport> transport_;
};

}  // namespace shoal
