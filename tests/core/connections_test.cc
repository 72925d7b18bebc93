#include "transport/connections.h"

#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "engine_group.h"
#include "transport/address.h"

namespace connections_test {

using namespace shoal_test;
using shoal::Channel;
using shoal::Connections;
using shoal::FrameHeader;
using shoal::FrameType;
using shoal::Identity;
using shoal::Payload;

shoal::TransportOptions transport_options() {
  shoal::TransportOptions options;
  options.tcp.secret = kSecret;
  options.tcp.tick_s = 0.05;
  options.tcp.num_threads = carrier.threads;
  options.fabric = carrier.fabric;
  options.shuffle = carrier.shuffle;
  return options;
}

// Keeps what a channel tells its group.
class Kept : public shoal::ChannelEvents {
 public:
  std::string on_join(int, const Identity& who) override { return who.size == 2 ? "" : "it is no pair"; }
  void on_frame(int member, const FrameHeader& header, Payload payload) override {
    const std::lock_guard lock(mutex_);
    frames_.push_back({member, header, shoal::text_of(payload)});
  }
  void on_down(int member, const std::string& why) override {
    const std::lock_guard lock(mutex_);
    downs_.push_back({member, {}, why});
  }
  void on_tick() override {}
  void on_error(const std::string& what) override { on_down(-1, what); }

  struct Item {
    int member;
    FrameHeader header;
    std::string text;
  };
  std::vector<Item> frames() { return copy(frames_); }
  std::size_t num_frames() {
    const std::lock_guard lock(mutex_);
    return frames_.size();
  }
  std::vector<Item> downs() { return copy(downs_); }

 private:
  std::vector<Item> copy(const std::vector<Item>& of) {
    const std::lock_guard lock(mutex_);
    return of;
  }
  std::mutex mutex_;
  std::vector<Item> frames_, downs_;
};

std::string text_at(const std::vector<Kept::Item>& items, std::size_t k) { return items.at(k).text; }

// Two processes, played by one: connections of their own, a channel of each group on both.
struct Pair {
  struct Side {
    std::shared_ptr<Channel> channel;
    Kept events;
  };

  Pair() {
    for (auto& each : of) each = std::make_shared<Connections>(transport_options());
  }

  shoal::Place place(std::size_t k) { return {"127.0.0.1", of[k]->transport().port(), 100 + static_cast<int>(k)}; }

  // Opens one side of a group, without waiting for the other.
  void open(Side& side, std::size_t me, const std::string& name, int size = 2, int num_data = 1) {
    side.channel = std::make_shared<Channel>(of[me], name);
    const Identity who{name, static_cast<int>(me), size, static_cast<int>(me), 2};
    side.channel->open(who, static_cast<int>(me), {{place(0), num_data}, {place(1), num_data}}, side.events);
  }
  void meet(Side& side, std::size_t me) {
    side.channel->call(static_cast<int>(1 - me), kDeadlineS);
    CHECK(side.channel->await_members(kDeadlineS).empty());
  }
  void begin(std::array<Side, 2>& group, const std::string& name) {
    on_threads(2, [&](int k) {
      const auto me = static_cast<std::size_t>(k);
      open(group[me], me, name);
      meet(group[me], me);
    });
  }

  std::uint64_t connections(std::size_t k) { return of[k]->transport().counters().at("connections"); }

  std::array<std::shared_ptr<Connections>, 2> of;
};

void send(Pair::Side& side, int to, const std::string& text, FrameType type = FrameType::push) {
  side.channel->post([&side, to, text, type]() SHOAL_NO_ANALYSIS {
    FrameHeader header;
    header.type = type;
    side.channel->send(to, header, shoal::payload_of(text));
  });
}

void close(std::array<Pair::Side, 2>& group) {
  for (auto& side : group) side.channel->close("it has left");
}

TEST_OVER_EACH(connections_of_a_pair_carry_all_its_groups) {
  Pair pair;
  std::array<Pair::Side, 2> first, second;
  pair.begin(first, "first");
  const std::uint64_t before = pair.connections(0);
  CHECK_EQ(before, 2u);  // control and data
  pair.begin(second, "second");
  CHECK_EQ(pair.connections(0), before);
  CHECK_EQ(pair.connections(1), before);
  send(first[0], 1, "to first");
  send(second[0], 1, "to second");
  await([&] { return first[1].events.frames().size() == 1 && second[1].events.frames().size() == 1; }, "both arrived");
  CHECK_EQ(text_at(first[1].events.frames(), 0), "to first");
  CHECK_EQ(text_at(second[1].events.frames(), 0), "to second");
  CHECK_EQ(count_of(first[1].channel->counters(), "frames_received"), 1u);
  first[0].channel->close("it has left");
  await([&] { return first[1].events.downs().size() == 1; }, "the leave arrived");
  CHECK_EQ(text_at(first[1].events.downs(), 0), "it has left");
  first[1].channel->close("");
  send(second[1], 0, "goes on");
  await([&] { return second[0].events.frames().size() == 1; }, "the second goes on");
  CHECK(second[0].events.downs().empty() && second[1].events.downs().empty());
  close(second);
}

TEST(connections_a_group_that_needs_more_of_them_adds_its_own) {
  Pair pair;
  std::array<Pair::Side, 2> first, second;
  on_threads(2, [&](int k) {
    const auto me = static_cast<std::size_t>(k);
    pair.open(first[me], me, "first", 2, 0);
    pair.meet(first[me], me);
  });
  CHECK_EQ(pair.connections(0), 1u);
  on_threads(2, [&](int k) {
    const auto me = static_cast<std::size_t>(k);
    pair.open(second[me], me, "second", 2, 3);
    pair.meet(second[me], me);
  });
  CHECK_EQ(pair.connections(0), 4u);
  close(first);
  close(second);
}

TEST_OVER_EACH(connections_many_groups_meet_at_once_in_any_order) {
  Pair pair;
  constexpr std::size_t kGroups = 8;
  std::array<std::array<Pair::Side, 2>, kGroups> groups;
  on_threads(2, [&](int k) {
    const auto me = static_cast<std::size_t>(k);
    on_threads(kGroups, [&](int g) {  // rank 0 forms them upwards, rank 1 downwards
      const auto number = static_cast<std::size_t>(me ? static_cast<int>(kGroups) - 1 - g : g);
      std::this_thread::sleep_for(std::chrono::milliseconds(3 * g));
      pair.open(groups[number][me], me, "group " + std::to_string(number));
      pair.meet(groups[number][me], me);
    });
  });
  CHECK_EQ(pair.connections(0), 2u);
  for (auto& group : groups) close(group);
}

TEST(connections_a_refused_member_hears_why) {
  Pair pair;
  std::array<Pair::Side, 2> group;
  pair.open(group[0], 0, "g");
  pair.open(group[1], 1, "g", 3);  // it believes in a group of three
  on_threads(2, [&](int k) { group[static_cast<std::size_t>(k)].channel->call(1 - k, kDeadlineS); });
  await([&] { return !group[1].events.downs().empty(); }, "the refusal");
  CHECK_EQ(text_at(group[1].events.downs(), 0), "it is no pair");
  close(group);
}

// Two names with the same number.
std::array<std::string, 2> colliding_names() {
  std::mt19937 random(1);
  std::map<std::uint32_t, std::string> seen;
  while (true) {
    std::string name = "group ";
    for (int k = 0; k < 10; ++k) name += static_cast<char>('a' + random() % 26);
    const auto [found, fresh] = seen.emplace(shoal::group_number(name), name);
    if (!fresh && found->second != name) return {found->second, name};
  }
}

TEST(connections_groups_whose_numbers_collide_are_refused_by_name) {
  const auto names = colliding_names();
  Pair pair;
  std::array<Pair::Side, 2> first, second;
  pair.begin(first, names[0]);
  const std::string why = CHECK_THROWS(std::runtime_error, pair.open(second[0], 0, names[1]));
  CHECK(contains(why, "group '" + names[1] + "' has the same number as group '" + names[0] + "'"));
  send(first[0], 1, "unharmed");
  await([&] { return first[1].events.frames().size() == 1; }, "the first goes on");
  close(first);
}

TEST(connections_a_join_by_a_colliding_name_is_refused) {
  const auto names = colliding_names();
  Pair pair;
  std::array<Pair::Side, 2> group;
  pair.open(group[0], 0, names[0]);
  pair.open(group[1], 1, names[1]);
  on_threads(2, [&](int k) { group[static_cast<std::size_t>(k)].channel->call(1 - k, kDeadlineS); });
  for (auto& side : group) {
    await([&] { return !side.events.downs().empty(); }, "the refusal");
    CHECK(contains(side.events.downs()[0].text, "give one of them another name"));
  }
  close(group);
}

TEST(connections_a_member_that_leaves_before_the_others_come_is_known_to_have_left) {
  Pair pair;
  std::array<Pair::Side, 2> first, group;
  pair.begin(first, "first");
  pair.open(group[0], 0, "g");
  group[0].channel->close("it has changed its mind");
  send(first[0], 1, "sent after the leave", FrameType::heartbeat);
  await([&] { return first[1].events.frames().size() == 1; }, "it has read the leave");
  pair.open(group[1], 1, "g");
  await([&] { return !group[1].events.downs().empty(); }, "it hears");
  CHECK_EQ(text_at(group[1].events.downs(), 0), "it has changed its mind");
  group[1].channel->close("");
  close(first);
}

// The memory of one group's data is released; another group's stays in order and whole.
TEST(connections_drop_the_data_of_one_group_only) {
  Pair pair;
  std::array<Pair::Side, 2> first, second;
  pair.begin(first, "first");
  pair.begin(second, "second");
  constexpr std::size_t kBytes = 1 << 20;
  constexpr int kFrames = 40;  // more than the kernel's buffers take
  const auto memory = std::make_shared<std::string>(kBytes, 'a');
  first[0].channel->post([&, owner = memory]() SHOAL_NO_ANALYSIS {
    for (int k = 0; k < kFrames; ++k) {
      FrameHeader header;
      header.type = FrameType::push;
      header.seq = static_cast<std::uint64_t>(k);
      first[0].channel->send(1, header, {reinterpret_cast<const std::byte*>(owner->data()), kBytes, owner});
      second[0].channel->send(1, header, shoal::payload_of(std::string(kBytes, static_cast<char>('b' + k))));
    }
    first[0].channel->drop_data();
    std::fill(owner->begin(), owner->end(), 'z');  // the caller writes to it again
  });
  await([&] { return second[1].events.frames().size() == kFrames; }, "the second arrived");
  const auto frames = second[1].events.frames();
  for (int k = 0; k < kFrames; ++k) {
    CHECK_EQ(frames[static_cast<std::size_t>(k)].header.seq, static_cast<std::uint64_t>(k));
    CHECK(frames[static_cast<std::size_t>(k)].text == std::string(kBytes, static_cast<char>('b' + k)));
  }
  CHECK(first[1].events.frames().size() < kFrames);
  for (const auto& each : first[1].events.frames()) CHECK(each.text == std::string(kBytes, 'a'));
  close(first);
  close(second);
  CHECK_EQ(memory.use_count(), 1);
}

// A group's failure is on its way before its operations end: here the network thread does nothing else meanwhile.
TEST(connections_queued_control_frames_are_written_at_once_on_demand) {
  Pair pair;
  std::array<Pair::Side, 2> group;
  pair.begin(group, "g");
  std::atomic<bool> arrived{false}, over{false};
  group[0].channel->post([&]() SHOAL_NO_ANALYSIS {
    FrameHeader header;
    header.type = FrameType::fail;
    group[0].channel->send(1, header, shoal::payload_of("the cause"));
    group[0].channel->write_queued();
    for (int k = 0; k < 1000 && !arrived; ++k) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      arrived = group[1].events.frames().size() == 1;
    }
    over = true;
  });
  await([&] { return over.load(); }, "the network thread goes on");
  CHECK(arrived);
  close(group);
}

// A flush ends with what was queued before it, however much of another group follows.
TEST(connections_flush_waits_for_its_group_and_not_for_silence) {
  Pair pair;
  std::array<Pair::Side, 2> first, second;
  pair.begin(first, "first");
  pair.begin(second, "second");
  std::atomic<bool> over{false};
  std::thread busy([&] {
    const std::string much(256 << 10, 'x');
    for (std::size_t k = 0; !over; ++k) {  // never silent, and never further ahead than the receiver can follow
      send(second[0], 1, much);
      while (!over && k >= second[1].events.num_frames() + 8) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  });
  for (int k = 0; k < 20; ++k) {
    send(first[0], 1, std::to_string(k));
    CHECK(first[0].channel->flush(kDeadlineS));
    await([&] { return first[1].events.frames().size() == static_cast<std::size_t>(k) + 1; }, "it arrived");
  }
  over = true;
  busy.join();
  close(first);
  close(second);
}

// ---- data that a leave overtakes ------------------------------------------------------------------------

// Passes the connections of one process on, and holds back what comes on all but the first until it is let go.
class Delay {
 public:
  explicit Delay(int port) : to_(port) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const shoal::SocketAddress any("127.0.0.1", 0);
    CHECK(bind(listener_, any.get(), any.size) == 0 && listen(listener_, 16) == 0);
    port_ = shoal::local_port(listener_);
    acceptor_ = std::thread([this] { accept_all(); });
  }
  ~Delay() {
    let_go();
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    for (int fd : fds_) shutdown(fd, SHUT_RDWR);
    for (std::thread& thread : threads_) thread.join();
    for (int fd : fds_) ::close(fd);
    ::close(listener_);
  }

  int port() const { return port_; }
  void hold() { held_ = true; }
  void let_go() { held_ = false; }

 private:
  void accept_all() {
    for (int in; (in = accept(listener_, nullptr, nullptr)) >= 0;) {
      const shoal::SocketAddress to("127.0.0.1", to_);
      const int out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      CHECK_EQ(connect(out, to.get(), to.size), 0);
      const bool control = fds_.empty();
      fds_.insert(fds_.end(), {in, out});
      threads_.emplace_back([this, in, out, control] { pass(in, out, control); });
      threads_.emplace_back([this, in, out, control] { pass(out, in, control); });
    }
  }
  void pass(int from, int to, bool control) {
    std::vector<char> bytes(1 << 16);
    for (ssize_t got; (got = recv(from, bytes.data(), bytes.size(), 0)) > 0;) {
      while (held_ && !control) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      for (ssize_t done = 0, sent; done < got; done += sent) {
        sent = ::send(to, bytes.data() + done, static_cast<std::size_t>(got - done), MSG_NOSIGNAL);
        if (sent <= 0) return;
      }
    }
    shutdown(to, SHUT_WR);
  }

  const int to_;
  int listener_ = -1, port_ = 0;
  std::atomic<bool> held_{false};
  std::vector<int> fds_;
  std::thread acceptor_;
  std::vector<std::thread> threads_;
};

// The end of a group goes over the control connection and overtakes data on the others: that data still arrives.
TEST(connections_data_that_a_leave_overtakes_arrives) {
  std::array<std::shared_ptr<Connections>, 2> of;
  for (auto& each : of) each = std::make_shared<Connections>(transport_options());
  Delay delay(of[0]->transport().port());
  // Each knows the other by its key, at the delaying port: process 1, whose name is greater, calls there.
  const shoal::Place places[2] = {{"127.0.0.1", delay.port(), 1, of[0]->transport().public_key()},
                                  {"127.0.0.2", of[1]->transport().port(), 2, of[1]->transport().public_key()}};
  std::array<Pair::Side, 2> group, other;
  for (auto* sides : {&group, &other}) {
    on_threads(2, [&](int k) {
      Pair::Side& side = (*sides)[static_cast<std::size_t>(k)];
      const std::string name = sides == &group ? "group" : "other";
      side.channel = std::make_shared<Channel>(of[static_cast<std::size_t>(k)], name);
      side.channel->open({name, k, 2, k, 2}, k, {{places[0], 1}, {places[1], 1}}, side.events);
      side.channel->call(1 - k, kDeadlineS);
      CHECK(side.channel->await_members(kDeadlineS).empty());
    });
  }
  delay.hold();
  send(group[1], 0, "data");
  send(group[1], 0, "", FrameType::goodbye);
  CHECK(group[1].channel->flush(kDeadlineS));
  group[1].channel->close("it has left the group");
  await([&] { return !group[0].events.downs().empty(); }, "the leave arrived");
  CHECK_EQ(group[0].events.frames().size(), 1u);
  CHECK(group[0].events.frames()[0].header.type == FrameType::goodbye);
  delay.let_go();
  await([&] { return group[0].events.frames().size() == 2; }, "the data arrived");
  CHECK_EQ(text_at(group[0].events.frames(), 1), "data");
  CHECK(other[0].events.downs().empty());
  group[0].channel->close("");
  close(other);
}

TEST(helper_refuses_groups_beyond_its_number) {
  constexpr std::size_t kMost = 16;
  shoal::HelperServer helper("127.0.0.1", 0, kSecret, 0, "", 0, kMost);
  helper.start();
  auto of = std::make_shared<Connections>(transport_options());
  const shoal::Place me{"127.0.0.1", of->transport().port(), 1}, there{"127.0.0.1", helper.port()};
  std::deque<Pair::Side> groups;
  for (std::size_t k = 0; k <= kMost; ++k) {
    Pair::Side& side = groups.emplace_back();
    const std::string name = "group " + std::to_string(k);
    side.channel = std::make_shared<Channel>(of, name);
    side.channel->open({name, 0, 2, 0, 2}, 0, {{me, 0}, {there, 0}}, side.events);
    side.channel->call(1, kDeadlineS);
    CHECK(side.channel->await_members(kDeadlineS).empty());
  }
  CHECK(groups[0].events.downs().empty());
  REQUIRE(groups.back().events.downs().size() == 1);
  CHECK_EQ(text_at(groups.back().events.downs(), 0), "it refused: it serves 16 groups and no more; start another helper");
  for (Pair::Side& side : groups) side.channel->close("");
}

// Joins a group of two at a helper, as this rank; returns why it is refused, or an empty string.
std::string refusal_at(shoal::HelperServer& helper, const std::shared_ptr<Connections>& of, const std::string& group, int rank,
                       const std::string& marks, Pair::Side& side) {
  const shoal::Place me{"127.0.0.1", of->transport().port(), 1 + rank}, there{"127.0.0.1", helper.port()};
  side.channel = std::make_shared<Channel>(of, group);
  side.channel->open({group, rank, 2, rank, 2, marks}, 0, {{me, 0}, {there, 0}}, side.events);
  side.channel->call(1, kDeadlineS);
  CHECK(side.channel->await_members(kDeadlineS).empty());
  return side.events.downs().empty() ? "" : text_at(side.events.downs(), 0);
}

// A member of the job cannot be another rank at a helper, even if it comes before that rank does.
TEST(helper_admits_a_rank_by_its_public_key) {
  shoal::HelperServer helper("127.0.0.1", 0, kSecret, 0);
  helper.start();
  std::array<std::shared_ptr<Connections>, 3> of;
  std::array<std::string, 3> mark;
  for (std::size_t k = 0; k < 3; ++k) {
    of[k] = std::make_shared<Connections>(transport_options());
    mark[k] = shoal::mark_of(of[k]->transport().public_key());
  }
  std::deque<Pair::Side> sides;
  const std::string true_marks = mark[0] + mark[1], false_marks = mark[0] + mark[2];
  CHECK_EQ(refusal_at(helper, of[2], "g", 1, true_marks, sides.emplace_back()), "it refused: rank 1 of group 'g' has another public key");
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_EQ(refusal_at(helper, of[static_cast<std::size_t>(rank)], "g", rank, true_marks, sides.emplace_back()), "");
  }
  CHECK_EQ(refusal_at(helper, of[2], "h", 1, false_marks, sides.emplace_back()), "");
  CHECK(contains(refusal_at(helper, of[0], "h", 0, true_marks, sides.emplace_back()), "group 'h' has ranks with other public keys here than"));
  for (Pair::Side& side : sides) side.channel->close("");
}

}  // namespace connections_test
