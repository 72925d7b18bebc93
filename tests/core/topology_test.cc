#include "engine/topology.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"

namespace topology_test {

using shoal::Chunk;
using shoal::FusedBuffer;
using shoal::Kind;
using shoal::OpSpec;
using shoal::Topology;

const std::vector<std::vector<std::string>> kHosts = {
    {"a"}, {"a", "a"}, {"a", "b"}, {"a", "a", "b", "b"}, {"a", "b", "a"}, {"b", "a", "a", "a", "c", "b", "d"}};

std::vector<int> all_servers(std::size_t ranks, int num_helpers) {
  std::vector<int> pattern;
  for (int k = 0; k < static_cast<int>(ranks) + num_helpers; ++k) pattern.push_back(k);
  return pattern;
}

OpSpec spec_of(Kind kind, shoal::Element element, std::uint64_t count, int root) {
  OpSpec spec;
  spec.kind = kind;
  spec.element = element;
  spec.count = count;
  spec.root = root;
  return spec;
}

// Calls see(spec, max_chunk_bytes) for many operations that `size` ranks could do.
template <class See>
void for_each_spec(int size, See see) {
  for (Kind kind : {Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::all_gather, Kind::reduce_scatter}) {
    for (auto element : {shoal::Element::float32, shoal::Element::bfloat16, shoal::Element::uint8, shoal::Element::int64}) {
      for (std::uint64_t count : {0, 1, 15, 16, 17, 4097, 100'003}) {
        for (std::size_t bytes : {std::size_t{128}, std::size_t{1000}, std::size_t{8} << 10, std::size_t{65'000}, std::size_t{1} << 20}) {
          see(spec_of(kind, element, count, static_cast<int>(count) % size), bytes);
        }
      }
    }
  }
}

TEST(topology_cut_covers_every_element_once) {
  for (const auto& hosts : kHosts) {
    for (int helpers : {0, 2}) {
      const Topology topology(0, hosts, helpers, all_servers(hosts.size(), helpers));
      FusedBuffer fused;
      for_each_spec(topology.size(), [&](const OpSpec& spec, std::size_t most) {
        std::vector<Chunk> chunks = topology.cut(spec, most, fused);
        // Parts take turns in the order of sending.
        std::stable_sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) { return a.begin < b.begin; });
        std::uint64_t at = 0;
        for (const Chunk& chunk : chunks) {
          CHECK_EQ(chunk.begin, at);
          CHECK(chunk.count > 0 || spec.count == 0);
          CHECK(chunk.count * size_of(spec.element) <= most);
          CHECK(chunk.server >= 0 && chunk.server < topology.size() + helpers);
          at += chunk.count;
        }
        const bool many = spec.kind == Kind::all_gather || spec.kind == Kind::reduce_scatter;
        CHECK_EQ(at, many ? spec.count * static_cast<std::uint64_t>(topology.size()) : spec.count);
        CHECK(!chunks.empty());
      });
    }
  }
}

// Large operations of few hosts have larger messages, of which each server still gets 64 at least.
TEST(topology_messages_grow_with_the_bytes_of_a_server) {
  const auto messages = [](std::size_t hosts, int helpers, Kind kind, std::size_t bytes) {
    std::vector<std::string> names;
    for (std::size_t k = 0; k < hosts; ++k) names.push_back("h" + std::to_string(k));
    const Topology topology(0, names, helpers, all_servers(hosts, helpers));
    return topology.message_bytes(spec_of(kind, shoal::Element::float32, bytes / 4, 0));
  };
  constexpr std::size_t kKiB = 1 << 10, kMiB = 1 << 20;
  CHECK_EQ(messages(2, 0, Kind::all_reduce, 4 * kMiB), 32 * kKiB);
  CHECK_EQ(messages(2, 0, Kind::all_reduce, 8 * kMiB), 64 * kKiB);
  CHECK_EQ(messages(2, 2, Kind::all_reduce, 16 * kMiB), 64 * kKiB);
  CHECK_EQ(messages(2, 0, Kind::all_reduce, 1024 * kMiB), 256 * kKiB);
  CHECK_EQ(messages(4, 0, Kind::all_reduce, 1024 * kMiB), 128 * kKiB);
  CHECK_EQ(messages(8, 8, Kind::all_reduce, 16 * kMiB), 32 * kKiB);
  CHECK_EQ(messages(16, 0, Kind::all_reduce, 1024 * kMiB), 16 * kKiB);
  CHECK_EQ(messages(2, 0, Kind::all_gather, 4 * kMiB), 64 * kKiB);  // of each rank
  CHECK_EQ(messages(2, 0, Kind::all_reduce, 10 * kMiB + 4 * 16), 80 * kKiB);  // multiples of 128 bytes
  CHECK_EQ(Topology(0, {"a", "a", "b"}, 0, {0, 1, 2}).message_bytes(spec_of(Kind::all_reduce, shoal::Element::float32, 1 << 28, 0)),
           32 * kKiB);  // ranks that share a host
}

// What all hosts send to one server at once is 256 KiB from 8 hosts on; messages have 8 KiB at least.
TEST(topology_messages_of_many_hosts_fit_a_queue) {
  const auto usual = [](std::size_t hosts) {
    std::vector<std::string> names;
    for (std::size_t k = 0; k < hosts; ++k) names.push_back("h" + std::to_string(k));
    return Topology(0, names, 0, all_servers(hosts, 0)).usual_message_bytes();
  };
  for (std::size_t hosts : {1, 4, 8}) CHECK_EQ(usual(hosts), std::size_t{32} << 10);
  CHECK_EQ(usual(10), std::size_t{26112});  // a multiple of 128
  CHECK_EQ(usual(16), std::size_t{16} << 10);
  CHECK_EQ(usual(32), std::size_t{8} << 10);
  CHECK_EQ(usual(200), std::size_t{8} << 10);
}

TEST(topology_links_of_a_pattern) {
  Topology topology(0, {"a", "a", "b", "c"}, 2, all_servers(4, 2));
  CHECK_EQ(topology.num_links(Kind::all_reduce), 5);
  topology.set_pattern({4, 5, 4});
  CHECK_EQ(topology.num_links(Kind::all_reduce), 2);
  topology.set_pattern({0, 1, 3, 5});  // two ranks share a link
  CHECK_EQ(topology.num_links(Kind::broadcast), 3);
  for (Kind kind : {Kind::all_gather, Kind::reduce_scatter}) CHECK_EQ(topology.num_links(kind), 3);
}

// A rank's own part of a reduce_scatter or all_gather is cut at its edges and served by that rank: one hop.
TEST(topology_fixed_parts_are_served_by_their_rank) {
  for (const auto& hosts : kHosts) {
    const Topology topology(0, hosts, 1, all_servers(hosts.size(), 1));
    FusedBuffer fused;
    for (Kind kind : {Kind::all_gather, Kind::reduce_scatter}) {
      const OpSpec spec = spec_of(kind, shoal::Element::float32, 10'001, 0);
      for (const Chunk& chunk : topology.cut(spec, 8 << 10, fused)) {
        const auto begin = static_cast<std::uint64_t>(chunk.server) * spec.count;
        CHECK(chunk.begin >= begin && chunk.begin + chunk.count <= begin + spec.count);
      }
    }
    CHECK_EQ(fused.next(1, 3), 0u);  // they have taken no place
  }
}

TEST(topology_chunks_of_one_size_follow_the_pattern_across_operations) {
  const std::vector<int> pattern{2, 0, 1, 2};
  const Topology topology(1, {"a", "b"}, 1, pattern);
  for (std::uint64_t size : {std::uint64_t{8} << 10, std::uint64_t{32} << 10}) {
    FusedBuffer fused;
    std::vector<int> servers;
    for (std::uint64_t count : {40, 101, 48}) {  // so many that the chunks are as large as they may be
      for (const Chunk& chunk : topology.cut(spec_of(Kind::all_reduce, shoal::Element::uint8, count * size, 0), size, fused)) {
        CHECK_EQ(chunk.count, size);
        servers.push_back(chunk.server);
      }
    }
    CHECK_EQ(servers.size(), 189u);
    for (std::size_t k = 0; k < servers.size(); ++k) CHECK_EQ(servers[k], pattern[k % pattern.size()]);
  }
}

// Small operations are laid one behind the other: a server sums whole runs of them, and the bytes of each server
// are in the pattern's proportion, to one chunk, whatever the sizes are and however they follow each other.
TEST(topology_small_operations_are_fused_and_balanced_by_bytes) {
  constexpr std::int64_t kMost = 32 << 10;
  const std::vector<int> pattern{3, 0, 1, 3, 2};  // server 3 has twice the share of the others
  const std::vector<std::int64_t> shares{1, 1, 1, 2};
  const Topology topology(0, {"a", "b", "c"}, 1, pattern);
  const std::vector<std::vector<std::int64_t>> mixtures = {
      {1024}, {100}, {kMost}, {1024, 30 << 10}, {200, 8192, 31'000}, {5, 70, 900, 1100, 13'000, 29'999, 100'000}};
  for (const auto& sizes : mixtures) {
    FusedBuffer fused;
    std::vector<std::int64_t> taken(4, 0);
    int turns = 0, last = -1, chunks = 0;
    for (int round = 0; round < 2000; ++round) {
      const auto bytes = sizes[static_cast<std::size_t>(round) % sizes.size()];
      const OpSpec spec = spec_of(Kind::all_reduce, shoal::Element::uint8, static_cast<std::uint64_t>(bytes), 0);
      for (const Chunk& chunk : topology.cut(spec, kMost, fused)) {
        taken[static_cast<std::size_t>(chunk.server)] += std::max<std::int64_t>(static_cast<std::int64_t>(chunk.count), 64);
        turns += chunk.server != last;
        last = chunk.server;
        ++chunks;
      }
    }
    for (std::size_t a = 0; a < taken.size(); ++a) {
      for (std::size_t b = 0; b < taken.size(); ++b) {
        const std::int64_t apart = taken[a] / shares[a] - taken[b] / shares[b];
        CHECK(apart <= 2 * kMost && apart >= -2 * kMost);
      }
    }
    if (sizes == mixtures[0]) CHECK_EQ(turns, chunks / 8);   // eight of 1 KiB go to one server in a row
    if (sizes == mixtures[1]) CHECK(turns <= chunks / 80);
  }
}

TEST(topology_all_ranks_cut_and_own_alike) {
  for (const auto& hosts : kHosts) {
    const auto pattern = all_servers(hosts.size(), 2);
    std::vector<Topology> views;
    for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) views.emplace_back(rank, hosts, 2, pattern);
    std::vector<FusedBuffer> fused(views.size());
    for_each_spec(views[0].size(), [&](const OpSpec& spec, std::size_t most) {
      const auto chunks = views[0].cut(spec, most, fused[0]);
      for (std::size_t rank = 1; rank < views.size(); ++rank) {
        const auto theirs = views[rank].cut(spec, most, fused[rank]);
        CHECK_EQ(theirs.size(), chunks.size());
        for (std::size_t k = 0; k < std::min(chunks.size(), theirs.size()); ++k) {
          CHECK(theirs[k].begin == chunks[k].begin && theirs[k].count == chunks[k].count && theirs[k].server == chunks[k].server);
        }
      }
      for (std::size_t k = 0; k < std::min<std::size_t>(chunks.size(), 9); ++k) {
        for (int host = 0; host < views[0].num_hosts(); ++host) {
          const int owner = views[0].owner(host, spec, k, chunks[k]);
          CHECK_EQ(views[0].host_of(owner), host);
          for (const Topology& view : views) CHECK_EQ(view.owner(host, spec, k, chunks[k]), owner);
          // Who serves a chunk speaks for its own host about it, and so does a root: neither is passed by.
          if (!views[0].is_helper(chunks[k].server) && views[0].host_of(chunks[k].server) == host) CHECK_EQ(owner, chunks[k].server);
          const bool rooted = spec.kind == Kind::broadcast || spec.kind == Kind::reduce;
          if (rooted && views[0].host_of(spec.root) == host) CHECK_EQ(owner, spec.root);
          if (rooted) CHECK(!views[0].is_helper(chunks[k].server));
          const bool beside = views[0].is_helper(chunks[k].server) || views[0].host_of(chunks[k].server) == host;
          if (!beside) CHECK(views[0].exchange(owner, chunks[k].server));
        }
      }
    });
  }
}

// With as many ranks on each host, a rank exchanges chunks with one of each other host.
TEST(topology_chunks_go_between_ranks_in_the_same_place) {
  std::vector<std::string> hosts;
  for (int rank = 0; rank < 24; ++rank) hosts.push_back("h" + std::to_string(rank / 4));
  const Topology topology(0, hosts, 0, all_servers(hosts.size(), 0));
  for (int rank = 0; rank < 24; ++rank) {
    for (int other = 0; other < 24; ++other) {
      if (rank / 4 != other / 4) CHECK_EQ(topology.exchange(rank, other), rank % 4 == other % 4);
    }
  }
  const Topology uneven(0, {"a", "a", "a", "b"}, 0, all_servers(4, 0));
  for (int rank = 0; rank < 3; ++rank) CHECK(uneven.exchange(rank, 3) && uneven.exchange(3, rank));
}

TEST(topology_places) {
  const Topology topology(3, {"b", "a", "b", "a", "c"}, 1, {0});
  CHECK_EQ(topology.num_hosts(), 3);
  CHECK_EQ(topology.my_host(), 1);  // hosts count by their lowest rank
  CHECK_EQ(topology.local_index(), 1);
  CHECK((topology.my_locals() == std::vector<int>{1, 3}));
  CHECK((topology.locals(0) == std::vector<int>{0, 2}));
  CHECK(topology.any_host_shared());
  CHECK(topology.is_helper(5) && !topology.is_helper(4));
  CHECK_THROWS(std::invalid_argument, Topology(2, {"a", "b"}, 0, {0}));
  CHECK_THROWS(std::invalid_argument, Topology(0, {"a", "b"}, 0, {}));
  CHECK_THROWS(std::invalid_argument, Topology(0, {"a", "b"}, 1, {0, 3}));
}

// Losing a server that does not stand in for a chunk leaves that chunk where it is.
TEST(topology_stand_ins_stay_when_others_are_lost) {
  const Topology topology(0, {"a", "b", "c"}, 5, all_servers(3, 5));
  std::vector<int> times(8, 0);
  for (bool ranks : {true, false}) {
    for (std::uint64_t seq = 0; seq < 40; ++seq) {
      for (std::uint64_t chunk = 0; chunk < 40; ++chunk) {
        std::vector<bool> lost(5, false);
        lost[(seq + chunk) % 5] = true;
        int winner = topology.stand_in(seq, chunk, lost, ranks);
        times[static_cast<std::size_t>(winner)] += ranks;
        for (std::size_t next = 0; next < 5; ++next) {
          lost[next] = true;
          const int then = topology.stand_in(seq, chunk, lost, ranks);
          CHECK(then < 0 || then < 3 || !lost[static_cast<std::size_t>(then) - 3]);
          CHECK(ranks || then < 0 || then >= 3);
          if (winner != static_cast<int>(next) + 3) CHECK_EQ(then, winner);
          winner = then;
        }
        CHECK_EQ(winner < 0, !ranks);  // only ranks are left, or nobody
      }
    }
  }
  for (int server = 0; server < 8; ++server) CHECK(times[static_cast<std::size_t>(server)] > 100);  // 200 on average
}

}  // namespace topology_test
