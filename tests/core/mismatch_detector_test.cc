#include "engine/mismatch_detector.h"

#include "check.h"
#include "made_group.h"

namespace mismatch_detector_test {

using made::Parts;
using shoal::FrameHeader;
using shoal::FrameType;
using shoal::GroupFailure;
using shoal::MismatchDetector;
using shoal::ProtocolError;

struct Watched : Parts {
  MismatchDetector detector{members, ops, mailbox};
  std::vector<float> x = std::vector<float>(8);

  shoal::OpPtr issue() {
    const auto op = all_reduce(x);
    if (op->in_question) detector.begun(*op);
    return op;
  }
  static FrameHeader about(std::uint64_t seq, std::uint64_t signature, std::uint64_t chunk = 0) {
    FrameHeader header;
    header.seq = seq;
    header.signature = signature;
    header.chunk = chunk;
    return header;
  }
};

const std::string kTheirs = "broadcast of float32[8] from rank 1";

TEST(mismatch_detector_names_both_operations_whichever_rank_compares) {
  Watched group;
  group.issue();
  group.detector.on_announcement(Parts::kSecond, Watched::about(0, group.ops.find(0)->signature), "the same");
  CHECK_EQ(CHECK_THROWS(GroupFailure, group.detector.on_announcement(Parts::kFirst, Watched::about(0, 1), kTheirs)),
           "the ranks do not agree about operation #0: rank 0 (10.0.0.0, pid 100) asks for all_reduce of float32[8] (sum), "
           "rank 1 (10.0.0.1, pid 101) asks for " + kTheirs);
}

TEST(mismatch_detector_compares_with_what_was_announced_before) {
  Watched group;
  group.detector.on_announcement(Parts::kFirst, Watched::about(0, 1), kTheirs);
  CHECK(CHECK_THROWS(GroupFailure, group.issue()).find("do not agree about operation #0") != std::string::npos);
  CHECK_EQ(group.frames.take(FrameType::announce).size(), 2u);
}

TEST(mismatch_detector_a_suspicion_stops_completion_and_asks_all_ranks) {
  Watched group;
  const auto op = group.issue();
  CHECK(!group.detector.diverged());
  group.detector.suspect(0, Parts::kFirst, 1);
  CHECK(group.detector.diverged());
  CHECK_EQ(group.frames.take(FrameType::mismatch).size(), 2u);
  CHECK_EQ(group.frames.take(FrameType::announce).size(), 2u);
  group.detector.on_announcement(Parts::kSecond, Watched::about(0, op->signature), "");
  // The frame contradicts its sender's own announcement.
  const std::string why =
      CHECK_THROWS(GroupFailure, group.detector.on_announcement(Parts::kFirst, Watched::about(0, op->signature), "the sum"));
  CHECK(why.find("rank 0 (10.0.0.0, pid 100) received a frame of rank 1 (10.0.0.1, pid 101) about operation #0") == 0);
  CHECK(why.find("corrupt") != std::string::npos);
}

// Of two frames that conflict, both are reported: the one of this rank's operation says nothing.
TEST(mismatch_detector_a_frame_of_this_operation_is_not_suspect) {
  Watched group;
  const auto op = group.issue();
  group.detector.on_announcement(Parts::kFirst, Watched::about(0, op->signature), "");
  group.detector.on_announcement(Parts::kSecond, Watched::about(0, op->signature), "");
  group.detector.on_mismatch(Parts::kHelper, Watched::about(0, op->signature, Parts::kFirst));
  CHECK(!group.detector.diverged());
  const std::string why =
      CHECK_THROWS(GroupFailure, group.detector.on_mismatch(Parts::kHelper, Watched::about(0, 1, Parts::kSecond)));
  CHECK(why.find("helper h0 (10.0.1.0:2) received a frame of rank 2 (10.0.0.2, pid 102) about operation #0") == 0);
}

TEST(mismatch_detector_names_who_has_passed_a_frame_on) {
  Watched group;
  const auto op = group.issue();
  FrameHeader result = Watched::about(0, 1);
  result.kind = shoal::Kind::broadcast;
  result.root = Parts::kSecond;
  group.detector.on_unexpected_result(Parts::kFirst, result);
  const auto told = group.frames.take(FrameType::mismatch);
  CHECK_EQ(told.size(), 2u);
  CHECK_EQ(told[0].header.root, Parts::kFirst);
  const std::string why =
      CHECK_THROWS(GroupFailure, group.detector.on_announcement(Parts::kSecond, Watched::about(0, op->signature), "the sum"));
  CHECK(why.find("a frame of rank 2 (10.0.0.2, pid 102) through rank 1 (10.0.0.1, pid 101) about") != std::string::npos);
}

TEST(mismatch_detector_a_report_of_an_operation_to_come_waits_for_it) {
  Watched group;
  group.detector.on_mismatch(Parts::kSecond, Watched::about(0, 1, Parts::kFirst));
  CHECK(!group.detector.diverged());
  group.issue();
  CHECK_EQ(group.frames.take(FrameType::announce).size(), 2u);
}

TEST(mismatch_detector_a_server_that_received_other_elements_fails_the_group) {
  Watched group;
  group.issue();
  const shoal::SumServer::Conflict conflict{0, 4, {Parts::kFirst, 7, "8 elements"}, {Parts::kSecond, 7, "9 elements"}};
  CHECK_EQ(CHECK_THROWS(GroupFailure, group.detector.on_conflict(conflict)),
           "rank 1 (10.0.0.1, pid 101) sent chunk 4 of operation #0 as 8 elements, rank 2 (10.0.0.2, pid 102) as 9 elements");
}

TEST(mismatch_detector_blames_who_sends_what_no_correct_peer_does) {
  Watched group;
  CHECK_THROWS(ProtocolError, group.detector.on_announcement(Parts::kHelper, Watched::about(0, 1), ""));
  CHECK_THROWS(ProtocolError, group.detector.on_unexpected_result(Parts::kHelper, Watched::about(0, 1)));
  CHECK_EQ(CHECK_THROWS(ProtocolError, group.detector.on_mismatch(Parts::kFirst, Watched::about(0, 1, 3))),
           "it suspects rank 3 of 3");
}

TEST(mismatch_detector_forgets_what_all_have_completed_and_keeps_a_bounded_number) {
  Watched group;
  const auto op = group.issue();
  CHECK(group.detector.differs(Watched::about(0, 1)));
  CHECK(!group.detector.differs(Watched::about(0, op->signature)));
  CHECK(!group.detector.differs(Watched::about(5, 1)));  // not issued
  for (std::uint64_t seq = 0; seq < 5000; ++seq) group.detector.on_mismatch(Parts::kFirst, Watched::about(10 + seq, 1, 2));
  for (std::uint64_t seq = 0; seq < 5000; ++seq) group.detector.on_announcement(Parts::kFirst, Watched::about(10 + seq, 1), "x");
  group.detector.forget_below(10'000);
  for (int k = 0; k < 20; ++k) group.ops.release(group.issue());  // nothing is remembered of them but that they were suspected
}

}  // namespace mismatch_detector_test
