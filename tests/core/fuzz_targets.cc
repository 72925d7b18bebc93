#include "fuzz_targets.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include "made_rank.h"
#include "transport/address.h"
#include "transport/connection.h"
#include "transport/handshake.h"
#include "transport/identity.h"

namespace fuzz {

namespace {

using namespace shoal;

void require(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: broken promise: %s\n", promise);
  std::abort();
}

// Takes values from an input, and zeros after its end.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  bool any() const { return left_ > 0; }
  std::uint8_t byte() { return left_ ? (--left_, *data_++) : std::uint8_t{0}; }
  std::size_t below(std::size_t limit) { return byte() % limit; }
  template <class Value>
  Value value() {
    Value value{};
    for (std::size_t k = 0; k < sizeof value; ++k) reinterpret_cast<std::uint8_t*>(&value)[k] = byte();
    return value;
  }
  Bytes bytes(std::size_t count) {
    Bytes taken(std::min(count, left_));
    for (std::uint8_t& each : taken) each = byte();
    return taken;
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

// Mostly a value that frames of one operation share, so that they reach each other; sometimes any.
template <class Value>
Value near(Input& in, Value usual) {
  return in.below(16) ? usual : in.value<Value>();
}

// The words of a frame. Checksums and codes are right, as check_header makes sure of.
FrameHeader header_of(Input& in, Kind kind, Element input, Element element) {
  FrameHeader header;
  const auto code = [&in](auto usual, std::size_t count) {
    return in.below(16) ? usual : static_cast<decltype(usual)>(in.below(count));
  };
  header.kind = code(kind, kNumKinds);
  header.element = code(element, kNumElements);
  header.input = code(input, kNumElements);
  header.combine = code(Combine::sum, kNumCombines);
  header.redo = static_cast<std::uint8_t>(in.below(4) ? 0 : in.below(4));
  header.host = static_cast<std::uint16_t>(in.below(3));
  header.needed = near<std::uint16_t>(in, 3);
  header.divisor = near<std::uint16_t>(in, 3);
  header.root = in.below(4) ? static_cast<std::int32_t>(in.below(3)) : near<std::int32_t>(in, 0);
  header.seq = in.below(3);
  header.chunk = in.below(3);
  header.signature = near<std::uint64_t>(in, 0);
  header.submitted = near<std::uint64_t>(in, 2);
  header.completed = near<std::uint64_t>(in, 0);
  header.step = static_cast<std::uint32_t>(in.below(4));
  header.table = near<std::uint32_t>(in, static_cast<std::uint32_t>(in.below(3)));
  header.rule = near<std::uint32_t>(in, static_cast<std::uint32_t>(in.below(3)));
  header.server = near<std::uint32_t>(in, 3);
  return header;
}

Payload some_payload(BufferPool& pool, Input& in, std::size_t size) {
  Payload payload = pool.payload(size);
  std::byte* to = payload.writable();
  const std::uint8_t fill = in.byte();
  for (std::size_t k = 0; k < size; ++k) to[k] = static_cast<std::byte>(k < 64 ? in.byte() : fill);
  return payload;
}

std::size_t some_size(Input& in) {
  constexpr std::array<std::size_t, 8> kSizes{0, 1, 4, 8, 12, 32, 64, 8192};
  return in.below(8) ? kSizes[in.below(kSizes.size())] : in.value<std::uint16_t>();
}

// ---- frames ---------------------------------------------------------------------------------------------

struct Taken : Sink {
  int on_introduction(const Introduction&, std::string&) override { return 0; }
  void on_connected(int) override {}
  void on_frame(int, const FrameHeader& header, Payload payload) override {
    require(check_header(header).empty(), "a frame that is passed on has a right header");
    require(payload.size() == header.payload_bytes, "a frame has the bytes that it announces");
    ++num_frames;
  }
  void on_down(int, const std::string&) override {}
  void on_tick() override {}
  void on_error(const std::string&) override {}
  std::size_t num_frames = 0;
};

// A stream of frames: right ones, and bytes between them.
void read_frames(Input& in) {
  BufferPool pool;
  std::string stream;
  std::size_t num_right = 0;
  bool all_right = true;
  while (in.any() && stream.size() < 100'000) {
    if (in.below(8) == 0) {
      const Bytes raw = in.bytes(in.byte());
      stream.append(raw.begin(), raw.end());
      all_right = all_right && raw.empty();
      continue;
    }
    FrameHeader header = header_of(in, Kind::all_reduce, Element::float32, Element::float32);
    header.type = static_cast<FrameType>(in.below(static_cast<std::size_t>(shoal::kLastFrameType) + 1));
    Payload payload = some_payload(pool, in, some_size(in));
    set_checksums(header, payload);
    if (in.below(8) == 0) {  // a lie, which its checksum covers or not
      reinterpret_cast<std::uint8_t*>(&header)[in.below(sizeof header)] ^= in.byte();
      all_right = false;
    }
    num_right += all_right;
    stream.append(reinterpret_cast<const char*>(&header), sizeof header);
    stream.append(reinterpret_cast<const char*>(payload.data()), payload.size());
  }
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "there is a pair of sockets");
  const int room = 1 << 20;
  setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
  const ssize_t sent = write(ends[1], stream.data(), stream.size());
  close(ends[1]);
  Connection::Shared shared;
  Taken taken;
  bool refused = false;
  {
    const NetworkHold hold(shared.network);
    Connection connection(ends[0], 1, true, shared);
    try {
      connection.read_all(taken);
    } catch (const std::runtime_error&) {
      refused = true;
    }
  }
  if (sent != static_cast<ssize_t>(stream.size())) return;
  require(taken.num_frames >= num_right, "right frames arrive");
  require(!refused || !all_right, "right frames are not refused");
}

// ---- sum server and served weights ----------------------------------------------------------------------

Kind some_kind(Input& in) {
  constexpr std::array<Kind, 9> kKinds{Kind::all_reduce, Kind::reduce_scatter, Kind::broadcast, Kind::all_gather,
                                       Kind::configure,  Kind::load,           Kind::update,    Kind::collect,
                                       Kind::apply};
  return kKinds[in.below(kKinds.size())];
}

void serve(Input& in) {
  constexpr int kHosts = 3;
  constexpr std::size_t kBudget = 1 << 18;
  BufferPool pool;
  WeightBudget budget(kBudget);
  const bool is_helper = in.below(2) == 1;
  std::size_t given = 0;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::set<int>> contributed;  // by operation and chunk
  SumServer::SendCopy send_copy;
  if (is_helper) send_copy = [](const FrameHeader&, const Payload&) { return 9; };
  SumServer server(
      pool, budget, kHosts,
      [&](int peer, const FrameHeader& header, const Payload& payload) {
        if (header.type == FrameType::copied) return;
        require(contributed[{header.seq, header.chunk}].count(peer) > 0, "who is answered has contributed");
        Payload answer = payload;
        static_cast<void>(answer.checksum());  // sanitizer builds compare one that is believed
      },
      [](const SumServer::Conflict&) {}, std::move(send_copy));
  const Kind kind = some_kind(in);
  while (in.any()) {
    FrameHeader header = header_of(in, in.below(4) ? kind : some_kind(in), Element::float32, Element::float32);
    Payload payload = some_payload(pool, in, some_size(in));
    given += payload.size();
    const int peer = static_cast<int>(in.below(kHosts));
    const SumServer::Contributor from{peer, peer};
    if (in.below(8)) header.host = static_cast<std::uint16_t>(peer);
    contributed[{header.seq, header.chunk}].insert(peer);
    header.type = FrameType::push;
    try {
      switch (in.below(8)) {
        case 0:
          header.type = FrameType::supply;
          server.supply(from, header, std::move(payload));
          break;
        case 1: is_helper ? server.confirm_copy(9, header) : server.take_copy(8, header, std::move(payload)); break;
        case 2: server.forget_below(in.below(4)); break;
        default: server.contribute(from, header, std::move(payload));
      }
    } catch (const GroupFailure&) {
      server.clear();
    }
    require(server.held_bytes() <= given, "no more is held than was given");
    require(budget.used_bytes <= kBudget, "weights stay within their budget");
  }
  server.clear();
  require(server.held_bytes() == 0 && budget.used_bytes == 0, "what is cleared holds nothing");
}

void keep_weights(Input& in) {
  BufferPool pool;
  WeightBudget budget(1 << 18);
  {
    ServedWeights weights(pool, budget);
    while (in.any()) {
      constexpr std::array<Kind, 9> kKinds{Kind::configure, Kind::load,   Kind::dump,      Kind::update, Kind::collect,
                                           Kind::measure,   Kind::factor, Kind::normalise, Kind::apply};
      const Kind kind = kKinds[in.below(kKinds.size())];
      const bool sums = kind == Kind::update || kind == Kind::collect;
      const Element input = kind == Kind::configure ? Element::uint8 : sums ? Element::float32 : Element::int32;
      FrameHeader header = header_of(in, kind, input, returns_weights(kind) ? Element::float32 : input);
      Payload sum = some_payload(pool, in, some_size(in));
      if (kind == Kind::configure && in.below(4)) {  // options that are right but for their numbers
        const std::uint32_t head[4] = {header.rule + 1, static_cast<std::uint32_t>(in.below(8)), 1, 0};
        const double group[kOptionsOfGroup] = {0.5, 0.9, 0.99, 1e-8, in.below(4) ? 0.0 : in.value<double>(), 0};
        sum = pool.payload(sizeof head + sizeof group);
        std::byte* to = sum.writable();
        std::memcpy(to, head, sizeof head);
        std::memcpy(to + sizeof head, group, sizeof group);
      }
      try {
        if (weights.is_early(header)) continue;
        weights.take(header, sum);
        static_cast<void>(sum.checksum());
      } catch (const GroupFailure&) {
      }
      require(budget.used_bytes <= budget.max_bytes, "weights stay within their budget");
    }
  }
  require(budget.used_bytes == 0, "weights that are gone need nothing");
}

// ---- handshake ------------------------------------------------------------------------------------------

template <class Read>
void refused_or_read(const Read& read) {
  try {
    read();
  } catch (const std::runtime_error&) {
  }
}

void shake_hands(Input& in) {
  static const Credentials mine{{'k', 'e', 'y'}, new_key_pair()}, theirs{{'k', 'e', 'y'}, new_key_pair()};
  const std::size_t step = in.below(5);
  const Bytes name = step == 4 ? in.bytes(in.byte()) : Bytes{};
  const Introduction intro{{name.begin(), name.end()}, step == 4 && in.below(2) == 1, step == 4 && in.below(2) == 1};
  Caller caller(mine, intro, "here", {});
  Listener listener(theirs, "here");
  const Bytes hello = caller.hello();
  if (step == 4) {  // an identity that is made right, and its name as a member may choose it
    refused_or_read([&] {
      const Introduction read = listener.introduction(caller.identity(listener.challenge(hello)));
      require(read.control == intro.control && read.knocks == intro.knocks && read.name.size() <= kMaxProcessName, "an identity is what was introduced");
    });
    return;
  }
  const Bytes message = in.bytes(512);
  refused_or_read([&] {
    if (step == 0) require((listener.challenge(message), false), "nobody guesses a first message");
  });
  refused_or_read([&] {
    if (step == 1) require((caller.identity(message), false), "nobody guesses a challenge");
  });
  refused_or_read([&] {
    if (step == 2) require((listener.challenge(hello), listener.introduction(message), false), "nobody guesses an identity");
  });
  refused_or_read([&] {
    if (step != 3) return;
    FrameHeader header;
    header.group = in.value<std::uint32_t>();
    read_join(header, payload_of(std::string(message.begin(), message.end())));
  });
}

// ---- a rank ---------------------------------------------------------------------------------------------

// Frames of two other ranks and two helpers, while two sums are under way.
void be_a_member(Input& in) {
  NetworkLock lock;
  const NetworkHold hold(lock);
  made::Rank rank(0, 3, 2, {0, 1, 3, 4}, 64);
  std::vector<float> first(32, 1.0f), second(32, 2.0f);
  try {
    for (std::vector<float>* x : {&first, &second}) {
      OpSpec spec;
      spec.kind = Kind::all_reduce;
      spec.element = Element::float32;
      spec.count = x->size();
      spec.input = reinterpret_cast<const std::byte*>(x->data());
      spec.output = reinterpret_cast<std::byte*>(x->data());
      rank.begin(spec);
    }
    const std::uint64_t signature = rank.ops.pending().front()->signature;
    while (in.any()) {
      FrameHeader header = header_of(in, Kind::all_reduce, Element::float32, Element::float32);
      constexpr std::array<FrameType, 8> kTypes{FrameType::push,  FrameType::result,   FrameType::supply,      FrameType::copy,
                                                FrameType::order, FrameType::announce, FrameType::server_down, FrameType::mismatch};
      header.type = kTypes[in.below(kTypes.size())];
      if (in.below(16)) header.signature = signature;
      const int peer = 1 + static_cast<int>(in.below(4));
      if (in.below(8)) header.host = static_cast<std::uint16_t>(peer % 3);
      header.submitted = std::min<std::uint64_t>(header.submitted, 1 << 20);
      Payload payload = some_payload(rank.pool, in, in.below(4) ? 64 : some_size(in));
      rank.take(peer, header, std::move(payload));
      rank.progress();
      for (const auto& step : std::exchange(rank.posted, {})) step();
    }
  } catch (const GroupFailure&) {
  } catch (const ProtocolError&) {
  }
  rank.frames.sent.clear();
  rank.path.clear();
  rank.ops.end_all("the input has ended");
}

}  // namespace

void run(const std::uint8_t* data, std::size_t size) {
  Input in(data, size);
  switch (in.below(5)) {
    case 0: return read_frames(in);
    case 1: return serve(in);
    case 2: return keep_weights(in);
    case 3: return shake_hands(in);
    default: return be_a_member(in);
  }
}

}  // namespace fuzz
