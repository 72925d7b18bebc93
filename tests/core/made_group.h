// The parts of an engine without sockets, for tests of one part at a time: a group, by default of three ranks on hosts
// of their own and a helper, seen from rank 0, with a sender that keeps what is sent.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/chunk_path.h"

namespace made {

struct Sending {
  int peer;
  shoal::FrameHeader header;
  shoal::Payload payload;
};

class KeptFrames : public shoal::Sender {
 public:
  void send(int peer, shoal::FrameHeader header, shoal::Payload payload) override {
    sent.push_back({peer, header, std::move(payload)});
  }

  // Removes and returns the frames of this type.
  std::vector<Sending> take(shoal::FrameType type) {
    std::vector<Sending> taken, others;
    for (Sending& each : sent) (each.header.type == type ? taken : others).push_back(std::move(each));
    sent = std::move(others);
    return taken;
  }

  std::vector<Sending> sent;
};

inline shoal::Members members() {
  shoal::Members members{"g", 0, {}, {{"10.0.1.0", 2, "h0"}}};
  for (int rank = 0; rank < 3; ++rank) {
    members.peers.push_back({std::string(1, static_cast<char>('a' + rank)), "10.0.0." + std::to_string(rank), 1, rank, 100 + rank});
  }
  return members;
}

struct Parts {
  static constexpr int kMe = 0, kFirst = 1, kSecond = 2, kHelper = 3;

  Parts() : Parts(made::members(), {kMe, {"a", "b", "c"}, 1, {0, 1, 2, 3}}) {}

  Parts(shoal::Members group, shoal::Topology servers) : members(std::move(group)), topology(std::move(servers)) {
    options.rank = members.rank;
    options.size = members.size();
    options.group = members.group;
    ops.open();
  }

  // Issues an operation, as Engine::submit does, cut into these chunks or as the topology does.
  shoal::OpPtr issue(shoal::OpSpec spec, std::vector<shoal::Chunk> chunks = {}) {
    auto op = std::make_shared<shoal::Op>(std::move(spec));
    op->chunks = chunks.empty() ? topology.divide(op->spec, options, false, fused) : std::move(chunks);
    op->num_links = topology.num_links(op->spec.kind);
    op->parts.resize(op->chunks.size());
    ops.add({op});
    return op;
  }

  // Issues an all_reduce of `x`.
  shoal::OpPtr all_reduce(std::vector<float>& x) {
    shoal::OpSpec spec;
    spec.kind = shoal::Kind::all_reduce;
    spec.element = shoal::Element::float32;
    spec.count = x.size();
    spec.shape = {static_cast<std::int64_t>(x.size())};
    spec.input = reinterpret_cast<const std::byte*>(x.data());
    spec.output = reinterpret_cast<std::byte*>(x.data());
    return issue(std::move(spec));
  }

  // A frame of another rank that has begun and completed so many operations.
  static shoal::FrameHeader progress(std::uint64_t submitted, std::uint64_t completed) {
    shoal::FrameHeader header;
    header.submitted = submitted;
    header.completed = completed;
    return header;
  }

  shoal::NetworkLock lock;
  shoal::NetworkHold hold{lock};
  shoal::EngineOptions options;
  shoal::Members members;
  shoal::Topology topology;
  shoal::FusedBuffer fused;
  shoal::BufferPool pool;
  KeptFrames frames;
  shoal::OpTable ops{"g"};
  shoal::Journal journal;
  shoal::Mailbox mailbox{frames, members, topology, ops};
  shoal::Router router{members, topology, true};
};

}  // namespace made
