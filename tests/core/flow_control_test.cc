#include "engine/flow_control.h"

#include <vector>

#include "base/clock.h"
#include "check.h"
#include "made_group.h"

namespace flow_control_test {

using made::Parts;

void give_options(Parts& group, int connections, std::size_t min_window_bytes) {
  group.options.chunk_bytes = 1 << 10;
  group.options.min_window_bytes = min_window_bytes;
  group.options.connections_per_peer = connections;
}

std::vector<shoal::Outgoing> taken(shoal::FlowControl& flow) {
  std::vector<shoal::Outgoing> found;
  while (const auto next = flow.next()) found.push_back(*next);
  return found;
}

// Begins an all_reduce of 256 chunks of 1 KiB; returns those that are sent before the first is answered.
std::vector<shoal::Outgoing> sent_at_once(Parts& group, shoal::FlowControl& flow, std::vector<float>& x) {
  const shoal::OpPtr op = group.all_reduce(x);
  CHECK_EQ(op->parts.size(), 256u);
  for (std::uint64_t index = 0; index < op->parts.size(); ++index) {
    op->parts[index].server = Parts::kFirst;
    op->parts[index].contribution = {op->input_at(index, Parts::kMe), op->bytes_of(index)};
    flow.add(op, index);
  }
  return taken(flow);
}

// How many chunks go to the servers of a pattern before the first is answered.
std::size_t num_at_once(int connections, std::size_t min_window_bytes, const std::vector<int>& pattern = {0, 1, 2, 3}) {
  Parts group;
  give_options(group, connections, min_window_bytes);
  group.topology.set_pattern(pattern);
  shoal::Liveness liveness(group.members, group.topology, group.router, group.ops, group.mailbox, group.journal, 1.0);
  shoal::FlowControl flow(group.options, group.topology, liveness, group.mailbox);
  std::vector<float> x(64 << 10);
  return sent_at_once(group, flow, x).size();
}

TEST(flow_control_the_least_window_holds_a_message_on_each_connection) {
  CHECK_EQ(num_at_once(1, 1 << 10), 4u);
  CHECK_EQ(num_at_once(3, 1 << 10), 12u);
  CHECK_EQ(num_at_once(1, 2 << 10), 8u);
  CHECK_EQ(num_at_once(2, 100), 8u);   // less than a message
  CHECK_EQ(num_at_once(1, 0), 128u);   // the usual message's 32 KiB
}

// A server that the pattern leaves out takes no message, and the others' links need not queue it.
TEST(flow_control_the_least_window_counts_the_servers_of_the_pattern) {
  CHECK_EQ(num_at_once(1, 1 << 10, {3}), 1u);
  CHECK_EQ(num_at_once(3, 1 << 10, {3}), 3u);
  CHECK_EQ(num_at_once(1, 1 << 10, {1, 3, 1, 1}), 2u);
}

TEST(flow_control_another_pattern_leaves_the_window_of_each_server) {
  Parts group;
  give_options(group, 1, 1 << 10);
  shoal::Liveness liveness(group.members, group.topology, group.router, group.ops, group.mailbox, group.journal, 1.0);
  shoal::FlowControl flow(group.options, group.topology, liveness, group.mailbox);
  std::vector<float> x(64 << 10);
  const auto sent = sent_at_once(group, flow, x);
  CHECK_EQ(sent.size(), 4u);
  for (const auto& [op, index] : sent) {
    op->parts[index].sent_ns = shoal::now_ns();  // answered at once: the window doubles
    flow.answered(*op, index);
  }
  CHECK_EQ(taken(flow).size(), 8u);
  flow.clear();
  group.topology.set_pattern({3});
  CHECK_EQ(sent_at_once(group, flow, x).size(), 2u);
  flow.clear();
  group.topology.set_pattern({1, 2, 3});
  CHECK_EQ(sent_at_once(group, flow, x).size(), 6u);
}

}  // namespace flow_control_test
