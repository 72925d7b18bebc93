// Sends frames that lie about anything but their sender's own data: no sum is wrong, and an error names the liar.
//
// The group is of 3 ranks and a helper, by the engine's own parts; the links are queues, whose frames are taken in a random
// order. Rank 2 lies: before, after or in place of one of its frames goes another one, with the same payload and with
// fields that are not true. It serves no chunk itself, so all its data is its own. A failed group is replaced by a new one.
// SHOAL_LIES=1000000 sends so many, SHOAL_LIES_SEED=7 others.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "made_rank.h"
#include "transport/frame.h"

namespace engine_lies_test {

using namespace shoal;

constexpr int kRanks = 3, kLiar = 2, kHelper = 3, kActors = 4;
constexpr std::size_t kChunkBytes = 64;
constexpr std::uint64_t kCount = 48;  // elements: 3 chunks, of the helper and the two others
constexpr std::uint64_t kCompleted = 100;

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* const given = std::getenv(name);
  return given ? std::strtoull(given, nullptr, 10) : otherwise;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : bits_(seed) {}
  std::uint64_t below(std::uint64_t most) { return bits_() % most; }
  std::uint64_t any() { return bits_(); }
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[below(all.size())];
  }

 private:
  std::mt19937_64 bits_;
};

enum class Outcome { unnoticed, named, waits, blamed_others, wrong };

class World {
 public:
  World() {
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks_.push_back(std::make_unique<made::Rank>(rank, kRanks, 1, std::vector<int>{kHelper, 0, 1}, kChunkBytes));
    }
    const auto send = [this](int peer, const FrameHeader& header, const Payload& payload) { links_[kHelper][peer].push_back({peer, header, payload}); };
    server_ = std::make_unique<SumServer>(pool_, budget_, kRanks, send, [this](const SumServer::Conflict& conflict) { report(conflict); });
  }

  // Runs one operation to its end, with one lie about it.
  Outcome run(Random& random) {
    const Kind kind = random.one_of({Kind::all_reduce, Kind::all_reduce, Kind::reduce, Kind::reduce_scatter, Kind::all_gather, Kind::broadcast});
    begin(kind, static_cast<int>(random.below(2)));
    std::size_t until_lie = random.below(6);
    bool lied = false;
    for (collect(); problem_.empty(); collect()) {
      const auto link = any_link(random);
      if (!link.first) break;
      made::Sending sent = std::move(link.first->front());
      link.first->pop_front();
      if (link.second != kLiar || lied || until_lie-- > 0) {
        take(link.second, std::move(sent));
        continue;
      }
      lied = true;
      const std::uint64_t place = random.below(3);
      made::Sending lie = lie_of(sent, random);
      if (place == 0) take(kLiar, sent);
      take(kLiar, std::move(lie));
      if (place == 1) take(kLiar, std::move(sent));
    }
    return outcome();
  }

 private:
  std::size_t place_of(int rank) const { return static_cast<std::size_t>(rank); }

  void begin(Kind kind, int root) {
    kind_ = kind;
    root_ = root;
    const bool gathers = kind == Kind::all_gather, scatters = kind == Kind::reduce_scatter;
    const std::uint64_t count = gathers || scatters ? kChunkBytes / sizeof(float) : kCount;
    for (int rank = 0; rank < kRanks; ++rank) {
      given_[place_of(rank)].assign(scatters ? count * kRanks : count, static_cast<float>(1 << (4 * rank)));
      got_[place_of(rank)].assign(gathers ? count * kRanks : count, -1.0f);
      if (kind == Kind::broadcast) got_[place_of(rank)] = given_[place_of(rank)];
      OpSpec spec;
      spec.kind = kind;
      spec.element = Element::float32;
      spec.count = count;
      spec.root = root;
      spec.input = reinterpret_cast<const std::byte*>(given_[place_of(rank)].data());
      spec.output = reinterpret_cast<std::byte*>(got_[place_of(rank)].data());
      if (kind == Kind::broadcast) spec.input = spec.output;
      spec.shape = {static_cast<std::int64_t>(count)};
      if (gathers) std::copy(given_[place_of(rank)].begin(), given_[place_of(rank)].end(), got_[place_of(rank)].begin() + static_cast<std::ptrdiff_t>(count) * rank);
      ops_[place_of(rank)] = nullptr;
      guarded(rank, [&] { ops_[place_of(rank)] = ranks_[place_of(rank)]->begin(spec); });
    }
  }

  bool has_ended(int rank) const { return ops_[place_of(rank)] && ops_[place_of(rank)]->ended; }

  bool is_right(int rank) const {
    const std::vector<float>& got = got_[place_of(rank)];
    const auto all = [&](std::size_t from, std::size_t to, float value) {
      return std::all_of(got.begin() + static_cast<std::ptrdiff_t>(from), got.begin() + static_cast<std::ptrdiff_t>(to), [value](float x) { return x == value; });
    };
    const std::size_t part = got.size() / kRanks;
    switch (kind_) {
      case Kind::broadcast: return all(0, got.size(), given_[place_of(root_)][0] );
      case Kind::all_gather: return all(0, part, 1.0f) && all(part, 2 * part, 16.0f);  // what rank 2 gives is its own affair
      case Kind::reduce: return rank != root_ || all(0, got.size(), 273.0f);
      default: return all(0, got.size(), 273.0f);
    }
  }

  std::pair<std::deque<made::Sending>*, int> any_link(Random& random) {
    std::vector<std::pair<std::deque<made::Sending>*, int>> waiting;
    for (int from = 0; from < kActors; ++from) {
      for (auto& link : links_[place_of(from)]) {
        if (!link.empty()) waiting.emplace_back(&link, from);
      }
    }
    return waiting.empty() ? std::pair<std::deque<made::Sending>*, int>{nullptr, -1} : waiting[random.below(waiting.size())];
  }

  void collect() {
    for (int rank = 0; rank < kRanks; ++rank) {
      for (const auto& step : std::exchange(ranks_[place_of(rank)]->posted, {})) guarded(rank, step);
      for (made::Sending& each : std::exchange(ranks_[place_of(rank)]->frames.sent, {})) links_[place_of(rank)][place_of(each.peer)].push_back(std::move(each));
    }
  }

  Payload copy_of(const Payload& payload) { return payload.copied_to(pool_.take(payload.size())); }

  // Another frame of rank 2 with the payload of a true one, for anybody.
  made::Sending lie_of(const made::Sending& sent, Random& random) {
    made::Sending lie{sent.peer, sent.header, copy_of(sent.payload)};
    if (random.below(4) == 0) lie.peer = random.one_of({0, 1, kHelper});
    FrameHeader& header = lie.header;
    const auto number = [&](std::uint64_t truth) { return random.one_of<std::uint64_t>({truth + 1, truth - 1, truth ^ (std::uint64_t{1} << random.below(64)), random.below(8), random.any()}); };
    for (std::uint64_t k = 0, fields = 1 + random.below(3); k < fields; ++k) {
      switch (random.below(18)) {
        case 0: header.type = random.one_of({FrameType::push, FrameType::result, FrameType::supply, FrameType::order, FrameType::announce, FrameType::mismatch, FrameType::copy, FrameType::copied}); break;
        case 1: header.kind = static_cast<Kind>(random.below(kNumKinds)); break;
        case 2: header.element = static_cast<Element>(random.below(kNumElements)); break;
        case 3: header.input = static_cast<Element>(random.below(kNumElements)); break;
        case 4: header.combine = static_cast<Combine>(random.below(kNumCombines)); break;
        case 5: header.redo = static_cast<std::uint8_t>(random.below(3)); break;
        case 6: header.host = static_cast<std::uint16_t>(number(header.host)); break;
        case 7: header.needed = static_cast<std::uint16_t>(number(header.needed)); break;
        case 8: header.divisor = static_cast<std::uint16_t>(number(header.divisor)); break;
        case 9: header.root = static_cast<std::int32_t>(number(static_cast<std::uint64_t>(header.root))); break;
        case 10: header.server = static_cast<std::uint32_t>(number(header.server)); break;
        case 11: header.seq = number(header.seq); break;
        case 12: header.chunk = number(header.chunk); break;
        case 13: header.signature = number(header.signature); break;
        case 14: header.submitted = number(header.submitted); break;
        case 15: header.step = header.table = header.rule = static_cast<std::uint32_t>(random.below(3)); break;
        case 16: lie.payload = Payload::of_buffer(pool_.take(kChunkBytes), random.below(kChunkBytes)); break;
        default: lie.payload = {};
      }
    }
    if (lie.payload.size() && lie.payload.size() != sent.payload.size()) std::memset(lie.payload.writable(), 0, lie.payload.size());
    return lie;
  }

  void take(int from, made::Sending sent) {
    if (!problem_.empty()) return;
    const int to = sent.peer;
    Payload payload = sent.payload.size() ? copy_of(sent.payload) : Payload{};
    sent.payload = {};
    guarded(to, [&] {
      if (to < kRanks) {
        made::Rank& rank = *ranks_[place_of(to)];
        rank.take(from, sent.header, std::move(payload));
        return rank.progress();
      }
      std::string wrong;
      const FrameType type = sent.header.type;
      if (type == FrameType::push) wrong = server_->contribute({from, from}, sent.header, std::move(payload));
      if (type == FrameType::supply) wrong = server_->supply({from, from}, sent.header, std::move(payload));
      if (type == FrameType::copied) wrong = server_->confirm_copy(from, sent.header);
      if (!wrong.empty()) fail(from, "rank " + std::to_string(from) + " sent a helper a malformed frame: " + wrong);
    });
  }

  // Runs a step of an actor. What the liar's own parts say of others is not counted.
  void guarded(int actor, const std::function<void()>& step) {
    try {
      step();
    } catch (const ProtocolError& error) {
      if (actor != kLiar) fail(error.peer, error.what());
    } catch (const GroupFailure& error) {
      const std::string liar = ranks_[0]->members.name_of(kLiar);
      if (actor != kLiar) fail(contains(error.what(), liar) ? kLiar : -1, error.what());
    }
  }

  void report(const SumServer::Conflict& conflict) {
    if (conflict.first.signature == conflict.second.signature) {
      return fail(conflict.second.peer == kLiar ? kLiar : conflict.first.peer, "two contributions conflict");
    }
    for (const SumServer::Sender& sender : {conflict.first, conflict.second}) {
      FrameHeader header;
      header.type = FrameType::mismatch;
      header.seq = conflict.seq;
      header.chunk = static_cast<std::uint64_t>(sender.peer);
      header.signature = sender.signature;
      for (int rank = 0; rank < kRanks; ++rank) links_[kHelper][place_of(rank)].push_back({rank, header, {}});
    }
  }

  void fail(int named, const std::string& what) {
    if (!problem_.empty()) return;
    problem_ = what;
    named_ = named;
  }

  Outcome outcome() {
    for (int rank = 0; rank < kLiar; ++rank) {
      if (has_ended(rank) && !is_right(rank)) return Outcome::wrong;
    }
    if (!problem_.empty()) return named_ == kLiar ? Outcome::named : Outcome::blamed_others;
    return has_ended(0) && has_ended(1) && has_ended(kLiar) ? Outcome::unnoticed : Outcome::waits;
  }

 public:
  const std::string& problem() const { return problem_; }

  ~World() {
    for (auto& rank : ranks_) {
      rank->frames.sent.clear();
      rank->path.clear();
      rank->ops.end_all("the test has ended");
    }
  }

 private:
  BufferPool pool_;
  WeightBudget budget_{1 << 20};
  std::unique_ptr<SumServer> server_;
  std::vector<std::unique_ptr<made::Rank>> ranks_;
  std::array<std::array<std::deque<made::Sending>, kActors>, kActors> links_;
  std::array<std::vector<float>, kRanks> given_, got_;
  std::array<OpPtr, kRanks> ops_;
  Kind kind_{};
  int root_ = 0, named_ = -1;
  std::string problem_;
};

TEST(engine_lies_make_no_sum_wrong_and_name_the_liar) {
  const std::uint64_t lies = setting("SHOAL_LIES", 3'000);
  Random random(setting("SHOAL_LIES_SEED", 1));
  std::array<std::uint64_t, 5> count{};
  std::string not_named;
  auto world = std::make_unique<World>();
  for (std::uint64_t k = 0, in_world = 0; k < lies; ++k) {
    const Outcome outcome = world->run(random);
    ++count[static_cast<std::size_t>(outcome)];
    if (outcome == Outcome::blamed_others) not_named += "lie " + std::to_string(k) + ": " + world->problem() + "\n";
    if (outcome == Outcome::wrong) check::fail(__FILE__, __LINE__, "lie " + std::to_string(k) + " makes a sum wrong");
    if (outcome == Outcome::unnoticed && ++in_world < kCompleted) continue;
    world = std::make_unique<World>();
    in_world = 0;
  }
  CHECK_EQ(not_named, "");
  std::printf("(%llu lies: %llu named, %llu without effect, %llu frames kept back) ",
              static_cast<unsigned long long>(lies), static_cast<unsigned long long>(count[1]), static_cast<unsigned long long>(count[0]),
              static_cast<unsigned long long>(count[2]));
  CHECK(count[1] > lies / 8);
}

// What a relay does to the frames of a connection with tags: changes a bit, repeats, leaves out, exchanges, or cuts off.
TEST(engine_lies_of_a_relay_are_all_seen) {
  const std::uint64_t lies = setting("SHOAL_LIES", 3'000);
  Random random(setting("SHOAL_LIES_SEED", 1));
  BufferPool pool;
  std::uint64_t taken = 0;
  for (std::uint64_t k = 0; k < lies; ++k) {
    const auto protection = random.below(2) ? Protection::tag : Protection::encrypt;
    Gcm::Key key{};
    for (auto& byte : key) byte = static_cast<std::uint8_t>(random.any());
    Seal sends(protection, key), receives(protection, key);
    struct Sealed {
      FrameHeader header;
      Payload payload;
    };
    std::vector<Sealed> frames(3);
    for (Sealed& each : frames) {
      Payload plain = pool.payload(16 + random.below(64));
      std::memset(plain.writable(), static_cast<int>(random.below(256)), plain.size());
      each.header.seq = random.below(1000);
      each.payload = sends.close(each.header, std::move(plain), pool);
    }
    const std::size_t at = random.below(2);  // the last one is true, and shows what was left out before
    auto* const header = reinterpret_cast<unsigned char*>(&frames[at].header);
    switch (random.below(5)) {
      case 0: header[random.below(sizeof(FrameHeader))] ^= static_cast<unsigned char>(1u << random.below(8)); break;
      case 1: {
        Payload changed = frames[at].payload.copied_to(pool.take(frames[at].payload.size()));
        changed.writable()[random.below(changed.size())] ^= static_cast<std::byte>(1u << random.below(8));
        frames[at].payload = std::move(changed);
        break;
      }
      case 2: frames.insert(frames.begin() + static_cast<std::ptrdiff_t>(at), frames[at]); break;
      case 3: frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(at)); break;
      default: std::swap(frames[at], frames[at + 1]);
    }
    bool seen = false;
    for (std::size_t n = 0; n < frames.size() && !seen; ++n) {
      const Sealed& each = frames[n];
      seen = !receives.check(each.header).empty();
      if (seen) break;
      std::shared_ptr<std::byte> buffer = pool.take(each.payload.size());
      std::memcpy(buffer.get(), each.payload.data(), each.payload.size());
      try {
        static_cast<void>(receives.open(each.header, std::move(buffer)));
      } catch (const std::runtime_error&) {
        seen = true;
      }
    }
    taken += !seen;
  }
  CHECK_EQ(taken, 0u);
}

}  // namespace engine_lies_test
