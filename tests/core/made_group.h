// The parts of an engine without sockets, for tests of one part at a time: a group of three ranks on hosts of their
// own and a helper, seen from rank 0, over a transport that keeps what is sent.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/chunk_path.h"

namespace made {

struct Sending {
  int peer;
  shoal::FrameHeader header;
  shoal::Payload payload;
};

class KeptTransport : public shoal::Transport {
 public:
  int port() const override { return 0; }
  void start() override {}
  void stop() override {}
  void set_peer(int, const std::string&, int) override {}
  void call_peer(int, const shoal::Introduction&, double) override {}
  bool wait_for_connections(const std::vector<std::size_t>&, double) override { return true; }
  std::size_t connections_of(int) override { return 0; }
  bool flush(double) override { return true; }
  void post(std::function<void()> task) override { task(); }
  void send(int peer, shoal::FrameHeader header, shoal::Payload payload) override {
    sent.push_back({peer, header, std::move(payload)});
  }
  void drop(int) override {}
  void drop_data() override {}
  std::map<std::string, std::uint64_t> counters() const override { return {}; }

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

  Parts() {
    options.rank = kMe;
    options.size = 3;
    options.group = "g";
    ops.open();
    thread.assert_here();
  }

  // Issues an all_reduce of `x`, as Engine::submit does.
  shoal::OpPtr all_reduce(std::vector<float>& x) {
    auto op = std::make_shared<shoal::Op>();
    op->spec.kind = shoal::Kind::all_reduce;
    op->spec.element = shoal::Element::float32;
    op->spec.count = x.size();
    op->spec.shape = {static_cast<std::int64_t>(x.size())};
    op->spec.input = reinterpret_cast<const std::byte*>(x.data());
    op->spec.output = reinterpret_cast<std::byte*>(x.data());
    op->signature = shoal::signature_of(op->spec);
    op->begun = std::chrono::steady_clock::now();
    op->chunks = topology.cut(op->spec, options.chunk_bytes, fused);
    op->parts.resize(op->chunks.size());
    ops.add(op);
    return op;
  }

  // A frame of another rank that has begun and completed so many operations.
  static shoal::FrameHeader progress(std::uint64_t submitted, std::uint64_t completed) {
    shoal::FrameHeader header;
    header.submitted = submitted;
    header.completed = completed;
    return header;
  }

  shoal::LoopThread thread;
  shoal::EngineOptions options;
  shoal::Members members = made::members();
  shoal::Topology topology{kMe, {"a", "b", "c"}, 1, {0, 1, 2, 3}};
  shoal::FusedBuffer fused;
  shoal::BufferPool pool;
  KeptTransport transport;
  shoal::OpTable ops{"g"};
  shoal::Journal journal;
  shoal::Mailbox mailbox{transport, members, ops};
  shoal::Router router{members, topology, true};
};

}  // namespace made
