#include "transport/shm.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "engine_group.h"

namespace shm_test {

using shoal::SharedSegment;
using shoal::ShmLayout;

std::string unique_name(const char* what) { return std::string(what) + "-" + std::to_string(getpid()); }

bool exists(const std::string& name) {
  struct stat status;
  return stat(("/dev/shm/shoal-" + name).c_str(), &status) == 0;
}

std::vector<std::unique_ptr<SharedSegment>> open_all(const std::string& name, const ShmLayout& layout) {
  std::vector<std::unique_ptr<SharedSegment>> all(static_cast<std::size_t>(layout.num_ranks));
  shoal_test::on_threads(layout.num_ranks, [&](int rank) {
    all[static_cast<std::size_t>(rank)] = std::make_unique<SharedSegment>(name, rank, layout, 10.0);
  });
  return all;
}

TEST(shm_only_the_owner_may_open_a_segment) {
  const ShmLayout layout{2, 4, 1000, 1000};
  const std::string name = unique_name("mode");
  std::thread alone([&] { CHECK_THROWS(std::runtime_error, SharedSegment(name, 0, layout, 0.3)); });
  struct stat status{};
  while (stat(("/dev/shm/shoal-" + name).c_str(), &status) != 0) std::this_thread::yield();
  CHECK_EQ(status.st_mode & 0777u, 0600u);
  alone.join();
}

// Every place is written by its rank and read by all: no two lie on each other, and the name is gone.
TEST(shm_places_are_apart_and_seen_by_all) {
  const ShmLayout layout{3, 4, 1000, 2000};
  const std::string name = unique_name("places");
  const auto all = open_all(name, layout);
  CHECK(!exists(name));
  std::uint8_t mark = 1;
  for (std::uint64_t ticket = 0; ticket < layout.num_slots; ++ticket) {
    for (int rank = 0; rank < 3; ++rank, ++mark) {
      SharedSegment& mine = *all[static_cast<std::size_t>(rank)];
      std::memset(mine.contribution(rank, ticket), mark, layout.slot_bytes);
      mine.entered(rank, ticket) = 1000u + mark;
      mine.left(rank, ticket) = 2000u + mark;
      mine.signature(rank, ticket) = 3000u + mark;
      mine.signature_tag(rank, ticket) = 4000u + mark;
    }
    std::memset(all[0]->result(ticket), mark, layout.result_bytes);
    all[0]->ready(ticket) = 5000u + mark++;
  }
  mark = 1;
  for (std::uint64_t ticket = layout.num_slots; ticket < 2 * layout.num_slots; ++ticket) {  // one round later: the same
    for (int rank = 0; rank < 3; ++rank, ++mark) {
      SharedSegment& other = *all[static_cast<std::size_t>((rank + 1) % 3)];
      for (std::size_t i = 0; i < layout.slot_bytes; ++i) CHECK(other.contribution(rank, ticket)[i] == static_cast<std::byte>(mark));
      CHECK_EQ(other.entered(rank, ticket).load(), 1000u + mark);
      CHECK_EQ(other.left(rank, ticket).load(), 2000u + mark);
      CHECK_EQ(other.signature(rank, ticket % layout.num_slots).load(), 3000u + mark);
      CHECK_EQ(other.signature_tag(rank, ticket % layout.num_slots).load(), 4000u + mark);
    }
    for (std::size_t i = 0; i < layout.result_bytes; ++i) CHECK(all[2]->result(ticket)[i] == static_cast<std::byte>(mark));
    CHECK_EQ(all[1]->ready(ticket).load(), 5000u + mark++);
  }
}

TEST(shm_who_comes_alone_gives_up_and_leaves_nothing) {
  const ShmLayout layout{2, 4, 1000, 1000};
  const std::string name = unique_name("alone");
  CHECK(CHECK_THROWS(std::runtime_error, SharedSegment(name, 0, layout, 0.05)).find("not all ranks of this host came") != std::string::npos);
  CHECK(!exists(name));
  CHECK(CHECK_THROWS(std::runtime_error, SharedSegment(name, 1, layout, 0.05)).find("did not create it in time") != std::string::npos);
  CHECK(!exists(name));
}

TEST(shm_a_bell_is_never_missed) {
  const auto all = open_all(unique_name("bell"), {2, 2, 64, 64});
  constexpr int kRounds = 2000;
  std::atomic<int> turn{0};  // even: rank 0's
  const auto begin = std::chrono::steady_clock::now();
  shoal_test::on_threads(2, [&](int rank) {
    SharedSegment& mine = *all[static_cast<std::size_t>(rank)];
    const auto who = rank ? shoal::Sleeper::stage : shoal::Sleeper::caller;
    for (int round = 0; round < kRounds; ++round) {
      while (true) {
        const std::uint32_t seen = mine.bell(rank);
        if (turn.load() % 2 == rank) break;
        mine.sleep(rank, who, seen, 60'000);
      }
      turn.fetch_add(1);
      mine.ring(1 - rank);
    }
  });
  CHECK_EQ(turn.load(), 2 * kRounds);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(50));  // a missed one would sleep a minute
}

}  // namespace shm_test
