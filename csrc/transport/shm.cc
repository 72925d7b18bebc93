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

using Word = std::atomic<std::uint64_t>;
constexpr std::size_t kPage = 4096;

std::size_t pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::runtime_error failed(const std::string& name, const char* what) {
  return std::runtime_error("shared memory " + name + ": " + what + ": " + std::strerror(errno) +
                            " (a container may need more of it, e.g. docker run --shm-size=1g)");
}

}  // namespace

struct alignas(64) SharedSegment::Bell {
  std::atomic<std::uint32_t> count;
  std::atomic<std::uint32_t> sleeping;
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
  data_at_ = reserve(ranks * layout.num_slots * layout.slot_bytes);
  results_at_ = reserve(layout.num_slots * layout.result_bytes);
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

SharedSegment::Bell& SharedSegment::bell_at(int rank) const { return reinterpret_cast<Bell*>(base_ + kPage)[rank]; }

std::uint32_t SharedSegment::bell(int rank) const { return bell_at(rank).count.load(); }

void SharedSegment::ring(int rank) {
  Bell& bell = bell_at(rank);
  bell.count.fetch_add(1);
  if (bell.sleeping.load()) syscall(SYS_futex, &bell.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void SharedSegment::sleep(int rank, std::uint32_t seen, int timeout_ms) {
  Bell& bell = bell_at(rank);
  bell.sleeping.fetch_add(1);
  const timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
  syscall(SYS_futex, &bell.count, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  bell.sleeping.fetch_sub(1);
}

}  // namespace shoal
