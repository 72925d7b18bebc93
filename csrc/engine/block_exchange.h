// Blocks from rank to rank of one host: all_to_all, gather and scatter of a group on one host.
//
// Each rank has a pipe of slots to each other one. The sender copies a block into slots, piece by piece, while there
// are free ones, and the receiver copies the pieces out. The first slot of a block says which operation it belongs to
// and how large it is; ranks know only the sizes of their own blocks. Blocks between two ranks follow each other in
// the order of the operations. An empty block takes a slot too, so that sizes are always compared.
//
// HostStage calls it under its lock, on whatever thread advances this rank's operations.
#pragma once

#include <deque>
#include <vector>

#include "engine/op_table.h"
#include "engine/stage_hooks.h"
#include "transport/shm.h"

namespace shoal {

class BlockExchange {
 public:
  static constexpr std::size_t kNumSlots = 4;
  static std::size_t slot_bytes(int num_ranks);
  static bool takes(Kind kind) { return by_messages(kind) && !is_message(kind); }

  BlockExchange(SharedSegment& shm, int rank, const StageHooks& hooks);

  // This rank's own block has been copied before.
  void add(const OpPtr& op);
  // Advances as far as possible without waiting. Returns whether anything moved.
  bool step();
  bool idle() const { return num_open_ == 0; }
  // Ranks issued different operations, or sizes that do not fit: nothing moves any more.
  bool diverged() const { return diverged_; }

 private:
  struct Moving {
    OpPtr op;
    std::byte* data;
    std::size_t bytes;
    std::size_t done = 0;
  };

  void open(std::vector<std::deque<Moving>>& queues, int peer, const OpPtr& op, const Block& block);
  bool fill(int peer);
  bool has_room(int peer, std::uint64_t num_filled);
  bool empty(int peer);
  bool fits(int peer, const Moving& block, const SharedSegment::BlockHead& head);
  void close(std::deque<Moving>& queue);

  SharedSegment& shm_;
  const StageHooks& hooks_;
  const int me_, num_ranks_;
  std::vector<std::deque<Moving>> going_, coming_;  // by rank
  std::size_t num_open_ = 0;                        // in all queues
  bool diverged_ = false;
};

}  // namespace shoal
