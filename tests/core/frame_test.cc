#include "transport/frame.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "engine/types.h"
#include "transport/address.h"
#include "transport/connection.h"

namespace frame_test {

using shoal::BufferPool;
using shoal::Connection;
using shoal::FrameHeader;
using shoal::FrameType;
using shoal::Payload;

FrameHeader some_header(std::mt19937_64& random) {
  FrameHeader header;
  header.type = static_cast<FrameType>(random() % 10);
  header.kind = static_cast<shoal::Kind>(random() % 7);
  header.element = static_cast<shoal::Element>(random() % 8);
  header.seq = random();
  header.chunk = random();
  return header;
}

Payload some_payload(std::size_t size, std::mt19937_64& random) {
  std::string text(size, ' ');
  for (char& c : text) c = static_cast<char>(random());
  return shoal::payload_of(text);
}

TEST(frame_every_flipped_bit_of_a_header_is_seen) {
  std::mt19937_64 random(1);
  FrameHeader header = some_header(random);
  Payload payload = some_payload(100, random);
  set_checksums(header, payload);
  CHECK_EQ(check_header(header), "");
  for (std::size_t bit = 0; bit < 8 * sizeof header; ++bit) {
    FrameHeader flipped = header;
    reinterpret_cast<std::uint8_t*>(&flipped)[bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
    CHECK(check_header(flipped) != "");
  }
}

// With good checksums, as a peer with bad memory would send them.
TEST(frame_sealed_nonsense_is_refused) {
  const auto refused = [](auto change) {
    FrameHeader header;
    Payload payload;
    change(header, payload);
    set_checksums(header, payload);
    return check_header(header) != "";
  };
  CHECK(!refused([](FrameHeader&, Payload&) {}));
  CHECK(refused([](FrameHeader& h, Payload&) { h.type = static_cast<FrameType>(static_cast<int>(shoal::kLastFrameType) + 1); }));
  CHECK(refused([](FrameHeader& h, Payload&) { h.kind = static_cast<shoal::Kind>(shoal::kNumKinds); }));
  CHECK(!refused([](FrameHeader& h, Payload&) { h.kind = shoal::Kind::apply; }));
  CHECK(refused([](FrameHeader& h, Payload&) { h.element = static_cast<shoal::Element>(shoal::kNumElements); }));
  CHECK(refused([](FrameHeader& h, Payload&) { h.input = static_cast<shoal::Element>(shoal::kNumElements); }));
  CHECK(refused([](FrameHeader& h, Payload&) { h.combine = static_cast<shoal::Combine>(shoal::kNumCombines); }));
  CHECK(refused([](FrameHeader&, Payload& p) { p = shoal::payload_of(std::string(shoal::kMaxPayload + 1, 0)); }));
}

TEST(frame_text_and_back) {
  for (const std::string& text : {std::string(), std::string("why"), std::string(5000, 'x')}) {
    CHECK_EQ(text_of(shoal::payload_of(text)), text);
  }
}

// What another has, or a caller, is not written; what is written has its checksum computed again.
TEST(frame_payloads_are_written_by_their_only_owner) {
  BufferPool pool;
  Payload payload = Payload::received(pool.take(8), 8, 7);  // a checksum of other bytes: the sender's
  std::memset(payload.writable(), 1, 8);
  const std::uint32_t ones = payload.checksum();
  CHECK_EQ(ones, shoal::payload_of(std::string(8, 1)).checksum());
  Payload other = payload;
  CHECK(contains(CHECK_THROWS(std::logic_error, payload.writable()), "that others have"));
  CHECK_EQ(other.copied_to(pool.take(8)).checksum(), ones);
  other = {};
  std::memset(payload.writable(), 2, 8);
  CHECK(payload.checksum() != ones);
  const std::byte callers{};
  CHECK(contains(CHECK_THROWS(std::logic_error, Payload(&callers, 1).writable()), "that others have"));
  CHECK(contains(CHECK_THROWS(std::logic_error, shoal::payload_of("text").writable()), "that others have"));
}

TEST(buffer_pool_from_many_threads) {
  BufferPool pool;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      std::mt19937_64 random(static_cast<std::uint64_t>(t));
      std::vector<std::pair<std::shared_ptr<std::byte>, std::size_t>> held;
      for (int k = 0; k < 1000; ++k) {
        const std::size_t size = random() % 5000;
        held.emplace_back(pool.take(size), size);
        std::memset(held.back().first.get(), t, size);
        if (held.size() < 8) continue;
        const auto [buffer, bytes] = held[random() % held.size()];
        for (std::size_t i = 0; i < bytes; ++i) CHECK(buffer.get()[i] == static_cast<std::byte>(t));
        held.erase(held.begin());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(buffer_pool_gives_a_buffer_again_and_outlives_its_owner) {
  auto pool = std::make_unique<BufferPool>();
  const std::byte* first = pool->take(1000).get();
  CHECK_EQ(static_cast<const void*>(pool->take(900).get()), static_cast<const void*>(first));
  pool->clear();
  auto kept = pool->take(1000);
  auto other = pool->take(1000);
  CHECK(kept.get() != other.get());
  pool.reset();
  std::memset(kept.get(), 1, 1000);
}

// ---- connections over a pair of sockets -----------------------------------------------------------------

// Passes what a connection receives to two functions.
struct Receiver : shoal::Sink {
  using See = std::function<void(const FrameHeader&, Payload)>;
  using PlaceFor = std::function<std::shared_ptr<std::byte>(const FrameHeader&)>;

  explicit Receiver(See to_see, PlaceFor to_place = {}) : see(std::move(to_see)), place(std::move(to_place)) {}

  int on_introduction(const shoal::Introduction&, std::string&) override { return -1; }
  void on_connected(int) override {}
  std::shared_ptr<std::byte> place_for(int, const FrameHeader& header) override { return place ? place(header) : nullptr; }
  void on_frame(int, const FrameHeader& header, Payload payload) override { see(header, std::move(payload)); }
  void on_down(int, const std::string&) override {}
  void on_tick() override {}
  void on_error(const std::string&) override {}

  See see;
  PlaceFor place;
};

struct Pair {
  explicit Pair(Connection::Seals seals = {}) {
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    raw = fds[0];
    connection = std::make_unique<Connection>(fds[1], 1, false, shared, -1, std::move(seals));
  }
  ~Pair() {
    if (raw >= 0) close(raw);
  }
  void hang_up() { close(std::exchange(raw, -1)); }

  Connection::Shared shared;
  int raw = -1;
  std::unique_ptr<Connection> connection;
};

std::vector<std::uint8_t> bytes_of(FrameHeader header, Payload payload) {
  set_checksums(header, payload);
  std::vector<std::uint8_t> bytes(sizeof header + payload.size());
  std::memcpy(bytes.data(), &header, sizeof header);
  if (payload.size()) std::memcpy(bytes.data() + sizeof header, payload.data(), payload.size());
  return bytes;
}

constexpr shoal::Gcm::Key kSessionKey{1, 2, 3};

// Of a connection that sends with this key, or receives.
Connection::Seals seals_of(shoal::Protection protection, const shoal::Gcm::Key& key = kSessionKey) {
  return {shoal::Seal(protection, key), shoal::Seal(protection, key)};
}

const auto kProtections = {shoal::Protection::checksum, shoal::Protection::tag, shoal::Protection::encrypt};

// Frames of all sizes go through, however the stream is cut.
void arrive_whole_and_in_order(shoal::Protection protection) {
  std::mt19937_64 random(2);
  Pair from(seals_of(protection)), to(seals_of(protection));
  std::vector<FrameHeader> headers;
  std::vector<Payload> payloads;
  for (std::size_t size : {0, 1, 80, 16'304, 16'384, 50'000, 0, 7, 300'000, 3}) {
    headers.push_back(some_header(random));
    payloads.push_back(some_payload(size, random));
    set_checksums(headers.back(), payloads.back());
    from.connection->enqueue(headers.back(), payloads.back());
  }
  std::size_t arrived = 0;
  Receiver see([&](const FrameHeader& header, Payload payload) {
    REQUIRE(arrived < headers.size());
    CHECK(std::memcmp(&header, &headers[arrived], offsetof(FrameHeader, payload_tag)) == 0);
    CHECK(text_of(payload) == text_of(payloads[arrived]));
    ++arrived;
  });
  std::vector<std::uint8_t> waiting(100'000);
  bool written = false;
  while (arrived < headers.size()) {
    if (!written) written = from.connection->write();
    const ssize_t got = read(from.raw, waiting.data(), 1 + random() % waiting.size());
    for (ssize_t at = 0; at < got;) {
      const ssize_t sent = write(to.raw, waiting.data() + at, static_cast<std::size_t>(got - at));
      if (sent > 0) at += sent;
      CHECK(to.connection->read(see));
    }
  }
  CHECK_EQ(from.connection->queued_bytes(), 0u);
  CHECK_EQ(from.connection->bytes_out, to.connection->bytes_in);
  to.hang_up();
  CHECK(!to.connection->read(see));
}

TEST(connection_frames_arrive_whole_and_in_order) {
  for (const auto protection : kProtections) arrive_whole_and_in_order(protection);
}

// A payload is written to its place while it arrives, and to a buffer once the group has dropped its data.
TEST(connection_payloads_go_to_their_place_while_it_lasts) {
  constexpr std::size_t kSize = 50'000, kFirst = 20'000;
  std::mt19937_64 random(9);
  for (const bool drops : {false, true}) {
    Pair pair;
    FrameHeader header = some_header(random);
    const Payload payload = some_payload(kSize, random);
    const auto stream = bytes_of(header, payload);
    std::vector<std::byte> memory(kSize);
    const std::shared_ptr<std::byte> place(memory.data(), [](std::byte*) {});
    int arrived = 0;
    const auto see = [&](const FrameHeader&, Payload got) {
      ++arrived;
      CHECK(text_of(got) == text_of(payload));
      CHECK_EQ(got.data() == memory.data(), !drops);
    };
    const auto place_for = [&](const FrameHeader& begun) {
      CHECK_EQ(begun.seq, header.seq);
      return place;
    };
    Receiver receiver(see, place_for);
    const auto receive = [&](std::size_t begin, std::size_t end) {
      CHECK_EQ(write(pair.raw, stream.data() + begin, end - begin), static_cast<ssize_t>(end - begin));
      CHECK(pair.connection->read(receiver));
    };
    receive(0, kFirst);
    const std::size_t received = kFirst - sizeof header;
    CHECK(std::memcmp(memory.data(), payload.data(), received) == 0);
    CHECK(place.use_count() > 1);
    pair.connection->drop_data(header.group + 1);
    CHECK(place.use_count() > 1);
    if (drops) pair.connection->drop_data(header.group);
    CHECK_EQ(place.use_count() > 1, !drops);
    receive(kFirst, stream.size());
    CHECK_EQ(arrived, 1);
    CHECK_EQ(place.use_count(), 1);
    const bool whole = std::memcmp(memory.data(), payload.data(), kSize) == 0;
    CHECK_EQ(whole, !drops);
  }
}

// A pair of sockets over TCP, whose kernel tells what was acknowledged.
std::pair<int, int> tcp_pair() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0), from = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int small = 4096;
  setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
  const shoal::SocketAddress any("127.0.0.1", 0);
  CHECK(bind(listener, any.get(), any.size) == 0 && listen(listener, 1) == 0);
  const shoal::SocketAddress at("127.0.0.1", shoal::local_port(listener));
  CHECK(connect(from, at.get(), at.size) == 0);
  const int to = accept(listener, nullptr, nullptr);
  close(listener);
  fcntl(from, F_SETFL, O_NONBLOCK);
  return {from, to};
}

// Of a connection that is given up, each frame has arrived whole, or is given back in order, or both.
TEST(connection_gives_back_what_was_not_acknowledged) {
  constexpr std::size_t kFrames = 60, kBytes = 50'000;
  std::mt19937_64 random(11);
  for (const int round : {0, 1, 2, 3}) {
    const bool reads = round % 2;
    Connection::Shared shared;
    const auto [from, to] = tcp_pair();
    Connection connection(from, 1, false, shared, -1, seals_of(round < 2 ? shoal::Protection::checksum : shoal::Protection::encrypt));
    connection.keep_unacknowledged();
    std::vector<std::string> sent;
    std::vector<std::uint8_t> received, chunk(300'000);
    for (std::size_t k = 0; k < kFrames; ++k) {
      FrameHeader header;
      header.type = FrameType::push;
      header.seq = k;
      Payload payload = some_payload(kBytes, random);
      sent.push_back(text_of(payload));
      set_checksums(header, payload);
      connection.enqueue(header, std::move(payload));
    }
    CHECK(!connection.write());  // more than the kernel takes
    if (reads) {
      for (std::size_t taken = 0; taken < 10 * kBytes;) {
        const ssize_t got = recv(to, chunk.data(), chunk.size(), 0);
        REQUIRE(got > 0);
        received.insert(received.end(), chunk.begin(), chunk.begin() + got);
        taken += static_cast<std::size_t>(got);
        connection.write();
      }
    }
    const auto back = connection.take_unacknowledged();
    CHECK_EQ(connection.queued_bytes(), 0u);
    CHECK(!back.empty() && back.back().header.seq == kFrames - 1);
    CHECK_EQ(back.front().header.seq > 0, reads);
    for (std::size_t k = 0; k < back.size(); ++k) {
      CHECK_EQ(back[k].header.seq, back.front().header.seq + k);
      CHECK(text_of(back[k].payload) == sent[back[k].header.seq]);
    }
    shutdown(from, SHUT_WR);
    for (ssize_t got; (got = recv(to, chunk.data(), chunk.size(), 0)) > 0;) received.insert(received.end(), chunk.begin(), chunk.begin() + got);
    const std::size_t arrived = received.size() / (sizeof(FrameHeader) + kBytes);
    CHECK(arrived >= back.front().header.seq);
    close(to);
  }
}

// The frames of a stream, as a connection writes them.
std::vector<std::vector<std::uint8_t>> written_by(Connection::Seals seals, const std::vector<std::string>& texts) {
  Pair pair(std::move(seals));
  std::vector<std::vector<std::uint8_t>> frames;
  for (const std::string& text : texts) {
    FrameHeader header;
    header.seq = frames.size();
    pair.connection->enqueue(header, shoal::payload_of(text));
    CHECK(pair.connection->write());
    frames.emplace_back(sizeof header + text.size());
    CHECK_EQ(read(pair.raw, frames.back().data(), frames.back().size()), static_cast<ssize_t>(frames.back().size()));
  }
  return frames;
}

// What a connection hands over of a stream, and why it has ended: empty, if the stream has.
std::pair<std::vector<std::string>, std::string> heard_from(shoal::Protection protection, const std::vector<std::vector<std::uint8_t>>& stream) {
  Pair pair(seals_of(protection));
  for (const auto& frame : stream) CHECK_EQ(write(pair.raw, frame.data(), frame.size()), static_cast<ssize_t>(frame.size()));
  pair.hang_up();
  std::vector<std::string> texts;
  Receiver see([&](const FrameHeader&, Payload payload) { texts.push_back(text_of(payload)); });
  try {
    while (pair.connection->read(see)) {
    }
  } catch (const std::runtime_error& error) {
    return {texts, error.what()};
  }
  return {texts, ""};
}

// A relay without the session's key flips, repeats, leaves out, exchanges, cuts and inserts; or has frames of another session.
TEST(connection_of_tags_takes_nothing_that_a_relay_has_changed) {
  const std::vector<std::string> texts{"first", "second", "third!"};
  for (const auto protection : {shoal::Protection::tag, shoal::Protection::encrypt}) {
    const auto frames = written_by(seals_of(protection), texts);
    const auto ends = [&](const std::vector<std::vector<std::uint8_t>>& stream, std::size_t num_heard) {
      const auto [heard, why] = heard_from(protection, stream);
      CHECK(std::vector<std::string>(texts.begin(), texts.begin() + static_cast<std::ptrdiff_t>(num_heard)) == heard);
      return why;
    };
    CHECK_EQ(ends(frames, 3), "");
    for (std::size_t bit = 0; bit < 8 * frames[1].size(); ++bit) {
      auto flipped = frames;
      flipped[1][bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
      const std::string why = ends(flipped, 1);
      CHECK(contains(why, bit < 32 ? "magic" : bit < 8 * sizeof(FrameHeader) ? "header does not match its tag" : "payload does not match its tag"));
    }
    const std::string header = "a frame header does not match its tag";
    CHECK(contains(ends({frames[0], frames[0]}, 1), header));             // repeated
    CHECK(contains(ends({frames[0], frames[2]}, 1), header));             // left out
    CHECK(contains(ends({frames[1], frames[0], frames[2]}, 0), header));  // exchanged
    CHECK(contains(ends({frames[0], written_by(seals_of(protection, {9}), texts)[1]}, 1), header));  // of another session
    CHECK(contains(ends({frames[0], written_by({}, texts)[1]}, 1), header));                         // with checksums alone
    auto cut = frames[1];
    cut.pop_back();
    CHECK_EQ(ends({frames[0], cut}, 1), "");  // an end of the stream, which the peer's is
    CHECK(contains(ends({frames[0], cut, frames[2]}, 1), "payload does not match its tag"));
    // Only encryption hides the text.
    const std::string raw(frames[2].begin(), frames[2].end());
    CHECK_EQ(contains(raw, texts[2]), protection == shoal::Protection::tag);
  }
}

// A frame that has its place in the stream is sent although its group has dropped its data; later ones are not.
TEST(connection_of_tags_sends_what_it_has_sealed_when_data_is_dropped) {
  for (const auto protection : kProtections) {
    Connection::Shared shared;
    const auto [from, to] = tcp_pair();
    Connection connection(from, 1, false, shared, -1, seals_of(protection));
    Pair receiver(seals_of(protection));
    std::size_t num_heard = 0;
    bool last = false;
    Receiver see([&](const FrameHeader& header, Payload payload) {
      const bool is_last = header.type == FrameType::heartbeat;
      CHECK(is_last || text_of(payload) == std::string(50'000, static_cast<char>(header.seq)));
      ++num_heard;
      last = last || is_last;
    });
    {
      std::vector<std::string> memory;
      for (std::size_t k = 0; k < 200; ++k) memory.emplace_back(50'000, static_cast<char>(k));
      for (std::size_t k = 0; k < memory.size(); ++k) {
        FrameHeader header;
        header.type = FrameType::push;
        header.group = 7;
        header.seq = k;
        connection.enqueue(header, {reinterpret_cast<const std::byte*>(memory[k].data()), memory[k].size()});
      }
      CHECK(!connection.write());  // more than the kernel takes
      connection.drop_data(7);
      connection.enqueue({}, {});
      for (std::string& each : memory) each.assign(each.size(), 'x');  // the caller's again
    }
    std::vector<std::uint8_t> chunk(300'000);
    while (!last) {
      connection.write();
      const ssize_t got = recv(to, chunk.data(), chunk.size(), MSG_DONTWAIT);
      for (ssize_t at = 0; at < got;) {
        const ssize_t sent = write(receiver.raw, chunk.data() + at, static_cast<std::size_t>(got - at));
        if (sent > 0) at += sent;
        CHECK(receiver.connection->read(see));
      }
    }
    CHECK(num_heard > 1 && num_heard < 200);
    close(to);
  }
}

// Mutated streams: what is handed over was sent, or the connection ends with an error.
TEST(connection_mutated_bytes_never_pass) {
  std::mt19937_64 random(3);
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    Pair pair;
    std::vector<std::uint8_t> stream;
    std::vector<std::string> sent;
    for (int k = 0; k < 4; ++k) {
      const Payload payload = some_payload(random() % 2000, random);
      sent.push_back(text_of(payload));
      const auto frame = bytes_of(some_header(random), payload);
      stream.insert(stream.end(), frame.begin(), frame.end());
    }
    const int kind = round % 4;
    const std::size_t at = random() % stream.size();
    if (kind == 0) stream[at] ^= static_cast<std::uint8_t>(1 + random() % 255);
    if (kind == 1) stream.erase(stream.begin() + static_cast<std::ptrdiff_t>(at));
    if (kind == 2) stream.insert(stream.begin() + static_cast<std::ptrdiff_t>(at), static_cast<std::uint8_t>(random()));
    if (kind == 3) stream.resize(at);
    CHECK_EQ(write(pair.raw, stream.data(), stream.size()), static_cast<ssize_t>(stream.size()));
    pair.hang_up();
    std::size_t arrived = 0;
    Receiver see([&](const FrameHeader&, Payload payload) {
      CHECK(arrived < sent.size() && text_of(payload) == sent[arrived]);
      ++arrived;
    });
    try {
      while (pair.connection->read(see)) {
      }
    } catch (const std::runtime_error&) {
      ++refused;
    }
    CHECK(arrived < sent.size() || kind == 1 || kind == 2);  // a byte equal to its neighbour may go or come unseen
  }
  CHECK(refused > 200);
}

TEST(connection_pure_noise_ends_with_an_error) {
  std::mt19937_64 random(4);
  for (int round = 0; round < 50; ++round) {
    Pair pair;
    std::vector<std::uint8_t> noise(sizeof(FrameHeader) + random() % 3000);
    for (auto& byte : noise) byte = static_cast<std::uint8_t>(random());
    CHECK_EQ(write(pair.raw, noise.data(), noise.size()), static_cast<ssize_t>(noise.size()));
    Receiver see([](const FrameHeader&, Payload) { CHECK(false); });
    CHECK_EQ(CHECK_THROWS(std::runtime_error, pair.connection->read(see)),
             "a frame does not begin with shoal's magic number");
  }
}

}  // namespace frame_test
