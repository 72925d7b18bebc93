#include "engine/flow_control.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "made_op.h"

namespace flow_control_ordered_test {

using made::kBytes;
using made::kMe;
using made::kOther;
using made::Sent;
using made::sent;
using shoal::OpPtr;
using shoal::OrderedOutbox;

constexpr std::uint64_t kAll = 100;  // all ranks have begun everything

OpPtr waiting(OrderedOutbox& outbox, std::uint64_t seq, int priority, std::size_t num_chunks, int server = kOther) {
  const OpPtr op = made::operation(seq, num_chunks, server);
  op->spec.priority = priority;
  for (std::uint64_t index = 0; index < num_chunks; ++index) outbox.add(op, index);
  return op;
}

// Sets the order of all that waits, in runs of `bytes`.
void set_order(OrderedOutbox& outbox, std::uint64_t num_begun, std::size_t bytes, std::uint64_t& number) {
  while (const auto run = outbox.choose(num_begun, bytes)) outbox.extend(number++, *run);
}

TEST(ordered_outbox_sends_the_most_urgent_first) {
  OrderedOutbox outbox;
  std::uint64_t number = 0;
  waiting(outbox, 1, -3, 2);
  waiting(outbox, 2, 7, 1);
  waiting(outbox, 3, -1, 2);
  waiting(outbox, 4, 7, 1);
  CHECK(sent(outbox, 1000).empty());  // no order yet
  set_order(outbox, kAll, 1, number);
  CHECK_EQ(number, 6u);
  CHECK_EQ(outbox.bytes_ahead(), 6 * kBytes);
  CHECK(sent(outbox, 1000) == (Sent{{2, 0}, {4, 0}, {3, 0}, {3, 1}, {1, 0}, {1, 1}}));
  CHECK_EQ(outbox.bytes_ahead(), 0u);
}

TEST(ordered_outbox_turns_to_what_became_urgent_behind_the_runs_that_are_set) {
  OrderedOutbox outbox;
  waiting(outbox, 1, -3, 4);
  const auto first = outbox.choose(kAll, 15);
  CHECK(first && first->seq == 1 && first->end == 2);
  outbox.extend(0, *first);
  waiting(outbox, 2, -1, 2);
  std::uint64_t number = 1;
  set_order(outbox, kAll, 1000, number);
  CHECK_EQ(number, 3u);
  CHECK(sent(outbox, 1000) == (Sent{{1, 0}, {1, 1}, {2, 0}, {2, 1}, {1, 2}, {1, 3}}));
}

TEST(ordered_outbox_holds_urgent_only_what_all_have_begun) {
  OrderedOutbox outbox;
  std::uint64_t number = 0;
  waiting(outbox, 1, -3, 1);
  waiting(outbox, 2, -1, 1);
  waiting(outbox, 3, -2, 1);
  const auto run = outbox.choose(2, 1);  // operation 2 not everywhere
  CHECK(run && run->seq == 1);
  outbox.extend(number++, *run);
  set_order(outbox, 3, 1, number);  // nor is 3: the oldest goes
  CHECK(sent(outbox, 1000) == (Sent{{1, 0}, {2, 0}, {3, 0}}));
}

TEST(ordered_outbox_waits_for_its_turn) {
  OrderedOutbox outbox;
  waiting(outbox, 5, -1, 2);
  outbox.extend(1, {5, 2});
  CHECK(sent(outbox, 1000).empty());  // the run before it is not known
  outbox.extend(0, {4, 1});
  CHECK(sent(outbox, 1000).empty());  // operation 4 has not begun here
  waiting(outbox, 4, -9, 1);
  CHECK(sent(outbox, 1000) == (Sent{{4, 0}, {5, 0}, {5, 1}}));
}

TEST(ordered_outbox_keeps_the_window) {
  OrderedOutbox outbox;
  std::uint64_t number = 0;
  const OpPtr op = waiting(outbox, 0, -1, 4);
  const OpPtr beside = waiting(outbox, 1, -2, 2, kMe);
  set_order(outbox, kAll, 1000, number);
  CHECK(sent(outbox, 25) == (Sent{{0, 0}, {0, 1}}));
  outbox.arrived(*op, 0);
  CHECK(sent(outbox, 25) == (Sent{{0, 2}}));
  outbox.arrived(*op, 1);
  outbox.arrived(*op, 2);
  CHECK(sent(outbox, 0) == (Sent{{0, 3}, {1, 0}, {1, 1}}));  // larger than the window; the others need none
  CHECK_EQ(outbox.bytes_in_flight(), kBytes);
  outbox.arrived(*op, 3);
  CHECK_EQ(outbox.bytes_in_flight(), 0u);
}

// Ranks with windows of two chunks begin operations when they like, and some only when an older one has ended. Each
// chunk is answered once all have sent it; the order travels to the others with delay.
TEST(ordered_outbox_never_hangs) {
  constexpr std::size_t kRanks = 3, kOps = 8, kWindow = 2 * kBytes;
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 draw(seed);
    std::vector<OrderedOutbox> outboxes(kRanks);
    std::vector<std::size_t> num_begun(kRanks, 0), num_heard(kRanks, 0);
    std::vector<std::vector<OpPtr>> ops(kRanks);
    std::vector<OrderedOutbox::Run> order;
    std::vector<std::size_t> sizes(kOps), waits_for(kOps * kRanks);
    for (auto& size : sizes) size = 1 + draw() % 5;
    for (std::size_t k = 0; k < waits_for.size(); ++k) waits_for[k] = k % kOps ? draw() % (k % kOps + 1) : 0;
    std::vector<std::vector<std::size_t>> num_sent(kOps);  // of each chunk
    for (std::size_t op = 0; op < kOps; ++op) num_sent[op].resize(sizes[op]);
    const auto ended = [&](std::size_t op) {
      return std::ranges::all_of(num_sent[op], [](std::size_t num) { return num == kRanks; });
    };
    for (int turn = 0; turn < 4000; ++turn) {
      const std::size_t rank = draw() % kRanks, next = num_begun[rank];
      if (next < kOps && draw() % 2) {
        const std::size_t before = waits_for[rank * kOps + next];  // so many older ones must be over
        bool free = true;
        for (std::size_t op = 0; op < before; ++op) free = free && ended(op);
        if (free) {
          ops[rank].push_back(waiting(outboxes[rank], next, static_cast<int>(next * 5 % 7) - 9, sizes[next]));
          ++num_begun[rank];
        }
      }
      if (rank == 0 && outboxes[0].bytes_ahead() < 2 * kWindow) {
        const auto run = outboxes[0].choose(*std::ranges::min_element(num_begun), 1 + draw() % 30);
        if (run) order.push_back(*run);
      }
      if (num_heard[rank] < order.size()) {
        outboxes[rank].extend(num_heard[rank], order[num_heard[rank]]);
        ++num_heard[rank];
      }
      while (const auto next_chunk = outboxes[rank].next(kWindow, kRanks)) {
        CHECK(outboxes[rank].bytes_in_flight() <= kWindow);
        const auto& [op, index] = *next_chunk;
        if (++num_sent[op->seq][index] < kRanks) continue;
        for (std::size_t each = 0; each < kRanks; ++each) outboxes[each].arrived(*ops[each][op->seq], index);
      }
    }
    for (std::size_t op = 0; op < kOps; ++op) CHECK(ended(op));
  }
}

}  // namespace flow_control_ordered_test
