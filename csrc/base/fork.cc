#include "base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace shoal {

namespace {

constexpr int kMaxFiles = 1 << 17;  // those with greater numbers stay open in children

// A child has the locks of threads that it does not have: what it reads needs none.
std::array<std::atomic<std::uint64_t>, kMaxFiles / 64> sockets;

std::atomic<std::uint64_t>& word_of(int fd) { return sockets[static_cast<std::size_t>(fd) / 64]; }
std::uint64_t bit_of(int fd) { return std::uint64_t{1} << (fd % 64); }

void close_all() {
  for (std::size_t k = 0; k < sockets.size(); ++k) {
    for (std::uint64_t left = sockets[k].exchange(0); left; left &= left - 1) {
      close(static_cast<int>(64 * k) + std::countr_zero(left));
    }
  }
}

}  // namespace

void close_in_children(int fd) {
  [[maybe_unused]] static const int installed = pthread_atfork(nullptr, nullptr, close_all);
  if (0 <= fd && fd < kMaxFiles) word_of(fd) |= bit_of(fd);
}

void close_socket(int fd) {
  if (0 <= fd && fd < kMaxFiles) word_of(fd) &= ~bit_of(fd);
  close(fd);
}

}  // namespace shoal
