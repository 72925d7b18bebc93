// What a helper holds of one process: others go on, and what waits goes on too.
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "check.h"
#include "engine/sum_memory.h"
#include "engine_group.h"

namespace helper_memory_test {

using namespace shoal_test;
using shoal::FrameHeader;
using shoal::FrameType;
using shoal::HelperServer;
using shoal::Payload;

constexpr std::size_t kChunkBytes = 4 << 20;

// A process that is one rank of every group, each rank on a host of its own, and sends what the test says.
class Member : private shoal::Sink {
 public:
  Member(int rank, int size, int helper_port, int num_data = 2) : rank_(rank), size_(size), transport_({"127.0.0.1", 0, kSecret}, *this) {
    transport_.start();
    transport_.set_peer(kHelper, "127.0.0.1", helper_port, {});
    const std::string name = "127.0.0.1:" + std::to_string(transport_.port()) + " pid " + std::to_string(1000 + rank);
    for (int k = 0; k <= num_data; ++k) transport_.call_peer(kHelper, {name, k == 0}, kDeadlineS);
  }
  ~Member() override { hang_up(); }

  void hang_up() { transport_.stop(); }

  void join(const std::string& group) {
    const int before = num_joined_;
    ask_to_join(group);
    await([&] { return num_joined_ > before; }, "the helper takes the member");
  }

  void ask_to_join(const std::string& group) {
    FrameHeader header;
    header.type = FrameType::join;
    header.group = shoal::group_number(group);
    send(header, shoal::join_payload({group, rank_, size_, rank_, size_}));
  }

  void leave(const std::string& group) {
    FrameHeader header;
    header.type = FrameType::leave;
    header.group = shoal::group_number(group);
    send(header, shoal::payload_of("done"));
  }

  // Its contribution is (rank + 1) * (chunk + 1) in every element.
  void push(const std::string& group, std::uint64_t chunk, std::size_t bytes = kChunkBytes, FrameType type = FrameType::push) {
    FrameHeader header;
    header.type = type;
    header.group = shoal::group_number(group);
    header.host = static_cast<std::uint16_t>(rank_);
    header.needed = static_cast<std::uint16_t>(size_);
    header.divisor = static_cast<std::uint16_t>(size_);
    header.chunk = chunk;
    const auto owner = std::make_shared<std::vector<float>>(bytes / sizeof(float), static_cast<float>((rank_ + 1) * (chunk + 1)));
    send(header, {reinterpret_cast<const std::byte*>(owner->data()), bytes, owner});
  }

  // Returns false where the helper takes nothing for this long.
  bool flush(double seconds) { return transport_.flush({kHelper}, seconds); }

  std::size_t num_results() const { return num_results_; }

  // What the helper has said to refuse it or to end a group.
  std::string refusal() {
    const shoal::MutexLock lock(mutex_);
    return refusal_;
  }

 private:
  static constexpr int kHelper = 0;

  void send(FrameHeader header, Payload payload) {
    transport_.post([this, header, payload]() SHOAL_NO_ANALYSIS { transport_.send(kHelper, header, payload); });
  }

  int on_introduction(const shoal::Introduction&, std::string&) override { return -1; }
  void on_connected(int) override {}
  void on_frame(int, const FrameHeader& header, Payload payload) override {
    if (header.type == FrameType::join) ++num_joined_;
    if (header.type == FrameType::leave || header.type == FrameType::fail) {
      const shoal::MutexLock lock(mutex_);
      refusal_ = shoal::text_of(payload);
    }
    if (header.type != FrameType::result) return;
    float first = 0;
    if (payload.size()) std::memcpy(&first, payload.data(), sizeof first);
    CHECK_EQ(first, static_cast<float>(size_ * (size_ + 1) / 2) * static_cast<float>(header.chunk + 1));
    ++num_results_;
  }
  void on_down(int, const std::string&) override {}
  void on_tick() override {}
  void on_error(const std::string& what) override { check::fail(__FILE__, __LINE__, what); }

  const int rank_, size_;
  std::atomic<int> num_joined_{0};
  std::atomic<std::size_t> num_results_{0};
  shoal::Mutex mutex_;
  std::string refusal_ GUARDED_BY(mutex_);
  shoal::TcpTransport transport_;
};

struct Pair {
  explicit Pair(const std::vector<std::string>& groups, std::size_t max_sum_bytes = 0)
      : helper("127.0.0.1", 0, kSecret, 0, "", 0, HelperServer::kMaxGroups, 0, 1, max_sum_bytes) {
    helper.start();
    for (int rank = 0; rank < 2; ++rank) {
      members.push_back(std::make_unique<Member>(rank, 2, helper.port()));
      for (const std::string& group : groups) members.back()->join(group);
    }
  }

  void await_results(std::size_t count) {
    for (auto& each : members) await([&] { return each->num_results() == count; }, "all sums are there");
    await([&] { return count_of(helper.counters(), "held_bytes") == 0; }, "the helper holds nothing");
  }

  HelperServer helper;
  std::vector<std::unique_ptr<Member>> members;
};

// The helper stops reading, takes the chunks that the other rank begins, and reads the rest once there is memory.
TEST(helper_memory_of_a_flood_is_bounded) {
  constexpr std::uint64_t kChunks = 24;
  Pair pair({"g"});
  for (std::uint64_t chunk = 0; chunk < kChunks; ++chunk) pair.members[0]->push("g", chunk);
  CHECK(!pair.members[0]->flush(1.0));
  CHECK(count_of(pair.helper.counters(), "held_bytes") <= shoal::SumMemory::kMostBytes);

  Group others({"", {"a", "b"}, 0, {pair.helper.port()}, {2}}, {}, "others");
  others.each([](int, shoal::Engine& engine) {
    std::vector<float> ones(100'000, 1.0f);
    run(engine, shoal::Kind::all_reduce, ones.data(), ones.data(), ones.size());
    CHECK(ones == std::vector<float>(100'000, 2.0f));
  });
  others.close();

  for (std::uint64_t chunk = 0; chunk < kChunks; ++chunk) pair.members[1]->push("g", chunk);
  pair.await_results(kChunks);
}

// A chunk needs memory for every host of the group, however few elements it has.
TEST(helper_memory_of_small_chunks_is_bounded) {
  constexpr std::uint64_t kChunks = 5'500;  // less than usual without that
  HelperServer helper("127.0.0.1", 0, kSecret, 0);
  helper.start();
  Member member(0, 1000, helper.port(), 0);
  member.join("g");
  for (std::uint64_t chunk = 0; chunk < kChunks; ++chunk) member.push("g", chunk, 4 << 10);
  CHECK(!member.flush(1.0));
}

// Each rank waits for frames that the other one has sent after more than a helper usually takes.
TEST(helper_memory_two_ranks_with_groups_in_opposite_orders_end) {
  const std::vector<std::string> groups{"a", "b", "c", "d", "e", "f", "g", "h"};
  Pair pair(groups);
  for (std::size_t k = 0; k < groups.size(); ++k) {
    for (std::uint64_t chunk = 0; chunk < 2; ++chunk) {
      pair.members[0]->push(groups[k], chunk);
      pair.members[1]->push(groups[groups.size() - 1 - k], chunk);
    }
  }
  pair.await_results(2 * groups.size());
}

// A process that hangs up while it is not read is missed, and what it has sent goes with its group.
TEST(helper_memory_of_who_hangs_up_is_given_back) {
  Pair pair({"g"});
  for (std::uint64_t chunk = 0; chunk < 24; ++chunk) pair.members[0]->push("g", chunk);
  CHECK(!pair.members[0]->flush(1.0));
  pair.members[0]->hang_up();
  pair.members[1]->leave("g");
  await([&] { return count_of(pair.helper.counters(), "groups") == 0 && count_of(pair.helper.counters(), "held_bytes") == 0; },
        "the helper has given up the group");
}

TEST(helper_memory_is_shared_by_jobs_whatever_their_processes) {
  shoal::SumMemory memory(112 << 20);
  memory.share({{0, 1}, {3}, {1, 2}});
  for (int peer : {0, 1, 2}) CHECK_EQ(memory.most_bytes(peer), std::size_t{24} << 20);
  CHECK_EQ(memory.most_bytes(3), std::size_t{40} << 20);
  CHECK_EQ(memory.job_bytes(0), std::size_t{72} << 20);
  CHECK_EQ(memory.job_bytes(3), std::size_t{56} << 20);
  memory.share({{0, 1}, {3}, {1, 2, 3}});
  for (int peer : {0, 1, 2, 3}) CHECK_EQ(memory.most_bytes(peer), std::size_t{28} << 20);
  memory.share({{0}});
  CHECK_EQ(memory.most_bytes(0), shoal::SumMemory::kMostBytes);
}

TEST(helper_knows_the_jobs_that_share_its_threads) {
  Pair pair({"a"});
  Member third(0, 2, pair.helper.port());
  const auto jobs = [&](std::uint64_t count) {
    await([&] { return count_of(pair.helper.counters(), "jobs") == count; }, "the helper has counted its jobs");
  };
  pair.members[0]->push("a", 0);
  jobs(1);
  third.join("b");
  third.push("b", 0);
  jobs(2);
  third.join("c");
  pair.members[1]->join("c");
  pair.members[1]->push("c", 0);
  jobs(1);
}

// A job beyond its part may not go on once all is taken; another one may.
TEST(helper_memory_of_a_job_ends_where_another_s_begins) {
  shoal::SumMemory memory(64 << 20);
  memory.share({{0, 1}, {2}});
  const std::vector<std::byte> bytes(24 << 20);
  std::vector<Payload> kept;
  for (int peer : {0, 1, 2}) kept.push_back(memory.charged(peer, 0, {bytes.data(), bytes.size()}));
  CHECK(memory.exceeds(0));
  CHECK(!memory.exceeds(2));
  kept.front() = {};
  CHECK(!memory.exceeds(0));
  CHECK_EQ(memory.held_bytes(0), 0u);
  CHECK_EQ(memory.held_bytes(1), bytes.size());
}

TEST(helper_memory_is_for_no_more_processes_than_it_has_room_for) {
  Pair pair({"g"}, 32 << 20);
  Member third(0, 2, pair.helper.port());
  third.ask_to_join("h");
  await([&] { return !third.refusal().empty(); }, "the helper has answered");
  CHECK_EQ(third.refusal(), "it refused: it has memory for the sums of 2 processes and no more; start another helper, or give "
                            "this one more (shoal serve --sums-mib)");
  pair.members[0]->push("g", 0);
  pair.members[1]->push("g", 0);
  pair.await_results(1);
}

// Results of a lost helper cannot wait, as others wait for them: the group ends.
TEST(helper_memory_of_supplied_results_is_bounded) {
  Pair pair({"g"}, 32 << 20);
  for (std::uint64_t chunk = 0; chunk < 9; ++chunk) pair.members[0]->push("g", chunk, kChunkBytes, FrameType::supply);
  for (auto& each : pair.members) await([&] { return !each->refusal().empty(); }, "the group has ended");
  const std::string why = pair.members[1]->refusal();
  CHECK(why.find("pid 1000 and the others of its job have sent a helper 32 MiB") != std::string::npos);
  CHECK(why.find("--sums-mib") != std::string::npos);
}

}  // namespace helper_memory_test
