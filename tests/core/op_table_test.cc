#include "engine/op_table.h"

#include <thread>

#include "check.h"

namespace op_table_test {

using shoal::GroupError;
using shoal::OpPtr;
using shoal::OpTable;

OpPtr added(OpTable& ops) {
  const auto op = std::make_shared<shoal::Op>();
  ops.add({op});
  return op;
}

TEST(op_table_numbers_operations_and_completes_each_with_its_last_reason) {
  OpTable ops("g");
  ops.open();
  const OpPtr first = added(ops), second = added(ops);
  CHECK_EQ(second->seq, 1u);
  CHECK_EQ(ops.num_submitted(), 2u);
  ops.hold(*first, 2);
  ops.release(second);
  CHECK(second->ended);
  CHECK(ops.is_done(1));
  CHECK_EQ(ops.num_completed(), 0u);  // below the first that is pending
  ops.release(first);
  ops.release(first);
  CHECK(!ops.wait(0, 0.0));
  CHECK(!first->ended);
  ops.release(first);
  CHECK(ops.wait(0, 0.0));
  CHECK_EQ(ops.num_completed(), 2u);
  CHECK(ops.find(0) == nullptr);
}

TEST(op_table_an_operation_is_held_by_the_last_copy_of_what_points_into_it) {
  OpTable ops("g");
  ops.open();
  const OpPtr op = added(ops);
  auto owner = ops.held(op);
  auto copy = owner;
  ops.release(op);
  owner.reset();
  CHECK(!op->ended);
  copy.reset();
  CHECK(op->ended);
}

TEST(op_table_a_failure_ends_all_and_the_first_reason_stays) {
  OpTable ops("g");
  ops.open();
  const OpPtr op = added(ops);
  const OpPtr done = added(ops);
  ops.release(done);
  std::thread waiter([&] { CHECK_EQ(CHECK_THROWS(GroupError, ops.wait(0, -1)), "the cause"); });
  ops.end_all("the cause");
  ops.end_all("a later one");
  waiter.join();
  CHECK(op->ended);
  CHECK_EQ(ops.error(), "the cause");
  CHECK(ops.wait(1, 0.0));  // it had completed before
  CHECK_EQ(CHECK_THROWS(GroupError, added(ops)), "the cause");
  ops.release(op);  // what still pointed into it lets go: nothing happens
  CHECK(ops.pending().empty());
}

// Each is called once, in the order in which operations end, and one that comes late at once.
TEST(op_table_calls_back_in_the_order_of_the_ends) {
  OpTable ops("g");
  ops.open();
  const OpPtr first = added(ops), second = added(ops), third = added(ops);
  std::vector<std::uint64_t> ended;
  for (const OpPtr& op : {first, second, third}) {
    ops.on_end(op->seq, [&ended, &ops, seq = op->seq] {
      CHECK(ops.is_done(seq));  // no lock is held
      ended.push_back(seq);
    });
  }
  ops.release(second);
  CHECK(ended == (std::vector<std::uint64_t>{1}));
  ops.on_end(second->seq, [&] { ended.push_back(100); });
  ops.release(first);
  ops.end_all("over");
  CHECK(ended == (std::vector<std::uint64_t>{1, 100, 0, 2}));
}

TEST(op_table_takes_operations_only_while_it_is_open) {
  OpTable ops("g");
  CHECK_EQ(CHECK_THROWS(GroupError, added(ops)), "group 'g' is not open");
  ops.open();
  added(ops);
  CHECK(ops.close());
  CHECK(!ops.close());
  CHECK_EQ(CHECK_THROWS(GroupError, added(ops)), "group 'g' is not open");
  ops.end_all("it was closed");
  CHECK_EQ(ops.error(), "");  // closing is no failure
  CHECK_EQ(CHECK_THROWS(GroupError, ops.wait(0, -1)), "it was closed");
}

}  // namespace op_table_test
