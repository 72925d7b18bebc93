// Sends frames to the members of a group, each stamped with this rank's progress. On the network thread.
#pragma once

#include <string>

#include "base/mutex.h"
#include "engine/op_table.h"
#include "engine/options.h"
#include "transport/connections.h"

namespace shoal {

class Mailbox {
 public:
  // A frame without elements, for all members.
  struct Notice {
    FrameType type;
    std::uint64_t seq = 0, chunk = 0, signature = 0;
    std::string text = {};
  };

  Mailbox(Sender& sender, const Members& members, const OpTable& ops)
      : sender_(sender), members_(members), ops_(ops) {}

  void send(int peer, FrameHeader header, Payload payload) REQUIRES(network_thread);
  // Sends to all other ranks; a heartbeat and a goodbye to helpers too.
  void broadcast(const Notice& notice) REQUIRES(network_thread);
  void beat(int peer) REQUIRES(network_thread) { send(peer, {}, {}); }

 private:
  Sender& sender_;
  const Members& members_;
  const OpTable& ops_;
};

}  // namespace shoal
