#include "engine/flow_control.h"

#include "check.h"
#include "made_op.h"

namespace flow_control_outbox_test {

using made::kBytes;
using made::kMe;
using made::kOther;
using made::operation;
using made::Sent;
using made::sent;
using shoal::OpPtr;
using shoal::Outbox;

// All its chunks wait.
OpPtr waiting(Outbox& outbox, std::uint64_t seq, std::size_t num_chunks, int server = kOther) {
  const OpPtr op = operation(seq, num_chunks, server);
  for (std::uint64_t index = 0; index < num_chunks; ++index) outbox.add(op, index);
  return op;
}

TEST(outbox_keeps_the_order_of_the_calls) {
  Outbox outbox;
  waiting(outbox, 4, 2);
  waiting(outbox, 5, 1);
  waiting(outbox, 6, 2);
  const Sent all{{4, 0}, {4, 1}, {5, 0}, {6, 0}, {6, 1}};
  CHECK(sent(outbox, 1000) == all);
  CHECK_EQ(outbox.bytes_in_flight(), 5 * kBytes);
}

TEST(outbox_keeps_the_window) {
  Outbox outbox;
  const OpPtr op = waiting(outbox, 0, 5);
  CHECK(sent(outbox, 25) == (Sent{{0, 0}, {0, 1}}));
  CHECK(sent(outbox, 25).empty());
  outbox.arrived(*op, 0);
  CHECK_EQ(outbox.bytes_in_flight(), kBytes);
  CHECK(sent(outbox, 25) == (Sent{{0, 2}}));
  outbox.arrived(*op, 1);
  outbox.arrived(*op, 2);
  CHECK(sent(outbox, 0) == (Sent{{0, 3}}));  // larger than the window, and nothing is on its way
}

TEST(outbox_needs_no_window_for_the_server_beside_it) {
  Outbox outbox;
  waiting(outbox, 0, 3, kMe);
  CHECK_EQ(sent(outbox, 0).size(), 3u);
  CHECK_EQ(outbox.bytes_in_flight(), 0u);
}

// As sums inside a host end in any order, what is newer may fill the window.
TEST(outbox_keeps_one_chunk_of_the_oldest_operation_on_its_way) {
  Outbox outbox;
  const OpPtr old = operation(0, 3);
  waiting(outbox, 1, 4);
  CHECK(sent(outbox, 20) == (Sent{{1, 0}, {1, 1}}));
  for (const std::uint64_t index : {0, 1, 2}) outbox.add(old, index);
  CHECK(sent(outbox, 20) == (Sent{{0, 0}}));
  outbox.arrived(*old, 0);
  CHECK(sent(outbox, 20) == (Sent{{0, 1}}));
  outbox.arrived(*old, 1);
  CHECK(sent(outbox, 20) == (Sent{{0, 2}}));
  CHECK(sent(outbox, 20).empty());  // the oldest waits for nothing more but is not over
  outbox.arrived(*old, 2);
  CHECK(sent(outbox, 20).empty());  // the window is full of the next
}

TEST(outbox_never_exceeds_the_window) {
  Outbox outbox;
  for (std::uint64_t seq = 0; seq < 6; ++seq) waiting(outbox, seq, 1);
  CHECK_EQ(sent(outbox, 30).size(), 3u);
  CHECK_EQ(outbox.bytes_in_flight(), 30u);
}

// As sums inside a host end in any order.
TEST(outbox_sends_the_lowest_chunk_that_it_has) {
  Outbox outbox;
  const OpPtr op = operation(0, 5);
  for (const std::uint64_t index : {0, 4, 2}) outbox.add(op, index);
  CHECK(sent(outbox, 20) == (Sent{{0, 0}, {0, 2}}));
  outbox.add(op, 3);
  CHECK(sent(outbox, 1000) == (Sent{{0, 3}, {0, 4}}));
}

TEST(outbox_gives_the_room_of_what_arrived_to_the_others) {
  Outbox outbox;
  const OpPtr op = waiting(outbox, 0, 2);
  waiting(outbox, 1, 2);
  CHECK(sent(outbox, 20) == (Sent{{0, 0}, {0, 1}}));
  outbox.arrived(*op, 1);
  CHECK(sent(outbox, 20) == (Sent{{1, 0}}));
}

}  // namespace flow_control_outbox_test
