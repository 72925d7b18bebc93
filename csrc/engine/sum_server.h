// Collects the contributions to each chunk, combines them in host order when all are there, and answers.
// The same code serves a colocated server and a helper host; it knows nothing of sockets.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/frame.h"

namespace shoal {

class SumServer {
 public:
  // Answers a contributor: `header` is of type result, an empty payload only confirms. `peer` is the number that
  // contribute() was given.
  using Answer = std::function<void(int peer, const FrameHeader& header, const Payload& payload)>;
  // Two contributions to one chunk ask for different things.
  using Disagree = std::function<void(std::uint64_t seq)>;

  SumServer(BufferPool& pool, Answer answer, Disagree disagree)
      : pool_(pool), answer_(std::move(answer)), disagree_(std::move(disagree)) {}

  // Returns an empty string, or what is wrong with the frame.
  std::string contribute(int peer, const FrameHeader& header, Payload payload);
  // A result that a worker holds already, after its server was lost.
  void supply(const FrameHeader& header, Payload payload);

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
    std::uint64_t signature = 0;
    FrameHeader first;  // of the first contribution: the others' words must be the same
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

  void combine(const FrameHeader& header, State& state);
  void answer_to(int peer, FrameHeader header, const State& state);

  BufferPool& pool_;
  Answer answer_;
  Disagree disagree_;
  std::unordered_map<Key, State, Hash> chunks_;
  std::atomic<std::size_t> held_bytes_{0};
  std::uint64_t num_summed_ = 0;
};

}  // namespace shoal
