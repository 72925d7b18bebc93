// The weights and optimizer state that a server keeps for a group, and the steps that it takes with summed gradients.
//
// A tensor has a number, its table. It is cut into pieces, the chunks of its operations, each on one server for as long
// as the group exists. These kinds of operation concern them; all of them sum, and what a rank receives is:
//   configure  the optimizer's options of model `table`'s next steps: bytes, see Rule    the same bytes
//   load       slot `root` of a piece (0: weights, 1 and 2: state) of model `rule`, after `step` updates   the same numbers
//   dump       ignored                                                              slot `root` of the piece
//   update     the summed gradient, with the options of group `root` of rule `rule`     the weights after it
// Where an update depends on norms, it has two or three phases. The ranks add up the sums of all pieces, which all of
// them receive, and decide with the functions of optim that workers use:
//   collect    the summed gradient, which is kept                       the sums of squares of its units (unit_sums.h)
//   measure    coefficients: first a factor of the gradient             the sums that the optimizer needs
//   factor     a piece's coefficients: a factor of the gradient, the columns, where it begins in a row   sums of squares of rows, columns
//   normalise  factors of its rows and columns (optim/adafactor.h)      the sums that the optimizer needs
//   apply      coefficients: a factor of the gradient (SGD, AdamW), the sizes of the step (LAMB, LANS), an AdafactorMove, or a Motion   the weights after it
// Adafactor's matrices have factor and normalise in place of measure, its other tensors a measure with 1 - beta2 too.
// The weights that answer an update or apply are float32, or bfloat16 (the header's element): the server's stay float32.
// A collect may come again before the rest of its update: the step was given up. An update has number `step` of its
// tensor, one more than the piece's last. What overtakes its options waits for them (SumServer). Ranks agree about all of
// this by the operations' signatures; the server checks it again.
//
// A helper's weights may have a copy, of which every rank has a part (buddy_of). The helper then sends each sum that
// changes them (changes_weights) to that rank, which takes the same step and confirms it, and answers the ranks only
// then. The answer to that rank has no weights, since it has them. So where one rank has an answer of a helper that is
// lost, the copy has the step; and where the copy has not, all ranks have their contributions yet, and send them to it.
// Options go to all ranks in any case.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/types.h"
#include "optim/factor_parts.h"
#include "transport/frame.h"

namespace shoal {

// Bytes of weights, state and options that a process may keep for all its groups. Any thread.
struct WeightBudget {
  // 0: half of the machine's memory.
  explicit WeightBudget(std::size_t bytes = 0);

  const std::size_t max_bytes;
  std::atomic<std::size_t> used_bytes{0};
};

// Options of a group of parameters. SGD: learning rate, momentum, weight decay, nesterov (0 or 1), 0, 0. AdamW: learning
// rate, beta1, beta2, eps, weight decay, 0. LAMB: as AdamW, and bias correction (0 or 1). LANS: as AdamW. LARS: weight
// decay, 0 ... NovoGrad: 0 ... Adafactor: eps1, 0 ...
using GroupOptions = std::array<double, kOptionsOfGroup>;

// Options of one step, as a configure carries them: u32 number, u32 optimizer, u32 number of groups, u32 0; then the
// options of each group, at most kMaxOptionGroups.
struct Rule {
  enum class Optimizer : std::uint32_t { sgd, adamw, lamb, lars, novograd, lans, adafactor };

  std::uint32_t number = 0;
  Optimizer optimizer = Optimizer::sgd;
  std::vector<GroupOptions> groups;
};
inline constexpr std::size_t kPieceBytes = 256;  // of the budget, for a piece beside its numbers: tables, allocations

class ServedWeights {
 public:
  ServedWeights(BufferPool& pool, WeightBudget& budget) : pool_(pool), budget_(budget) {}
  ~ServedWeights() { clear(); }
  ServedWeights(const ServedWeights&) = delete;
  ServedWeights& operator=(const ServedWeights&) = delete;

  // Returns whether a phase of an update has come before its options.
  bool is_early(const FrameHeader& header) const;
  // Takes the sum of a chunk, which nobody else has, and replaces it by what the ranks receive. Returns an empty string, or
  // what is wrong. Throws GroupFailure if there is no memory for it.
  std::string take(const FrameHeader& header, Payload& sum);

  void clear();

 private:
  static constexpr int kSlots = 3;
  static constexpr std::uint32_t kMaxModels = 4096;
  enum class Phase : std::uint8_t { idle, collected, factored, measured };
  struct Piece {
    std::array<std::vector<float>, kSlots> slots;  // an empty one is not kept
    std::vector<float> grad;                       // from collect to apply
    std::uint32_t step = 0;                        // updates taken
    std::uint32_t model = 0;
    Phase phase = Phase::idle;
    FactorPart part{};  // from factor to normalise
  };
  // What an update reads: the piece, its rule, and the options of its group.
  struct Target {
    Piece* piece = nullptr;
    const Rule* rule = nullptr;
    const GroupOptions* options = nullptr;
    std::string wrong;  // or empty
  };
  struct Key {
    std::uint32_t table;
    std::uint64_t chunk;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const { return key.table * 0x9e3779b97f4a7c15ULL + key.chunk; }
  };

  std::string configure(std::uint32_t model, const std::byte* data, std::size_t bytes);
  std::string load(const FrameHeader& header, const std::byte* data, std::size_t bytes);
  std::string dump(const FrameHeader& header, Payload& sum);
  std::string update(const FrameHeader& header, Payload& sum);
  std::string collect(const FrameHeader& header, Payload& sum);
  std::string measure(const FrameHeader& header, Payload& sum);
  std::string factor(const FrameHeader& header, Payload& sum);
  std::string normalise(const FrameHeader& header, Payload& sum);
  std::string apply(const FrameHeader& header, Payload& sum);
  Target target_of(const FrameHeader& header);
  void make_state(Piece& piece, const Rule& rule, const GroupOptions& options);
  void reserve(std::size_t bytes);
  void make_room(std::vector<float>& slot, std::size_t count);
  Payload weights_of(const Piece& piece, const FrameHeader& header);
  Payload reply_of(const void* sums, std::size_t bytes);

  BufferPool& pool_;
  WeightBudget& budget_;
  std::size_t used_bytes_ = 0;  // of the budget
  std::unordered_map<std::uint32_t, Rule> rules_;  // by model
  std::unordered_map<Key, Piece, Hash> pieces_;
};

}  // namespace shoal
