// Small operations among the ranks of one host, moved as a whole: no chunks, no slots, no other thread.
//
// Each rank copies its input into its cell. The last one to arrive reduces the cells, in rank order, and announces the
// result; every rank copies out what it needs. A cell is used again when all ranks have taken the result of the
// operation that used it before. Two copies and one exchange of cache lines: about a microsecond for 64 bytes.
//
// HostStage calls it under its lock, on whatever thread advances this rank's operations.
#pragma once

#include <deque>

#include "engine/op_table.h"
#include "engine/stage_hooks.h"
#include "transport/shm.h"

namespace shoal {

class DirectExchange {
 public:
  static constexpr std::size_t kNumCells = 8;
  static std::size_t cell_bytes(int num_ranks);
  // Whether all ranks move this operation here. Depends on the specification and the number of ranks only.
  static bool takes(const OpSpec& spec, int num_ranks);

  DirectExchange(SharedSegment& shm, int rank, const StageHooks& hooks)
      : shm_(shm), hooks_(hooks), me_(rank), num_ranks_(shm.layout().num_ranks) {}

  void add(OpPtr op) { waiting_.push_back(std::move(op)); }
  // Advances as far as possible without waiting. Returns whether anything moved.
  bool step();
  bool idle() const { return waiting_.empty() && entered_.empty(); }
  // Ranks issued different operations: nothing moves any more.
  bool diverged() const { return diverged_; }

 private:
  bool cell_is_free();
  void enter(const OpPtr& op);
  void complete(const Op& op);
  bool agreed(const Op& op);
  void leave(const Op& op);

  SharedSegment& shm_;
  const StageHooks& hooks_;
  const int me_, num_ranks_;
  std::deque<OpPtr> waiting_, entered_;  // for a cell; for the result
  std::uint64_t num_entered_ = 0, num_left_ = 0;
  bool diverged_ = false;
};

}  // namespace shoal
