#include "engine/members.h"

#include "check.h"
#include "made_group.h"

namespace members_liveness_test {

using made::Parts;
using shoal::FrameType;
using shoal::GroupFailure;
using shoal::Liveness;

struct Watched : Parts {
  Liveness liveness{members, topology, router, ops, mailbox, journal, options.straggler_s};
  std::vector<std::uint64_t> announced;
  void tick() {
    liveness.tick([this](const shoal::Op& op) { announced.push_back(op.seq); });
  }
};

TEST(liveness_knows_what_every_rank_has_begun_and_completed) {
  Watched group;
  std::vector<float> x(8);
  group.all_reduce(x);
  group.all_reduce(x);
  CHECK_EQ(group.liveness.num_begun_by_all(), 0u);
  CHECK(group.liveness.heard(Parts::kFirst, Parts::progress(2, 1)));
  CHECK(!group.liveness.heard(Parts::kFirst, Parts::progress(1, 0)));  // an older frame
  CHECK_EQ(group.liveness.num_begun(Parts::kFirst), 2u);
  CHECK(group.liveness.heard(Parts::kSecond, Parts::progress(1, 1)));
  CHECK_EQ(group.liveness.num_begun_by_all(), 1u);
  CHECK_EQ(group.liveness.num_completed_by_all(), 0u);  // this rank's are pending
  CHECK(!group.liveness.heard(Parts::kHelper, Parts::progress(9, 9)));  // a helper begins nothing
}

TEST(liveness_sends_heartbeats_with_this_ranks_progress) {
  Watched group;
  std::vector<float> x(8);
  group.ops.release(group.all_reduce(x));
  group.tick();
  const auto beats = group.frames.take(FrameType::heartbeat);
  CHECK_EQ(beats.size(), 3u);  // two ranks and the helper
  for (const auto& beat : beats) CHECK_EQ(beat.header.completed, 1u);
}

TEST(liveness_fails_an_operation_that_waits_for_a_rank_that_has_left) {
  Watched group;
  std::vector<float> x(8);
  group.ops.release(group.all_reduce(x));
  group.liveness.heard(Parts::kFirst, Parts::progress(1, 1));
  group.liveness.left(Parts::kFirst);
  group.tick();  // nothing waits for it
  group.all_reduce(x);
  CHECK_EQ(CHECK_THROWS(GroupFailure, group.tick()), "rank 1 (10.0.0.1, pid 101) has left the group after 1 operations");
}

TEST(liveness_announces_and_names_stragglers_once) {
  Watched group;
  std::vector<float> x(8);
  const auto op = group.all_reduce(x);
  group.liveness.heard(Parts::kSecond, Parts::progress(1, 0));
  group.tick();
  CHECK(group.announced.empty());
  op->begun -= std::chrono::milliseconds(1500);
  group.tick();
  group.tick();
  CHECK(group.announced == std::vector<std::uint64_t>{0});
  const auto events = group.journal.take_events();
  REQUIRE(events.size() == 1);
  CHECK(events[0].find("straggler: operation #0, all_reduce of float32[8] (sum), has waited 1.") == 0);
  CHECK(events[0].find("rank 1 (10.0.0.1, pid 101) has not begun it") != std::string::npos);
  CHECK(events[0].find("rank 2") == std::string::npos);
}

TEST(liveness_fails_an_operation_at_its_deadline_and_names_who_is_missing) {
  Watched group;
  std::vector<float> x(8);
  const auto op = group.all_reduce(x);
  group.liveness.heard(Parts::kSecond, Parts::progress(1, 0));
  op->spec.timeout_s = 0.5;
  op->begun -= std::chrono::milliseconds(600);
  CHECK_EQ(CHECK_THROWS(GroupFailure, group.tick()),
           "the timeout of 0.5 s passed for operation #0, all_reduce of float32[8] (sum): rank 1 (10.0.0.1, pid 101) has "
           "not begun it");
}

// Ranks 0 and 1 on a host, 2 and 3 on another one, seen from rank 3: rank 2 passes on what rank 0 says.
struct Fourth : Parts {
  explicit Fourth(double straggler_s) : Parts(of_four(), {3, {"a", "a", "b", "b"}, 0, {0, 1, 2, 3}}), straggler_s(straggler_s) {}

  std::string why_it_waits() {
    std::vector<float> x(8);
    const auto op = all_reduce(x);
    op->spec.timeout_s = 0.5;
    op->begun -= std::chrono::milliseconds(600);
    return CHECK_THROWS(GroupFailure, liveness.tick([](const shoal::Op&) {}));
  }

  static shoal::Members of_four() {
    shoal::Members members{"g", 3, {}, {}};
    for (int rank = 0; rank < 4; ++rank) members.peers.push_back({rank < 2 ? "a" : "b", "10.0.0.1", 1, rank, 100 + rank});
    return members;
  }

  const double straggler_s;
  Liveness liveness{members, topology, router, ops, mailbox, journal, straggler_s};
};

TEST(liveness_blames_no_rank_for_the_silence_of_the_one_that_passes_on_its_heartbeats) {
  const std::string silent = Fourth(0).why_it_waits(), heard = Fourth(1000).why_it_waits();
  CHECK(contains(silent, "rank 1 (") && contains(silent, "rank 2 (") && !contains(silent, "rank 0 ("));
  CHECK(contains(heard, "rank 0 (10.0.0.1, pid 100) has not begun it"));
}

}  // namespace members_liveness_test
