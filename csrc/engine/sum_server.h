// Collects the contributions to each chunk, reduces them in host order when all have arrived, and answers. Used by
// colocated servers and helper hosts; independent of sockets. The claims of a frame are checked against what the
// process knows of its sender.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/served_weights.h"
#include "engine/types.h"
#include "transport/frame.h"

namespace shoal {

class SumServer {
 public:
  // Answers a contributor: `header` is of type result; an empty payload is only a confirmation. `peer` is the number
  // passed to contribute().
  using Answer = std::function<void(int peer, const FrameHeader& header, const Payload& payload)>;
  // A peer, and the host on which this process knows it to be.
  struct Contributor {
    int peer, host;
  };
  struct Sender {
    int peer = -1;
    std::uint64_t signature = 0;
    std::string sent;  // description of the elements
  };
  // Two peers' frames of one chunk that conflict.
  struct Conflict {
    std::uint64_t seq = 0, chunk = 0;
    Sender first, second;
  };
  using OnConflict = std::function<void(const Conflict&)>;
  // Sends the sum of a chunk to the peer that has a copy of the weights that it changes. Returns the peer, or -1.
  using SendCopy = std::function<int(const FrameHeader&, const Payload& sum)>;

  // For a group on so many hosts. `budget` bounds the weights that the server keeps. `send_copy` is a helper's: there are
  // no copies of what ranks keep.
  SumServer(BufferPool& pool, WeightBudget& budget, int num_hosts, Answer answer, OnConflict on_conflict,
            SendCopy send_copy = {})
      : pool_(pool),
        weights_(pool, budget),
        num_hosts_(num_hosts),
        answer_(std::move(answer)),
        on_conflict_(std::move(on_conflict)),
        send_copy_(std::move(send_copy)) {}

  // Return an empty string, or why the frame is malformed. Throw GroupFailure if there is no memory for weights.
  // `place`: where to write the sum, if this server's own rank contributes; may be the contribution's. Null: into a buffer.
  std::string contribute(Contributor from, const FrameHeader& header, Payload payload,
                         std::shared_ptr<std::byte> place = nullptr);
  // Accepts a result that a worker already has, after its server was lost: all contribute again, if at all.
  std::string supply(Contributor from, const FrameHeader& header, Payload payload);
  // Accepts the sum of a chunk from the helper `peer`, of whose weights there is a copy here: takes the same step, and
  // confirms it by an answer of type copied. Contributors are answered once they ask, when the helper is lost.
  std::string take_copy(int peer, const FrameHeader& header, Payload sum);
  // On the helper: the copy has taken the sum, so the contributors may know the result. The answer to the one that has the
  // copy is empty where it would be weights: it takes them from weights_of_copy().
  std::string confirm_copy(int peer, const FrameHeader& header);
  // The weights of a chunk after the step with a copied sum; empty: there was none.
  Payload weights_of_copy(const FrameHeader& header) const;

  // All ranks have completed the operations below `seq`: drops what was kept for late contributors.
  void forget_below(std::uint64_t seq);
  void clear();

  // Bytes that keep the chunk of this frame beside its contributions, or 0 where there are some already.
  std::size_t bytes_to_begin(const FrameHeader& header) const;
  // Bytes of contributions that wait for others. Any thread.
  std::size_t held_bytes() const { return held_bytes_; }
  std::uint64_t num_summed() const { return num_summed_; }

 private:
  struct Contribution {
    int peer = -1;
    Payload payload;
    std::shared_ptr<std::byte> place;
    bool present = false;
  };
  struct State {
    std::vector<Contribution> contributions;
    std::size_t num_present = 0;
    int first_peer = -1;
    FrameHeader first;      // of the first frame; the others must match
    std::size_t count = 0;  // elements of the chunk
    bool summed = false;
    bool kept = false;  // answers late contributors until forget_below()
    int asked_by = -1;      // a peer that has contributed here first: this is the chunk's server in the pattern
    int supplied_by = -1;   // the peer that has supplied the result
    Payload result;         // the sum at first, where it was sent as a copy
    int copy_from = -1;     // the helper that waits for this copy
    int copy_to = -1;       // the peer whose copy this server waits for
  };
  struct Key {
    std::uint64_t seq, chunk;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const { return key.seq * 0x9e3779b97f4a7c15ULL + key.chunk; }
  };

  std::string check(int host, const FrameHeader& header, Element element, std::size_t bytes) const;
  State& state_of(int peer, const FrameHeader& header, std::size_t count);
  State* open(int peer, const FrameHeader& header, std::size_t count);
  std::string refuse_supply(const State& state, const FrameHeader& header);
  std::string complete(const FrameHeader& header, State& state);
  std::string combine(const FrameHeader& header, State& state);
  Payload sum_up(const FrameHeader& header, State& state);
  std::string combine_early();
  void answer_all(const FrameHeader& header, State& state, int stepped = -1);
  void answer_to(int peer, FrameHeader header, const Payload& result);

  BufferPool& pool_;
  ServedWeights weights_;
  std::vector<Key> early_;  // complete updates whose options have not come
  const int num_hosts_;
  Answer answer_;
  OnConflict on_conflict_;
  SendCopy send_copy_;
  std::unordered_map<Key, State, Hash> chunks_;
  std::atomic<std::size_t> held_bytes_{0};
  std::uint64_t num_summed_ = 0;
};

}  // namespace shoal
