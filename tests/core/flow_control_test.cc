#include "engine/flow_control.h"

#include "check.h"
#include "made_group.h"

namespace flow_control_test {

using made::Parts;

// How many chunks of 1 KiB go to one of the four servers before the first is answered.
std::size_t num_at_once(int connections, std::size_t min_window_bytes) {
  Parts group;
  group.options.chunk_bytes = 1 << 10;
  group.options.min_window_bytes = min_window_bytes;
  group.options.connections_per_peer = connections;
  shoal::Liveness liveness(group.members, group.topology, group.router, group.ops, group.mailbox, group.journal, 1.0);
  shoal::FlowControl flow(group.options, group.topology, liveness, group.mailbox);
  std::vector<float> x(64 << 10);
  const shoal::OpPtr op = group.all_reduce(x);
  CHECK_EQ(op->parts.size(), 256u);
  for (std::uint64_t index = 0; index < op->parts.size(); ++index) {
    op->parts[index].server = Parts::kFirst;
    op->parts[index].contribution = {op->input_at(index, Parts::kMe), op->bytes_of(index), nullptr, 0, false};
    flow.add(op, index);
  }
  std::size_t num = 0;
  while (flow.next()) ++num;
  return num;
}

TEST(flow_control_the_least_window_holds_a_message_on_each_connection) {
  CHECK_EQ(num_at_once(1, 1 << 10), 4u);
  CHECK_EQ(num_at_once(3, 1 << 10), 12u);
  CHECK_EQ(num_at_once(1, 2 << 10), 8u);
  CHECK_EQ(num_at_once(2, 100), 8u);   // less than a message
  CHECK_EQ(num_at_once(1, 0), 128u);   // the usual message's 32 KiB
}

}  // namespace flow_control_test
