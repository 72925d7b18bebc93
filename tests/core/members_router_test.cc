#include "engine/members.h"

#include <set>

#include "check.h"

namespace members_router_test {

using shoal::GroupFailure;
using shoal::Members;
using shoal::Router;
using shoal::Topology;

Members members_of(std::vector<std::string> hosts, std::vector<std::string> helpers) {
  Members members;
  for (std::string& host : hosts) members.peers.push_back({std::move(host), "10.0.0.1", 1, 0, 1});
  for (std::string& name : helpers) members.helpers.push_back({"10.0.1.1", 4000, std::move(name)});
  return members;
}

TEST(router_sends_chunks_of_a_lost_helper_to_stand_ins_that_all_ranks_agree_on) {
  shoal::NetworkLock lock;
  const shoal::NetworkHold hold(lock);
  const Topology mine(0, {"a", "b", "c"}, 2, {0, 1, 2, 3, 4}), theirs(2, {"a", "b", "c"}, 2, {0, 1, 2, 3, 4});
  const Members members = members_of({"a", "b", "c"}, {"h0", "h1"});
  Router router(members, mine, true), other(members, theirs, true);
  CHECK_EQ(router.route(5, 0, 3), 3);
  for (Router* each : {&router, &other}) CHECK(each->lose(3));
  CHECK(!router.lose(3));  // known
  CHECK(!router.lose(5));  // there is no such helper
  CHECK(!router.lose(1));  // a rank
  CHECK(router.is_lost(3));
  CHECK(!router.is_lost(1));
  std::set<int> used;
  for (std::uint64_t chunk = 0; chunk < 50; ++chunk) {
    CHECK_EQ(router.route(5, chunk, 3), other.route(5, chunk, 3));
    CHECK_EQ(router.route(5, chunk, 1), 1);
    used.insert(router.route(5, chunk, 3));
  }
  CHECK(used == (std::set<int>{0, 1, 2, 4}));
}

TEST(router_fails_the_group_where_no_server_is_left) {
  shoal::NetworkLock lock;
  const shoal::NetworkHold hold(lock);
  const Topology topology(0, {"a", "b"}, 1, {2});
  const Members members = members_of({"a", "b"}, {"h0"});
  Router router(members, topology, false);
  CHECK(router.lose(2));
  CHECK_EQ(CHECK_THROWS(GroupFailure, router.route(0, 0, 2)),
           "no server is left: helper h0 (10.0.1.1:4000) was lost, and workers do not serve");
}

}  // namespace members_router_test
