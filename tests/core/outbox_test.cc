#include "engine/outbox.h"

#include <memory>
#include <utility>
#include <vector>

#include "check.h"

namespace {

using shoal::Op;
using shoal::OpPtr;
using shoal::Outbox;
using Sent = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

constexpr int kMe = 0, kOther = 1;
constexpr std::size_t kBytes = 10;

// An operation of `num_chunks` chunks of 10 bytes, all of which wait.
OpPtr waiting(Outbox& outbox, std::uint64_t seq, int priority, std::size_t num_chunks, int server = kOther) {
  const auto op = std::make_shared<Op>();
  op->seq = seq;
  op->spec.priority = priority;
  op->parts.resize(num_chunks);
  for (std::uint64_t index = 0; index < num_chunks; ++index) {
    op->parts[index].server = server;
    op->parts[index].contribution.size = kBytes;
    outbox.add(op, index);
  }
  return op;
}

Sent sent(Outbox& outbox, std::size_t window) {
  Sent out;
  while (const auto next = outbox.next(window, kMe)) out.emplace_back(next->first->seq, next->second);
  return out;
}

TEST(outbox_of_one_priority_keeps_the_order_of_the_calls) {
  Outbox outbox;
  waiting(outbox, 4, 0, 2);
  waiting(outbox, 5, 0, 1);
  waiting(outbox, 6, 0, 2);
  const Sent all{{4, 0}, {4, 1}, {5, 0}, {6, 0}, {6, 1}};
  CHECK(sent(outbox, 1000) == all);
  CHECK_EQ(outbox.bytes_on_the_way(), 5 * kBytes);
}

TEST(outbox_sends_the_most_urgent_first) {
  Outbox outbox;
  waiting(outbox, 1, -3, 2);
  waiting(outbox, 2, 7, 1);
  waiting(outbox, 3, -1, 2);
  waiting(outbox, 4, 7, 1);
  const Sent all{{2, 0}, {4, 0}, {3, 0}, {3, 1}, {1, 0}, {1, 1}};
  CHECK(sent(outbox, 1000) == all);
}

TEST(outbox_keeps_the_window) {
  Outbox outbox;
  const OpPtr op = waiting(outbox, 0, 0, 5);
  CHECK(sent(outbox, 25) == (Sent{{0, 0}, {0, 1}}));
  CHECK(sent(outbox, 25).empty());
  outbox.arrived(*op, 0);
  CHECK_EQ(outbox.bytes_on_the_way(), kBytes);
  CHECK(sent(outbox, 25) == (Sent{{0, 2}}));
  outbox.arrived(*op, 1);
  outbox.arrived(*op, 2);
  CHECK(sent(outbox, 0) == (Sent{{0, 3}}));  // larger than the window, and nothing is on its way
}

TEST(outbox_needs_no_window_for_the_server_beside_it) {
  Outbox outbox;
  waiting(outbox, 0, 0, 3, kMe);
  CHECK_EQ(sent(outbox, 0).size(), 3u);
  CHECK_EQ(outbox.bytes_on_the_way(), 0u);
}

// Another rank may wait for the oldest operation before it begins the urgent one.
TEST(outbox_keeps_one_chunk_of_the_oldest_operation_on_its_way) {
  Outbox outbox;
  const OpPtr old = waiting(outbox, 0, 0, 3);
  waiting(outbox, 1, 0, 2);
  waiting(outbox, 2, 9, 4);
  CHECK(sent(outbox, 20) == (Sent{{2, 0}, {2, 1}, {0, 0}}));
  CHECK(sent(outbox, 20).empty());
  outbox.arrived(*old, 0);
  CHECK(sent(outbox, 20) == (Sent{{0, 1}}));
  outbox.arrived(*old, 1);
  CHECK(sent(outbox, 20) == (Sent{{0, 2}}));
  CHECK(sent(outbox, 20).empty());  // the oldest waits for nothing more but is not over
  outbox.arrived(*old, 2);
  CHECK(sent(outbox, 20) == (Sent{{1, 0}}));
}

TEST(outbox_of_one_priority_never_exceeds_the_window) {
  Outbox outbox;
  for (std::uint64_t seq = 0; seq < 6; ++seq) waiting(outbox, seq, 0, 1);
  CHECK_EQ(sent(outbox, 30).size(), 3u);
  CHECK_EQ(outbox.bytes_on_the_way(), 30u);
}

// As sums inside a host end in any order.
TEST(outbox_sends_the_lowest_chunk_that_it_has) {
  Outbox outbox;
  const OpPtr op = waiting(outbox, 0, 0, 0);
  op->parts.resize(5);
  for (auto& part : op->parts) {
    part.server = kOther;
    part.contribution.size = kBytes;
  }
  for (const std::uint64_t index : {0, 4, 2}) outbox.add(op, index);
  CHECK(sent(outbox, 20) == (Sent{{0, 0}, {0, 2}}));
  outbox.add(op, 3);
  CHECK(sent(outbox, 1000) == (Sent{{0, 3}, {0, 4}}));
}

TEST(outbox_gives_the_room_of_what_arrived_to_the_others) {
  Outbox outbox;
  const OpPtr op = waiting(outbox, 0, 0, 2);
  waiting(outbox, 1, 0, 2);
  CHECK(sent(outbox, 20) == (Sent{{0, 0}, {0, 1}}));
  outbox.arrived(*op, 1);
  CHECK(sent(outbox, 20) == (Sent{{1, 0}}));
}

}  // namespace
