// The weights and optimizer state that a server keeps for a group, and the steps that it takes with summed gradients.
//
// A tensor has a number, its table. It is cut into pieces, the chunks of its operations, each on one server for as long
// as the group exists. Four kinds of operation concern them; all of them sum, and what a rank receives is:
//   configure  the optimizer's options of the next steps: bytes, see Rule            the same bytes
//   load       slot `root` of a piece (0: weights, 1 and 2: state), after `step` updates   the same numbers
//   dump       ignored                                                              slot `root` of the piece
//   update     the summed gradient, with the options of group `root` of rule `rule`     the weights after it
// An update has number `step` of its tensor, one more than the piece's last. One that overtakes its options waits for
// them (SumServer). Ranks agree about all of this by the operations' signatures; the server checks it again.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/types.h"
#include "transport/frame.h"

namespace shoal {

// Bytes of weights and state that a process may keep for all its groups. Any thread.
struct WeightBudget {
  // 0: half of the machine's memory.
  explicit WeightBudget(std::size_t bytes = 0);

  const std::size_t max_bytes;
  std::atomic<std::size_t> used_bytes{0};
};

// Options of one step, as a configure carries them: u32 number, u32 optimizer, u32 number of groups, u32 0; then
// for each group six doubles. SGD: learning rate, momentum, weight decay, nesterov (0 or 1), 0, 0. AdamW: learning rate,
// beta1, beta2, eps, weight decay, 0.
struct Rule {
  enum class Optimizer : std::uint32_t { sgd, adamw };

  std::uint32_t number = 0;
  Optimizer optimizer = Optimizer::sgd;
  std::vector<std::array<double, 6>> groups;
};

class ServedWeights {
 public:
  explicit ServedWeights(WeightBudget& budget) : budget_(budget) {}
  ~ServedWeights() { clear(); }
  ServedWeights(const ServedWeights&) = delete;
  ServedWeights& operator=(const ServedWeights&) = delete;

  // Returns whether an update has come before its options.
  bool is_early(const FrameHeader& header) const {
    return static_cast<Kind>(header.kind) == Kind::update && header.rule == rule_.number + 1;
  }
  // Takes the sum of a chunk and replaces it by what the ranks receive. Returns an empty string, or what is wrong.
  std::string take(const FrameHeader& header, std::byte* sum, std::size_t bytes);

  void clear();

 private:
  static constexpr int kSlots = 3;
  struct Piece {
    std::array<std::vector<float>, kSlots> slots;  // an empty one is not kept
    std::uint32_t step = 0;                        // updates taken
  };
  struct Key {
    std::uint32_t table;
    std::uint64_t chunk;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const { return key.table * 0x9e3779b97f4a7c15ULL + key.chunk; }
  };

  std::string configure(const std::byte* data, std::size_t bytes);
  std::string load(const FrameHeader& header, const std::byte* data, std::size_t bytes);
  std::string dump(const FrameHeader& header, std::byte* data, std::size_t bytes);
  std::string update(const FrameHeader& header, std::byte* data, std::size_t bytes);
  std::string make_room(std::vector<float>& slot, std::size_t count);
  void step(Piece& piece, const std::array<double, 6>& options, const float* grad) const;

  WeightBudget& budget_;
  std::size_t used_bytes_ = 0;
  Rule rule_;
  std::unordered_map<Key, Piece, Hash> pieces_;
};

}  // namespace shoal
