#include "engine/members.h"

#include "check.h"
#include "made_group.h"

namespace members_mailbox_test {

using made::Parts;
using shoal::FrameHeader;
using shoal::FrameType;
using shoal::kPassedOn;
using shoal::kToBePassedOn;

// Four ranks on two hosts: 0 and 1, 2 and 3. Chunks go between 0 and 2, and between 1 and 3.
Parts seen_from(int me) {
  shoal::Members members{"g", me, {}, {{"10.0.1.0", 2, "h0"}}};
  const std::vector<std::string> hosts = {"a", "a", "b", "b"};
  for (int rank = 0; rank < 4; ++rank) members.peers.push_back({hosts[static_cast<std::size_t>(rank)], "10.0.0.1", 1, rank, 100 + rank});
  return {std::move(members), {me, hosts, 1, {0, 1, 2, 3}}};
}

FrameHeader notice(FrameType type, std::uint32_t server) {
  FrameHeader header = Parts::progress(5, 4);
  header.type = type;
  header.server = server;
  return header;
}

TEST(mailbox_passes_a_notice_on_to_those_of_its_host_that_are_no_neighbours) {
  Parts two = seen_from(2);
  CHECK_EQ(two.mailbox.pass_on(0, notice(FrameType::fail, kToBePassedOn), shoal::payload_of("why")), 0);
  REQUIRE(two.frames.sent.size() == 1);
  const made::Sending& sent = two.frames.sent[0];
  CHECK_EQ(sent.peer, 3);
  CHECK_EQ(sent.header.server, kPassedOn + 0);
  CHECK_EQ(sent.header.submitted, 5u);  // as the first one said
  CHECK_EQ(sent.header.completed, 4u);
  CHECK_EQ(shoal::text_of(sent.payload), "why");
  two.mailbox.tell_lost(0, "gone");
  REQUIRE(two.frames.sent.size() == 2);
  CHECK(two.frames.sent[1].peer == 3 && two.frames.sent[1].header.type == FrameType::rank_lost);
}

TEST(mailbox_passes_on_nothing_else) {
  Parts two = seen_from(2);
  CHECK_EQ(two.mailbox.pass_on(3, notice(FrameType::fail, kToBePassedOn), {}), 3);  // of its own host
  CHECK_EQ(two.mailbox.pass_on(0, notice(FrameType::heartbeat, 0), {}), 0);
  CHECK_EQ(two.mailbox.pass_on(0, notice(FrameType::push, kToBePassedOn), {}), 0);
  CHECK_EQ(two.mailbox.pass_on(4, notice(FrameType::fail, kToBePassedOn), {}), 4);  // a helper
  CHECK_EQ(two.mailbox.pass_on(0, notice(FrameType::fail, kToBePassedOn), shoal::payload_of(std::string(shoal::kMaxText + 1, 'x'))), 0);
  two.mailbox.tell_lost(3, "gone");
  two.mailbox.tell_lost(4, "gone");
  CHECK(two.frames.sent.empty());
}

TEST(mailbox_takes_a_notice_of_another_only_from_the_rank_that_passes_it_on) {
  Parts three = seen_from(3);
  const auto origin = [&](int peer, std::uint32_t rank) SHOAL_NO_ANALYSIS { return three.mailbox.pass_on(peer, notice(FrameType::fail, kPassedOn + rank), {}); };
  CHECK_EQ(origin(2, 0), 0);
  CHECK_EQ(origin(1, 0), -1);
  CHECK_EQ(origin(2, 1), -1);  // rank 1 is a neighbour, and speaks for itself
  CHECK_EQ(origin(2, 2), -1);
  CHECK_EQ(origin(2, 4), -1);
  CHECK_EQ(origin(2, ~std::uint32_t{0} - kPassedOn), -1);
  CHECK(three.frames.sent.empty());
}

}  // namespace members_mailbox_test
