// Explores every order in which 3 ranks and 2 helpers can take their frames, while one helper crashes or one rank loses
// its connection to it. A stall is an actor whose frames wait: all orders have all of them. The actors are the engine's
// own parts; the links are queues.
//
// Two orders are one state if every server has taken the same frames, every actor looks the same, and the same frames
// wait. Frames that change nothing are taken at once. A state is made again by taking its path from the beginning.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "check.h"
#include "made_rank.h"

namespace engine_explore_test {

using namespace shoal;

constexpr int kRanks = 3, kActors = 5, kVictim = 3, kCutter = 1;  // helpers are actors 3 and 4
constexpr std::uint64_t kCount = 32;                              // elements: 2 chunks

// Faults as they once were in the engine (issue "Right on every machine", 2): the explorer has to find them.
enum class Plant { none, keeps_the_queue, stale_checksum };

struct Event {
  enum class Type { take, crash, cut, notice } type;
  int from = 0, to = 0;
};

struct Helper {
  BufferPool pool;
  WeightBudget budget{1 << 20};
  std::unique_ptr<SumServer> server;
  std::set<int> left;  // ranks
};

class World {
 public:
  World(Kind kind, Plant plant) : kind_(kind), plant_(plant) {
    for (int helper = kRanks; helper < kActors; ++helper) open(helper);
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks_.push_back(std::make_unique<made::Rank>(rank, kRanks, 2, std::vector<int>{3, 4}, 1 << 16));
      made::Rank& made = *ranks_.back();
      made.dropped = [this, rank](int server) { drop(rank, server); };
    }
    if (kind == Kind::update) load_weights();
    const std::array<float, kRanks> given{1e8f, 1.0f, -1e8f};  // another order gives another sum
    for (int rank = 0; rank < kRanks; ++rank) memory_[rank].assign(kCount, kind == Kind::update ? 1.0f : given[static_cast<std::size_t>(rank)]);
    expected_ = kind == Kind::update ? 0.5f : (given[0] + given[1]) + given[2];
    for (int rank = 0; rank < kRanks; ++rank) ops_[rank] = begin(rank, kind, Element::float32, memory_[rank].data(), kCount, 1);
    look();
  }

  std::vector<Event> events() const {
    std::vector<Event> events;
    for (int from = 0; from < kActors; ++from) {
      for (int to = 0; to < kActors; ++to) {
        if (!links_[from][to].empty() && !(crashed_ && to == kVictim)) events.push_back({Event::Type::take, from, to});
      }
    }
    if (!crashed_ && !cut_) {
      events.push_back({Event::Type::crash});
      events.push_back({Event::Type::cut});
    }
    for (int rank = 0; crashed_ && rank < kRanks; ++rank) {
      if (!lost(rank)) events.push_back({Event::Type::notice, kVictim, rank});
    }
    return events;
  }

  void apply(const Event& event) {
    try {
      switch (event.type) {
        case Event::Type::take: take(event.from, event.to); break;
        case Event::Type::crash: crashed_ = true; break;
        case Event::Type::notice: lose(event.to); break;
        case Event::Type::cut:
          cut_ = true;
          helpers_[kVictim].left.insert(kCutter);
          links_[kCutter][kVictim].clear();
          lose(kCutter);
      }
    } catch (const GroupFailure& error) {
      problem = std::string("the group fails: ") + error.what();
    } catch (const ProtocolError& error) {
      problem = std::string("a frame is taken for a lie: ") + error.what();
    }
    look();
    if (problem.empty() && events().empty() && num_done_ < kRanks) problem = "nothing is left to happen, and ranks still wait";
  }

  std::string digest() const {
    std::string text = std::to_string(crashed_) + std::to_string(cut_);
    for (int actor = 0; actor < kActors; ++actor) text += "|" + std::to_string(taken_[actor]);
    for (int rank = 0; rank < kRanks; ++rank) {
      text += lost(rank) ? "L" : "-";
      text += done_[rank] ? "D" : "-";
      for (const Op::Part& part : ops_[rank]->parts) text += std::to_string(part.server) + std::to_string(static_cast<int>(part.step));
      text += std::to_string(ranks_[rank]->liveness.num_completed_by_all());
    }
    for (const auto& row : links_) {
      for (const auto& link : row) {
        for (const made::Sending& each : link) text += key_of(each.header);
        text += ".";
      }
    }
    return text;
  }

  std::string problem;

 private:
  static std::string key_of(const FrameHeader& header) {
    return std::to_string(static_cast<int>(header.type)) + "," + std::to_string(header.chunk) + "," + std::to_string(header.redo) + ";";
  }

  bool lost(int rank) const { return ranks_[rank]->router.is_lost(kVictim); }

  void open(int number) {
    Helper& helper = helpers_[number];
    const auto send = [this, number](int peer, const FrameHeader& header, const Payload& payload) {
      if (!helpers_[number].left.count(peer)) links_[number][peer].push_back({peer, header, payload});
    };
    helper.server = std::make_unique<SumServer>(helper.pool, helper.budget, kRanks, send, [this](const SumServer::Conflict&) { problem = "a conflict"; },
                                                [send](FrameHeader header, const Payload& sum) {
                                                  header.type = FrameType::copy;
                                                  const int buddy = buddy_of(header.table, header.chunk, kRanks);
                                                  send(buddy, header, sum);
                                                  return buddy;
                                                });
  }

  OpPtr begin(int rank, Kind kind, Element element, void* data, std::uint64_t count, std::uint32_t step) {
    OpSpec spec;
    spec.kind = kind;
    spec.element = element;
    spec.combine = kind == Kind::load || kind == Kind::configure ? Combine::bor : Combine::sum;
    spec.count = count;
    spec.input = spec.output = static_cast<std::byte*>(data);
    spec.shape = {static_cast<std::int64_t>(count)};
    spec.step = spec.rule = kind == Kind::update ? step : 0;
    spec.copied = is_served(kind);
    std::vector<Chunk> chunks{{0, kCount / 2, 3}, {kCount / 2, kCount / 2, 4}};
    return ranks_[rank]->begin(spec, kind == Kind::configure ? std::vector<Chunk>{} : std::move(chunks));
  }

  // Weights of 2 and SGD's options, before anything is explored.
  void load_weights() {
    struct {
      std::uint32_t head[4] = {1, 0, 1, 0};
      double group[6] = {0.5, 0, 0, 0, 0, 0};
    } options;
    std::array<std::vector<float>, kRanks> weights;
    for (int rank = 0; rank < kRanks; ++rank) {
      weights[rank].assign(kCount, rank == 0 ? 2.0f : 0.0f);
      begin(rank, Kind::load, Element::int32, weights[rank].data(), kCount, 0);
    }
    settle();
    std::array<decltype(options), kRanks> given;
    for (int rank = 0; rank < kRanks; ++rank) begin(rank, Kind::configure, Element::uint8, &given[rank], sizeof options, 0);
    settle();
  }

  void settle() {
    for (bool any = true; any;) {
      any = false;
      collect();
      for (int from = 0; from < kActors; ++from) {
        for (int to = 0; to < kActors; ++to) {
          while (!links_[from][to].empty()) {
            take(from, to);
            collect();
            any = true;
          }
        }
      }
    }
    taken_ = {};
  }

  void take(int from, int to) {
    made::Sending sent = std::move(links_[from][to].front());
    links_[from][to].pop_front();
    if (to >= kRanks || (carries_data(sent.header.type) && sent.header.type != FrameType::result)) taken_[to] += crc32c(key_of(sent.header).data(), key_of(sent.header).size()) * static_cast<std::uint64_t>(from + 1);
    // as a connection passes it on: a copy of its own, with the sender's checksum
    std::shared_ptr<std::byte> buffer = pool_.take(sent.payload.size());
    if (sent.payload.size()) std::memcpy(buffer.get(), sent.payload.data(), sent.payload.size());
    const std::uint32_t checksum = sent.payload.size() ? crc32c(buffer.get(), sent.payload.size()) : 0;
    const auto stale = stale_.find({from, sent.header.chunk});
    const bool updates = sent.header.kind == Kind::update;
    if (updates && sent.header.type == FrameType::result && stale != stale_.end() && stale->second != checksum) problem = "a payload does not match its checksum";
    if (plant_ == Plant::stale_checksum && updates && sent.header.type == FrameType::copy) stale_[{to, sent.header.chunk}] = checksum;
    Payload payload = Payload::received(std::move(buffer), sent.payload.size(), checksum);
    sent.payload = {};
    if (to < kRanks) return give(from, to, sent.header, std::move(payload));
    Helper& helper = helpers_[to];
    if (helper.left.count(from)) return;
    std::string wrong;
    if (sent.header.type == FrameType::leave) helper.left.insert(from);
    if (sent.header.type == FrameType::push) wrong = helper.server->contribute({from, from}, sent.header, std::move(payload));
    if (sent.header.type == FrameType::copied) wrong = helper.server->confirm_copy(from, sent.header);
    if (!wrong.empty()) problem = "a helper is sent a malformed frame: " + wrong;
  }

  void give(int from, int to, const FrameHeader& header, Payload payload) {
    if (from == kVictim && lost(to)) return;  // Channel::receive drops what a lost helper sent
    ranks_[to]->take(from, header, std::move(payload));
    ranks_[to]->progress();
  }

  void lose(int rank) { ranks_[rank]->lose(kVictim, true); }

  // As Channel::drop: nothing that is queued for the helper is sent any more, but that this rank leaves.
  void drop(int rank, int server) {
    auto& link = links_[rank][server];
    collect();
    if (plant_ != Plant::keeps_the_queue) std::erase_if(link, [](const made::Sending& each) { return carries_data(each.header.type); });
    FrameHeader leave;
    leave.type = FrameType::leave;
    link.push_back({server, leave, {}});
  }

  // A rank knows already what the first frame of a link says.
  bool is_known(int from, int to) const {
    if (to >= kRanks || links_[from][to].empty()) return false;
    const FrameHeader& header = links_[from][to].front().header;
    if (from == kVictim && lost(to)) return true;
    if (header.type == FrameType::server_down) return lost(to);
    return header.type == FrameType::result && ops_[to]->parts[header.chunk].step == Op::Step::done;
  }

  void take_known() {
    for (int from = 0; from < kActors; ++from) {
      for (int to = 0; to < kActors; ++to) {
        while (problem.empty() && is_known(from, to)) {
          take(from, to);
          collect();
        }
      }
    }
  }

  void collect() {
    for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
      for (made::Sending& each : std::exchange(ranks_[rank]->frames.sent, {})) links_[rank][each.peer].push_back(std::move(each));
    }
  }

  // Looks at what has ended: the caller uses its memory for something else then.
  void look() {
    collect();
    take_known();
    for (int rank = 0; rank < kRanks; ++rank) {
      if (done_[rank] || !ops_[rank]->ended) continue;
      done_[rank] = true;
      ++num_done_;
      std::vector<float>& memory = memory_[rank];
      if (memory != std::vector<float>(kCount, expected_)) problem = "rank " + std::to_string(rank) + " is done with a wrong sum";
      const auto* begin = reinterpret_cast<const std::byte*>(memory.data());
      for (const auto& link : links_[rank]) {
        for (const made::Sending& each : link) {
          if (each.payload.size() && each.payload.data() >= begin && each.payload.data() < begin + memory.size() * sizeof(float)) {
            problem = "memory of an operation that is over waits to be sent";
          }
        }
      }
      std::ranges::fill(memory, -7.0f);
    }
  }

  const Kind kind_;
  const Plant plant_;
  BufferPool pool_;
  float expected_ = 0;
  std::array<std::vector<float>, kRanks> memory_;
  std::map<std::pair<int, std::uint64_t>, std::uint32_t> stale_;  // checksums by rank and chunk
  std::map<int, Helper> helpers_;
  std::vector<std::unique_ptr<made::Rank>> ranks_;
  std::array<OpPtr, kRanks> ops_;
  std::array<std::array<std::deque<made::Sending>, kActors>, kActors> links_;
  std::array<std::uint64_t, kActors> taken_{};
  std::array<bool, kRanks> done_{};
  int num_done_ = 0;
  bool crashed_ = false, cut_ = false;
};

struct Explored {
  std::size_t num_states = 0, num_ends = 0;
  std::string problem;
};

// Paths that leave the usual one early come first. Ends with the first problem, or after so many states: sanitizers make
// all of them (19,177 of a sum) take minutes. SHOAL_EXPLORE=all explores all.
Explored explore(Kind kind, Plant plant) {
  const std::size_t most_states = std::getenv("SHOAL_EXPLORE") ? ~std::size_t{0} : 1'000;
  Explored result;
  std::set<std::string> seen;
  std::deque<std::vector<Event>> paths{{}};
  while (!paths.empty() && seen.size() < most_states) {
    std::vector<Event> path = std::move(paths.front());
    paths.pop_front();
    World world(kind, plant);
    for (const Event& event : path) world.apply(event);
    while (world.problem.empty() && seen.insert(world.digest()).second) {
      const std::vector<Event> events = world.events();
      if (events.empty()) {
        ++result.num_ends;
        break;
      }
      for (std::size_t k = 1; k < events.size(); ++k) {
        paths.push_back(path);
        paths.back().push_back(events[k]);
      }
      path.push_back(events[0]);
      world.apply(events[0]);
    }
    if (!world.problem.empty()) {
      result.problem = world.problem;
      break;
    }
  }
  result.num_states = seen.size();
  return result;
}

TEST(engine_explore_all_orders_of_a_sum) {
  const Explored all = explore(Kind::all_reduce, Plant::none);
  CHECK_EQ(all.problem, "");
  std::printf("(%zu states, %zu ends) ", all.num_states, all.num_ends);
}

TEST(engine_explore_all_orders_of_an_update) {
  const Explored all = explore(Kind::update, Plant::none);
  CHECK_EQ(all.problem, "");
  std::printf("(%zu states, %zu ends) ", all.num_states, all.num_ends);
}

TEST(engine_explore_finds_a_queue_that_outlives_its_operation) {
  CHECK_EQ(explore(Kind::all_reduce, Plant::keeps_the_queue).problem, "memory of an operation that is over waits to be sent");
}

TEST(engine_explore_finds_a_stale_checksum) {
  CHECK_EQ(explore(Kind::update, Plant::stale_checksum).problem, "a payload does not match its checksum");
}

}  // namespace engine_explore_test
