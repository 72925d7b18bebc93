// Shared memory of the ranks of one host: rings of slots, progress flags per rank, and a futex per sleeping rank.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/types.h"

namespace shoal {

struct ShmLayout {
  int num_ranks = 1;
  std::size_t num_slots = 16;
  std::size_t slot_bytes = 0;    // of a contribution
  std::size_t result_bytes = 0;  // of a result or a wider partial sum
};

class SharedSegment {
 public:
  static constexpr std::size_t kSignatures = 256;

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
  std::atomic<std::uint64_t>& entered(int rank, std::uint64_t ticket);  // the contribution is in the slot
  std::atomic<std::uint64_t>& ready(std::uint64_t ticket);              // the result is in the slot
  std::atomic<std::uint64_t>& left(int rank, std::uint64_t ticket);     // the rank no longer needs the slot

  // A tag and the signature of the rank's operation number `index` on this host.
  std::atomic<std::uint64_t>& signature_tag(int rank, std::uint64_t index);
  std::atomic<std::uint64_t>& signature(int rank, std::uint64_t index);

  std::uint32_t bell(int rank) const;
  void ring(int rank);
  // Sleeps for at most `timeout_ms`, unless the bell has rung since `seen`.
  void sleep(int rank, std::uint32_t seen, int timeout_ms);

 private:
  struct Bell;
  Bell& bell_at(int rank) const;
  std::atomic<std::uint64_t>& word(std::size_t offset, std::size_t index) const;

  ShmLayout layout_;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t entered_at_ = 0, ready_at_ = 0, left_at_ = 0, tags_at_ = 0, signatures_at_ = 0, data_at_ = 0,
              results_at_ = 0;
};

}  // namespace shoal
