// One rank of a group by its parts, without threads and sockets: what it sends is kept, and frames are given to it as
// Engine::dispatch does. Ranks are on hosts of their own.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "made_group.h"

namespace made {

class Rank : public Parts {
 public:
  // `pattern`: servers of consecutive chunks; ranks first, then helpers.
  Rank(int me, int size, int num_helpers, std::vector<int> pattern, std::size_t chunk_bytes)
      : Parts(of(me, size, num_helpers), {me, hosts(size), num_helpers, std::move(pattern)}) {
    options.chunk_bytes = chunk_bytes;
  }

  // Issues a collective, and begins it.
  shoal::OpPtr begin(shoal::OpSpec spec, std::vector<shoal::Chunk> chunks = {}) {
    shoal::OpPtr op = issue(std::move(spec), std::move(chunks));
    path.begin(op);
    return op;
  }

  // May throw GroupFailure or ProtocolError, as the parts do.
  void take(int peer, const shoal::FrameHeader& header, shoal::Payload payload) {
    using shoal::FrameType;
    if (liveness.heard(peer, header)) path.on_begun(peer);
    switch (header.type) {
      case FrameType::push: return path.on_push(peer, header, std::move(payload));
      case FrameType::result: return path.deliver(peer, header, std::move(payload));
      case FrameType::supply: return path.on_supply(peer, header, std::move(payload));
      case FrameType::copy: return path.on_copy(peer, header, std::move(payload));
      case FrameType::order: return path.on_order(peer, header);
      case FrameType::announce: return mismatch.on_announcement(peer, header, shoal::text_of(payload));
      case FrameType::mismatch: return mismatch.on_mismatch(peer, header);
      case FrameType::server_down:
        if (header.chunk >= members.helpers.size()) throw shoal::ProtocolError(peer, "there is no such helper");
        return lose(members.size() + static_cast<int>(header.chunk), false);
      default: return;
    }
  }

  // A helper is lost; `tell`: this rank has noticed it itself.
  void lose(int server, bool tell) {
    if (!router.lose(server)) return;
    dropped(server);
    const auto index = static_cast<std::uint64_t>(server - members.size());
    if (tell) mailbox.broadcast({shoal::FrameType::server_down, 0, index, 0, "lost"});
    path.reroute(server);
  }

  void progress() {
    path.forget_below(liveness.num_completed_by_all());
    mismatch.forget_below(liveness.num_completed_by_all());
  }

  shoal::Liveness liveness{members, topology, router, ops, mailbox, journal, 1.0};
  shoal::MismatchDetector mismatch{members, ops, mailbox};
  std::vector<std::function<void()>> posted;
  std::function<void(int)> dropped = [](int) {};  // what is queued for a lost helper
  shoal::ChunkPath path{{options, members, topology, router, ops, mailbox, liveness, mismatch, journal, pool, {},
                         [this](std::function<void()> step) { posted.push_back(std::move(step)); }}};

 private:
  static std::vector<std::string> hosts(int size) {
    std::vector<std::string> names;
    for (int rank = 0; rank < size; ++rank) names.push_back("h" + std::to_string(rank));
    return names;
  }

  static shoal::Members of(int me, int size, int num_helpers) {
    shoal::Members members{"g", me, {}, {}};
    for (int rank = 0; rank < size; ++rank) {
      members.peers.push_back({"h" + std::to_string(rank), "10.0.0." + std::to_string(rank), 1, rank, 100 + rank});
    }
    for (int k = 0; k < num_helpers; ++k) members.helpers.push_back({"10.0.1." + std::to_string(k), 2, "helper" + std::to_string(k)});
    return members;
  }
};

}  // namespace made
