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

}  // namespace members_liveness_test
