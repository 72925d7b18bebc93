#include "transport/shm.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <thread>

namespace shoal {

namespace {

using Word = SharedSegment::Word;
constexpr std::size_t kPage = 4096;

std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::runtime_error failed(const std::string& name, const char* what) {
  return std::runtime_error("shared memory " + name + ": " + what + ": " + std::strerror(errno) +
                            " (a container may need more of it, e.g. docker run --shm-size=1g)");
}

}  // namespace

struct alignas(64) SharedSegment::Bell {
  std::atomic<std::uint32_t> count;
  std::atomic<std::uint32_t> stage_sleeps, num_callers_asleep;
  std::atomic<std::uint32_t> num_driving, advances_alone;
};

namespace {

// The first page: number of ranks that have mapped the segment.
struct Front {
  std::atomic<std::uint32_t> made;
  std::atomic<std::uint32_t> num_attached;
};

}  // namespace

SharedSegment::SharedSegment(const std::string& name, int local_rank, const ShmLayout& layout, double timeout_s)
    : layout_(layout) {
  const auto ranks = static_cast<std::size_t>(layout.num_ranks);
  std::size_t at = kPage + pages(ranks * sizeof(Bell));
  const auto reserve = [&](std::size_t bytes) {
    const std::size_t here = at;
    at += pages(bytes);
    return here;
  };
  entered_at_ = reserve(ranks * layout.num_slots * sizeof(Word));
  ready_at_ = reserve(layout.num_slots * sizeof(Word));
  left_at_ = reserve(ranks * layout.num_slots * sizeof(Word));
  tags_at_ = reserve(ranks * kSignatures * sizeof(Word));
  signatures_at_ = reserve(ranks * kSignatures * sizeof(Word));
  rounds_at_ = reserve(layout.num_cells * sizeof(Round));
  progress_at_ = reserve(ranks * sizeof(Progress));
  cell_signatures_at_ = reserve(ranks * layout.num_cells * sizeof(Word));
  data_at_ = reserve(ranks * layout.num_slots * layout.slot_bytes);
  results_at_ = reserve(layout.num_slots * layout.result_bytes);
  cells_at_ = reserve(ranks * layout.num_cells * layout.cell_bytes);
  cell_results_at_ = reserve(layout.num_cells * layout.cell_bytes);
  const std::size_t pipes = ranks * (ranks - 1);
  pipes_at_ = reserve(layout.num_pipe_slots ? pipes * sizeof(Pipe) : 0);
  pipe_heads_at_ = reserve(pipes * layout.num_pipe_slots * sizeof(BlockHead));
  pipe_slots_at_ = reserve(pipes * layout.num_pipe_slots * layout.pipe_slot_bytes);
  bytes_ = at;

  const std::string path = "/shoal-" + name;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  const auto late = [&] { return std::chrono::steady_clock::now() > deadline; };
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::microseconds(200)); };
  int fd = -1;
  if (local_rank == 0) {
    fd = shm_open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) throw failed(path, "cannot be made");
    if (ftruncate(fd, static_cast<off_t>(bytes_)) < 0 || posix_fallocate(fd, 0, static_cast<off_t>(bytes_)) != 0) {
      close(fd);
      shm_unlink(path.c_str());
      throw failed(path, "there is no room");
    }
  } else {
    struct stat status{};
    while ((fd = shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0600)) < 0 ||
           (fstat(fd, &status) == 0 && static_cast<std::size_t>(status.st_size) < bytes_)) {
      if (fd >= 0) close(fd);
      if (late()) throw failed(path, "the first rank of this host did not create it in time");
      pause();
    }
  }
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) throw failed(path, "cannot be mapped");
  base_ = static_cast<std::byte*>(mapped);
  auto* front = reinterpret_cast<Front*>(base_);
  front->num_attached.fetch_add(1);
  while (front->num_attached.load() < ranks) {
    if (late()) {
      munmap(base_, bytes_);
      if (local_rank == 0) shm_unlink(path.c_str());
      throw std::runtime_error("shared memory " + path + ": not all ranks of this host came in time");
    }
    pause();
  }
  if (local_rank == 0) shm_unlink(path.c_str());
}

SharedSegment::~SharedSegment() {
  if (base_) munmap(base_, bytes_);
}

Word& SharedSegment::word(std::size_t offset, std::size_t index) const {
  return reinterpret_cast<Word*>(base_ + offset)[index];
}

std::byte* SharedSegment::contribution(int rank, std::uint64_t ticket) {
  const std::size_t slot = static_cast<std::size_t>(rank) * layout_.num_slots + ticket % layout_.num_slots;
  return base_ + data_at_ + slot * layout_.slot_bytes;
}

std::byte* SharedSegment::result(std::uint64_t ticket) {
  return base_ + results_at_ + ticket % layout_.num_slots * layout_.result_bytes;
}

Word& SharedSegment::entered(int rank, std::uint64_t ticket) {
  return word(entered_at_, static_cast<std::size_t>(rank) * layout_.num_slots + ticket % layout_.num_slots);
}

Word& SharedSegment::ready(std::uint64_t ticket) { return word(ready_at_, ticket % layout_.num_slots); }

Word& SharedSegment::left(int rank, std::uint64_t ticket) {
  return word(left_at_, static_cast<std::size_t>(rank) * layout_.num_slots + ticket % layout_.num_slots);
}

Word& SharedSegment::signature_tag(int rank, std::uint64_t index) {
  return word(tags_at_, static_cast<std::size_t>(rank) * kSignatures + index % kSignatures);
}

Word& SharedSegment::signature(int rank, std::uint64_t index) {
  return word(signatures_at_, static_cast<std::size_t>(rank) * kSignatures + index % kSignatures);
}

SharedSegment::Round& SharedSegment::round(std::uint64_t number) {
  return reinterpret_cast<Round*>(base_ + rounds_at_)[number % layout_.num_cells];
}

SharedSegment::Progress& SharedSegment::progress(int rank) { return reinterpret_cast<Progress*>(base_ + progress_at_)[rank]; }

Word& SharedSegment::cell_signature(int rank, std::uint64_t number) {
  return word(cell_signatures_at_, static_cast<std::size_t>(rank) * layout_.num_cells + number % layout_.num_cells);
}

std::byte* SharedSegment::cell(int rank, std::uint64_t number) {
  const std::size_t index = static_cast<std::size_t>(rank) * layout_.num_cells + number % layout_.num_cells;
  return base_ + cells_at_ + index * layout_.cell_bytes;
}

std::byte* SharedSegment::cell_result(std::uint64_t number) {
  return base_ + cell_results_at_ + number % layout_.num_cells * layout_.cell_bytes;
}

std::size_t SharedSegment::pipe_index(int from, int to) const {
  return static_cast<std::size_t>(from * (layout_.num_ranks - 1) + (to > from ? to - 1 : to));
}

SharedSegment::Pipe& SharedSegment::pipe(int from, int to) {
  return reinterpret_cast<Pipe*>(base_ + pipes_at_)[pipe_index(from, to)];
}

SharedSegment::BlockHead& SharedSegment::pipe_head(int from, int to, std::uint64_t number) {
  const std::size_t index = pipe_index(from, to) * layout_.num_pipe_slots + number % layout_.num_pipe_slots;
  return reinterpret_cast<BlockHead*>(base_ + pipe_heads_at_)[index];
}

std::byte* SharedSegment::pipe_slot(int from, int to, std::uint64_t number) {
  const std::size_t index = pipe_index(from, to) * layout_.num_pipe_slots + number % layout_.num_pipe_slots;
  return base_ + pipe_slots_at_ + index * layout_.pipe_slot_bytes;
}

// ---- bells ----------------------------------------------------------------------------------------------
// A sleeper announces itself, then the kernel compares the count with what it saw before it last looked for work; a
// ringer raises the count, then looks for sleepers. In whatever order the two run, the sleeper does not miss the ring.

SharedSegment::Bell& SharedSegment::bell_at(int rank) const { return reinterpret_cast<Bell*>(base_ + kPage)[rank]; }

std::uint32_t SharedSegment::bell(int rank) const { return bell_at(rank).count.load(); }

std::atomic<std::uint32_t>& SharedSegment::num_driving(int rank) { return bell_at(rank).num_driving; }

std::atomic<std::uint32_t>& SharedSegment::advances_alone(int rank) { return bell_at(rank).advances_alone; }

void SharedSegment::wake(Bell& bell, Sleeper who) {
  syscall(SYS_futex, &bell.count, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, static_cast<std::uint32_t>(who));
}

void SharedSegment::ring(int rank) {
  Bell& bell = bell_at(rank);
  bell.count.fetch_add(1);
  if (bell.num_callers_asleep.load()) wake(bell, Sleeper::caller);
  if (!bell.num_driving.load() && bell.stage_sleeps.load()) wake(bell, Sleeper::stage);
}

void SharedSegment::ring_caller(int rank) {
  Bell& bell = bell_at(rank);
  bell.count.fetch_add(1);
  if (bell.num_callers_asleep.load()) wake(bell, Sleeper::caller);
  if (bell.advances_alone.load() && !bell.num_driving.load() && bell.stage_sleeps.load()) wake(bell, Sleeper::stage);
}

void SharedSegment::wake_all(int rank) {
  Bell& bell = bell_at(rank);
  bell.count.fetch_add(1);
  wake(bell, Sleeper::caller);
  wake(bell, Sleeper::stage);
}

void SharedSegment::sleep(int rank, Sleeper who, std::uint32_t seen, int timeout_ms) {
  Bell& bell = bell_at(rank);
  std::atomic<std::uint32_t>& asleep = who == Sleeper::stage ? bell.stage_sleeps : bell.num_callers_asleep;
  asleep.fetch_add(1);
  // FUTEX_WAIT_BITSET takes an absolute time.
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += timeout_ms / 1000;
  until.tv_nsec += timeout_ms % 1000 * 1'000'000L;
  if (until.tv_nsec >= 1'000'000'000L) {
    until.tv_nsec -= 1'000'000'000L;
    ++until.tv_sec;
  }
  syscall(SYS_futex, &bell.count, FUTEX_WAIT_BITSET, seen, &until, nullptr, static_cast<std::uint32_t>(who));
  asleep.fetch_sub(1);
}

}  // namespace shoal
