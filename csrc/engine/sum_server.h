// Collects the contributions to each chunk, combines them in host order when all are there, and answers.
// The same code serves a colocated server and a helper host; it knows nothing of sockets. A frame's word about
// itself is checked against what the process knows of its sender.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/types.h"
#include "transport/frame.h"

namespace shoal {

class SumServer {
 public:
  // Answers a contributor: `header` is of type result, an empty payload only confirms. `peer` is the number that
  // contribute() was given.
  using Answer = std::function<void(int peer, const FrameHeader& header, const Payload& payload)>;
  // Who may contribute: the number of hosts in the group, and the host of each peer.
  struct Members {
    int num_hosts = 1;
    std::function<int(int peer)> host_of;
  };
  struct Sender {
    int peer = -1;
    std::uint64_t signature = 0;
    std::string sent;  // the elements, in words
  };
  // The frames of two peers about one chunk do not fit each other.
  struct Conflict {
    std::uint64_t seq = 0, chunk = 0;
    Sender first, second;
  };
  using OnConflict = std::function<void(const Conflict&)>;

  SumServer(BufferPool& pool, Members members, Answer answer, OnConflict on_conflict)
      : pool_(pool), members_(std::move(members)), answer_(std::move(answer)), on_conflict_(std::move(on_conflict)) {}

  // Both return an empty string, or what is wrong with the frame.
  std::string contribute(int peer, const FrameHeader& header, Payload payload);
  // A result that a worker holds already, after its server was lost.
  std::string supply(int peer, const FrameHeader& header, Payload payload);

  // All ranks have ended the operations below `seq`: what was kept for late contributors may go.
  void forget_below(std::uint64_t seq);
  void clear();

  // Of contributions that wait for others. Any thread.
  std::size_t held_bytes() const { return held_bytes_; }
  std::uint64_t num_summed() const { return num_summed_; }

 private:
  struct Contribution {
    int peer = -1;
    Payload payload;
    bool present = false;
  };
  struct State {
    std::vector<Contribution> contributions;
    std::size_t num_present = 0;
    int first_peer = -1;
    FrameHeader first;      // the words of the first frame: the others' must be the same
    std::size_t count = 0;  // elements of the chunk
    bool summed = false;
    bool kept = false;  // answers late contributors until forget_below()
    Payload result;
  };
  struct Key {
    std::uint64_t seq, chunk;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const { return key.seq * 0x9e3779b97f4a7c15ULL + key.chunk; }
  };

  std::string check(int peer, const FrameHeader& header, Element element, std::size_t bytes) const;
  State* open(int peer, const FrameHeader& header, std::size_t count);
  void combine(const FrameHeader& header, State& state);
  void answer_to(int peer, FrameHeader header, const State& state);

  BufferPool& pool_;
  Members members_;
  Answer answer_;
  OnConflict on_conflict_;
  std::unordered_map<Key, State, Hash> chunks_;
  std::atomic<std::size_t> held_bytes_{0};
  std::uint64_t num_summed_ = 0;
};

}  // namespace shoal
