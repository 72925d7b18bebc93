// Shared memory of the ranks of one host: rings of slots for chunks, cells for small operations, pipes for blocks from
// rank to rank, progress flags per rank, and a bell that wakes a rank's sleeping threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace shoal {

struct ShmLayout {
  int num_ranks = 1;
  std::size_t num_slots = 16;
  std::size_t slot_bytes = 0;    // of a contribution
  std::size_t result_bytes = 0;  // of a result or a wider partial sum
  std::size_t num_cells = 0;     // of each rank, for operations that move as a whole (direct_exchange.h)
  std::size_t cell_bytes = 0;
  std::size_t num_pipe_slots = 0;  // from each rank to each other one, for blocks (block_exchange.h)
  std::size_t pipe_slot_bytes = 0;
};

// The threads of a rank that sleep on its bell.
enum class Sleeper : std::uint32_t { stage = 1, caller = 2 };

class SharedSegment {
 public:
  static constexpr std::size_t kSignatures = 256;

  using Word = std::atomic<std::uint64_t>;

  // State of a cell that all ranks share.
  struct alignas(64) Round {
    Word num_arrived;  // contributions since the start
    Word done;         // one past the last operation whose result is there
  };
  // Progress of a rank in the operations that use cells.
  struct alignas(64) Progress {
    Word num_left;  // operations whose result it has taken
    std::atomic<std::uint32_t> blocked;  // it waits for a cell
  };

  // State of the slots from one rank to another.
  struct alignas(64) Pipe {
    Word num_filled;               // slots since the start, by the sender
    alignas(64) Word num_emptied;  // by the receiver
    std::atomic<std::uint32_t> blocked;  // the sender waits for a slot
  };
  // Describes the block that the bytes of a slot belong to.
  struct BlockHead {
    std::uint64_t signature;  // of the sender's operation
    std::uint64_t bytes;      // of the whole block
  };

  // Rank 0 of the host creates the segment, the others wait for it; it is unlinked once all have mapped it. Throws
  // std::runtime_error with what failed.
  SharedSegment(const std::string& name, int local_rank, const ShmLayout& layout, double timeout_s);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  const ShmLayout& layout() const { return layout_; }

  std::byte* contribution(int rank, std::uint64_t ticket);
  std::byte* result(std::uint64_t ticket);

  // Flags hold ticket + 1 once the rank has passed that point for the chunk with this ticket.
  Word& entered(int rank, std::uint64_t ticket);  // the contribution is in the slot
  Word& ready(std::uint64_t ticket);              // the result is in the slot
  Word& left(int rank, std::uint64_t ticket);     // the rank no longer needs the slot

  // A tag and the signature of the rank's operation number `index` on this host.
  Word& signature_tag(int rank, std::uint64_t index);
  Word& signature(int rank, std::uint64_t index);

  // Cells: operation `number` uses number % num_cells.
  Round& round(std::uint64_t number);
  Progress& progress(int rank);
  Word& cell_signature(int rank, std::uint64_t number);
  std::byte* cell(int rank, std::uint64_t number);
  std::byte* cell_result(std::uint64_t number);

  // Pipes: slot `number` of those from one rank to another since the start.
  Pipe& pipe(int from, int to);
  BlockHead& pipe_head(int from, int to, std::uint64_t number);
  std::byte* pipe_slot(int from, int to, std::uint64_t number);

  std::uint32_t bell(int rank) const;
  // Something has changed for the rank: wakes the caller that waits in its place, if there is one, else its stage.
  void ring(int rank);
  // The result of a small operation is there: wakes a caller that waits for it, or the stage if it was asked to.
  void ring_caller(int rank);
  void wake_all(int rank);
  // Sleeps for at most `timeout_ms`, unless the bell has rung since `seen`.
  void sleep(int rank, Sleeper who, std::uint32_t seen, int timeout_ms);

  std::atomic<std::uint32_t>& num_driving(int rank);  // callers that advance the rank's operations themselves
  std::atomic<std::uint32_t>& advances_alone(int rank);  // its stage must advance them: nobody waits

 private:
  struct Bell;
  Bell& bell_at(int rank) const;
  void wake(Bell& bell, Sleeper who);
  Word& word(std::size_t offset, std::size_t index) const;
  std::size_t pipe_index(int from, int to) const;

  ShmLayout layout_;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t entered_at_ = 0, ready_at_ = 0, left_at_ = 0, tags_at_ = 0, signatures_at_ = 0, rounds_at_ = 0,
              progress_at_ = 0, cell_signatures_at_ = 0, data_at_ = 0, results_at_ = 0, cells_at_ = 0, cell_results_at_ = 0,
              pipes_at_ = 0, pipe_heads_at_ = 0, pipe_slots_at_ = 0;
};

}  // namespace shoal
