#include "transport/connections.h"

#include <pthread.h>

#include <algorithm>
#include <future>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/clock.h"
#include "base/log.h"

namespace shoal {

namespace {

constexpr std::size_t kMaxEarlyJoins = 65536;
constexpr double kDataCallS = 30.0;
constexpr auto kKnockPause = std::chrono::milliseconds(20);

// The connections that engines may share. A child of fork() begins without any: threads do not survive it.
struct Registry {
  Mutex mutex;
  std::vector<std::weak_ptr<Connections>> all GUARDED_BY(mutex);
};

Registry*& registry_of_process() {
  static Registry* registry = new Registry;
  return registry;
}

Registry& registry() {
  [[maybe_unused]] static const int forgets_in_children =
      pthread_atfork(nullptr, nullptr, [] { registry_of_process() = new Registry; });
  return *registry_of_process();
}

}  // namespace

Connections::Connections(TransportOptions options) : options_(options) {
  transport_ = open_transport(std::move(options), *this);
  transport_->start();
}

Connections::~Connections() { transport_->stop(); }

std::shared_ptr<Connections> Connections::shared(const TransportOptions& options, const std::string& group,
                                                 const std::optional<std::vector<Place>>& returning) {
  Registry& of_process = registry();
  const MutexLock lock(of_process.mutex);
  std::erase_if(of_process.all, [](const auto& each) { return each.expired(); });
  for (const auto& each : of_process.all) {
    const std::shared_ptr<Connections> found = each.lock();
    if (!found || !(found->options_ == options) || found->has_lost(returning)) continue;
    if (found->reserved_.insert(group).second) return found;
  }
  auto made = std::make_shared<Connections>(options);
  made->reserved_.insert(group);
  of_process.all.push_back(made);
  return made;
}

bool Connections::has_lost(const std::optional<std::vector<Place>>& returning) const {
  const MutexLock lock(lost_mutex_);
  if (!returning) return !lost_.empty();
  bool has = lost_a_helper_;
  for (const Place& each : *returning) has |= lost_.contains(each.name());
  return has;
}

void Connections::peer_was_lost(const Place& place) {
  const MutexLock lock(lost_mutex_);
  lost_.insert(place.name());
  lost_a_helper_ |= place.is_helper();
}

void Connections::release(const std::string& group) {
  const MutexLock lock(registry().mutex);
  reserved_.erase(group);
}

// ---- processes and groups ------------------------------------------------------------------------------

void Connections::attach(Channel& channel) {
  const auto [found, fresh] = channels_.try_emplace(channel.number(), &channel);
  if (fresh) return;
  throw std::runtime_error("group '" + channel.group() + "' has the same number as group '" + found->second->group() +
                           "', which this process is in; give it another name");
}

void Connections::detach(Channel& channel) {
  channels_.erase(channel.number());
  left_.add(channel.number());
}

void Connections::replay_joins(Channel& channel) {
  const auto begin = early_.lower_bound({channel.number(), 0});
  const auto end = std::find_if(begin, early_.end(), [&](const auto& each) { return each.first.first != channel.number(); });
  const std::vector<std::pair<std::pair<std::uint32_t, int>, EarlyJoin>> joins(begin, end);
  early_.erase(begin, end);
  for (const auto& [key, early] : joins) {
    channel.admit(key.second, early.who);
    if (early.left) channel.left(key.second, early.why);
  }
}

std::vector<Channel*> Connections::channels() {
  std::vector<Channel*> all;
  for (const auto& [number, channel] : channels_) all.push_back(channel);
  return all;
}

int Connections::peer_of(const Place& place, bool calls) {
  int peer = processes_.number_of(place.name());
  const Process& known = *processes_.find(peer);
  // Somebody else may have come before this process knew who it is, and which of them calls.
  const bool another = is_known(place.key) && is_known(known.key) && place.key != known.key;
  if (another || (calls && known.arrivals.any())) {
    drop_peer(peer, another ? "it took the name of a process that has another public key"
                            : "it took the name of a process that opens no connections to this one");
    peer = processes_.number_of(place.name());
  }
  Process& process = *processes_.find(peer);
  process.is_called = calls;
  if (is_known(place.key)) process.key = place.key;
  transport_->set_peer(peer, place.address, place.port, place.key);
  return peer;
}

std::size_t Connections::num_connections(int peer) {
  const Process* const process = processes_.find(peer);
  return process ? process->num_connections : 0;
}

int Connections::begin_calls(int peer, int wanted) {
  Process* const process = processes_.find(peer);
  if (!process) throw std::runtime_error("its connections have ended");
  return std::exchange(process->num_called, std::max(process->num_called, wanted));
}

void Connections::calls_failed(int peer, int num_called) {
  if (Process* const process = processes_.find(peer)) process->num_called = num_called;
}

void Connections::tell(int peer, FrameType type, std::uint32_t group, Payload payload) {
  FrameHeader header;
  header.type = type;
  header.group = group;
  transport_->send(peer, header, std::move(payload));
}

void Connections::drop_peer(int peer, const std::string& why) {
  transport_->drop(peer);
  on_down(peer, why);
}

// ---- the transport's events ----------------------------------------------------------------------------

int Connections::on_introduction(const Introduction& who, std::string& why_not) {
  assert_here();
  const int peer = processes_.introduce(who, why_not);
  if (peer >= 0 && who.knocks) {
    for (Channel* channel : channels()) channel->knocked(peer);
  }
  return peer;
}

void Connections::on_connected(int peer) {
  assert_here();
  Process* const process = processes_.find(peer);
  if (!process) return;
  ++process->num_connections;
  for (Channel* channel : channels()) channel->connected(peer);
}

std::shared_ptr<std::byte> Connections::place_for(int peer, const FrameHeader& header) {
  assert_here();
  const auto channel = channels_.find(header.group);
  return channel == channels_.end() ? nullptr : channel->second->place_for(peer, header);
}

void Connections::on_frame(int peer, const FrameHeader& header, Payload payload) {
  assert_here();
  if (!processes_.find(peer)) return;  // the rest of what a dropped peer has sent
  if (header.type == FrameType::join) return on_join(peer, header, payload);
  if (header.type == FrameType::leave) return on_leave(peer, header.group, printable(text_of(payload).substr(0, kMaxText)));
  if (header.type == FrameType::fabric) return;  // of a process with libfabric; this one has none
  const auto channel = channels_.find(header.group);
  if (channel != channels_.end()) return channel->second->receive(peer, header, std::move(payload));
  if (!left_.has(header.group)) drop_peer(peer, "it sent a frame of a group that this process is not in");
}

void Connections::on_join(int peer, const FrameHeader& header, const Payload& payload) {
  Identity who;
  try {
    who = read_join(header, payload);
    who.marks.clear();  // ranks know each other's keys from the group's records
  } catch (const std::runtime_error& error) {
    return drop_peer(peer, error.what());
  }
  const auto channel = channels_.find(header.group);
  if (channel != channels_.end()) return channel->second->admit(peer, who);
  if (left_.has(header.group) || early_.size() >= kMaxEarlyJoins) {
    const std::string why = left_.has(header.group) ? "it has left the group" : "it has too many joins to consider";
    return tell(peer, FrameType::leave, header.group, payload_of(why));
  }
  early_[{header.group, peer}] = {who, false, ""};
}

void Connections::on_leave(int peer, std::uint32_t group, const std::string& why) {
  if (const auto channel = channels_.find(group); channel != channels_.end()) return channel->second->left(peer, why);
  const auto early = early_.find({group, peer});
  if (early == early_.end()) return;
  early->second.left = true;
  early->second.why = why;
}

void Connections::on_down(int peer, const std::string& why) {
  assert_here();
  if (!processes_.remove(peer)) return;
  std::erase_if(early_, [peer](const auto& each) { return each.first.second == peer; });
  for (Channel* channel : channels()) channel->lost(peer, why);
}

void Connections::on_tick() {
  assert_here();
  for (Channel* channel : channels()) channel->tick();
}

void Connections::on_error(const std::string& what) {
  assert_here();
  for (Channel* channel : channels()) channel->error(what);
}

// ---- channels ------------------------------------------------------------------------------------------

Channel::Channel(std::shared_ptr<Connections> connections, std::string name)
    : name_(std::move(name)),
      connections_(*connections),
      port_(connections->transport().port()),
      public_key_(connections->transport().public_key()),
      owner_(std::move(connections)) {}

Channel::~Channel() { stop_calling(); }

std::shared_ptr<Connections> Channel::owner() {
  const MutexLock lock(mutex_);
  return owner_;
}

// Makes a call on the network thread and returns what it returns. Throws std::runtime_error with the message of what
// it throws: an exception itself would be shared by two threads.
template <class Call>
auto Channel::on_network(const Call& call) {
  using Returned = decltype(call());
  using Value = std::conditional_t<std::is_void_v<Returned>, std::monostate, Returned>;
  const auto outcome = std::make_shared<std::promise<std::variant<Value, std::string>>>();
  auto result = outcome->get_future();
  connections_.transport().post([&call, outcome] {
    try {
      if constexpr (std::is_void_v<Returned>) {
        call();
        outcome->set_value(Value{});
      } else {
        outcome->set_value(call());
      }
    } catch (const std::exception& error) {
      outcome->set_value(std::string(error.what()));
    }
  });
  std::variant<Value, std::string> found = result.get();
  if (const auto* message = std::get_if<std::string>(&found)) throw std::runtime_error(*message);
  if constexpr (!std::is_void_v<Returned>) return std::get<Value>(std::move(found));
}

// ---- channels: meeting ---------------------------------------------------------------------------------

void Channel::open(const Identity& me, int self, const std::vector<Member>& members, ChannelEvents& events) {
  on_network([&] {
    connections_.assert_here();
    start(me, self, members, events);
  });
}

void Channel::start(const Identity& me, int self, const std::vector<Member>& members, ChannelEvents& events) {
  me_ = me;
  number_ = group_number(me.group);
  my_name_ = members[static_cast<std::size_t>(self)].place.name();
  const int count = static_cast<int>(members.size());
  for (int member = 0; member < count; ++member) {
    const auto& [place, num_data, most_data, later] = members[static_cast<std::size_t>(member)];
    members_.push_back({place, num_data, most_data, later});
    if (member == self) continue;
    at(member).peer = connections_.peer_of(place, calls(place));
    if (place.name() == my_name_ || !member_of_.emplace(at(member).peer, member).second) {
      throw std::runtime_error("two members of the group are the process " + place.name());
    }
  }
  connections_.attach(*this);
  events_ = &events;
  {
    const MutexLock lock(mutex_);
    for (const auto& [peer, member] : member_of_) {
      if (!at(member).later) missing_.insert(member);
    }
  }
  for (int member = 0; member < count; ++member) {
    if (member != self && connections_.num_connections(at(member).peer)) introduce(member);
  }
  connections_.replay_joins(*this);
}

void Channel::call(int member, bool for_data, double timeout_s, const std::atomic<bool>* stopped) {
  const auto [to, first, wanted, knocks] = on_network([&] {
    connections_.assert_here();
    const State& state = at(member);
    const bool called = state.peer >= 0 && !state.gone && calls(state.place) && (for_data || !state.later);
    const int wanted = called ? 1 + (for_data ? state.most_data : state.num_data) : 0;
    const bool knocks = for_data && !calls(state.place) && !state.gone;
    return std::tuple(state.peer, called ? connections_.begin_calls(state.peer, wanted) : 0, wanted, knocks);
  });
  if (knocks) connections_.transport().call_peer(to, {my_name_, true, true}, timeout_s, stopped);
  for (int k = first; k < wanted; ++k) {
    try {
      connections_.transport().call_peer(to, {my_name_, k == 0}, timeout_s, stopped);
    } catch (const std::runtime_error&) {
      on_network([&, peer = to] {
        connections_.assert_here();
        connections_.calls_failed(peer, k);
      });
      throw;
    }
  }
}

// The first data that goes to a member, or comes from it, over its control connection.
void Channel::want_data(int member, const FrameHeader& header) {
  State& state = at(member);
  if (state.num_data >= state.most_data || !carries_data(header.type) || std::exchange(state.wants_data, true)) return;
  if (calls(state.place)) call_soon(member);
}

void Channel::call_soon(int member) {
  const MutexLock lock(mutex_);
  if (stops_calling_) return;
  to_call_.push_back(member);
  if (!caller_.joinable()) caller_ = std::thread([this] { call_for_data(); });
  changed_.notify_all();
}

void Channel::call_for_data() {
  while (true) {
    int member;
    {
      const MutexLock lock(mutex_);
      while (to_call_.empty() && !stops_calling_) changed_.wait(mutex_);
      if (stops_calling_) return;
      member = to_call_.front();
      to_call_.pop_front();
    }
    try {
      call(member, true, kDataCallS, &stops_calling_);
    } catch (const std::runtime_error& error) {  // the control connection goes on to carry it, or ends and says why
      call_failed(member, error.what());
    }
  }
}

// One that is asked to call may not know yet that this process is a member: it is asked again.
void Channel::call_failed(int member, const std::string& why) {
  post([this, member, why] {
    connections_.assert_here();
    State& state = at(member);
    state.problem = why;
    if (!state.later || state.gone || stands(state)) return;
    if (!calls(state.place)) return call_soon(member);
    if (!state.waiting.empty()) end(member, "no connection to it could be made: " + why);
  });
  std::this_thread::sleep_for(kKnockPause);
}

void Channel::knocked(int peer) {
  const auto found = member_of_.find(peer);
  if (found == member_of_.end() || !events_) return;
  State& state = at(found->second);
  if (!state.later || state.gone || stands(state) || std::exchange(state.wants_data, true)) return;
  call_soon(found->second);
}

void Channel::stop_calling() {
  std::thread caller;
  {
    const MutexLock lock(mutex_);
    stops_calling_ = true;
    caller.swap(caller_);
    changed_.notify_all();
  }
  if (caller.joinable()) caller.join();
}

std::vector<int> Channel::await_members(double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + seconds(timeout_s);
  const MutexLock lock(mutex_);
  while (!missing_.empty() && changed_.wait_until(mutex_, deadline)) {
  }
  return {missing_.begin(), missing_.end()};
}

void Channel::connected(int peer) {
  const auto found = member_of_.find(peer);
  if (found == member_of_.end()) return;
  introduce(found->second);
  check(found->second);
}

void Channel::introduce(int member) {
  State& to = at(member);
  if (std::exchange(to.asked, true) || to.gone) return;
  Identity me = me_;
  if (!to.place.is_helper()) me.marks.clear();
  connections_.tell(to.peer, FrameType::join, number_, join_payload(me));
}

void Channel::admit(int peer, const Identity& who) {
  const auto found = member_of_.find(peer);
  std::string why_not;
  if (who.group != me_.group) why_not = "the number of group '" + who.group + "' is that of group '" + me_.group + "' here; give one of them another name";
  else if (found == member_of_.end()) why_not = "it does not know this process as a member of group '" + name_ + "'";
  else why_not = events_->on_join(found->second, who);
  if (!why_not.empty()) return connections_.tell(peer, FrameType::leave, number_, payload_of(why_not));
  at(found->second).joined = true;
  check(found->second);
}

bool Channel::stands(const State& state) {
  const bool fabric = connections_.over_fabric() && !state.place.is_helper();
  const std::size_t wanted = 1 + static_cast<std::size_t>(state.num_data) + fabric;
  return state.joined && connections_.num_connections(state.peer) >= wanted;
}

// A member is no longer missing once it has joined and its connections stand, or once it is gone.
void Channel::check(int member) {
  const State& state = at(member);
  if (!state.gone && !stands(state)) return;
  send_waiting(member);
  const MutexLock lock(mutex_);
  missing_.erase(member);
  if (missing_.empty()) changed_.notify_all();
}

// ---- channels: frames ----------------------------------------------------------------------------------

void Channel::send_waiting(int member) {
  for (auto& [header, payload] : std::exchange(at(member).waiting, {})) send(member, header, std::move(payload));
}

void Channel::send(int member, FrameHeader header, Payload payload) {
  State& to = at(member);
  if (to.gone) return;
  if (to.later && !stands(to)) {
    if (is_notice(header.type)) return;
    if (to.waiting.empty()) to.since = std::chrono::steady_clock::now();
    to.waiting.emplace_back(header, std::move(payload));
    if (!std::exchange(to.wants_data, true)) call_soon(member);
    return;
  }
  if (!to.joined) return;
  header.group = number_;
  ++frames_sent_;
  bytes_sent_ += sizeof header + payload.size();
  want_data(member, header);
  connections_.transport().send(to.peer, header, std::move(payload));
}

std::shared_ptr<std::byte> Channel::place_for(int peer, const FrameHeader& header) {
  const auto found = member_of_.find(peer);
  if (found == member_of_.end() || at(found->second).dropped) return nullptr;
  return events_->place_for(found->second, header);
}

void Channel::receive(int peer, const FrameHeader& header, Payload payload) {
  const auto found = member_of_.find(peer);
  if (found == member_of_.end()) return connections_.drop_peer(peer, "it sent a frame of a group that it is not in");
  State& from = at(found->second);
  if (from.dropped) return;
  if (!std::exchange(from.joined, true)) check(found->second);  // a join may have been overtaken on another connection
  want_data(found->second, header);
  ++frames_received_;
  bytes_received_ += sizeof header + payload.size();
  events_->on_frame(found->second, header, std::move(payload));
}

void Channel::post(std::function<void()> task) {
  const MutexLock lock(mutex_);
  if (!owner_) return;
  connections_.transport().post([self = shared_from_this(), task = std::move(task)] {
    self->connections_.assert_here();
    if (!self->events_) return;
    try {
      task();
    } catch (const std::exception& error) {
      self->events_->on_error(error.what());
    }
  });
}

std::map<std::string, std::uint64_t> Channel::counters() {
  const std::shared_ptr<Connections> open = owner();
  std::map<std::string, std::uint64_t> counts;
  if (open) {
    counts = open->transport().counters();
  } else {
    const MutexLock lock(mutex_);
    counts = last_counters_;
  }
  counts["bytes_sent"] = bytes_sent_;
  counts["bytes_received"] = bytes_received_;
  counts["frames_sent"] = frames_sent_;
  counts["frames_received"] = frames_received_;
  return counts;
}

// ---- channels: the end ---------------------------------------------------------------------------------

void Channel::end(int member, const std::string& why) {
  if (std::exchange(at(member).gone, true)) return;
  events_->on_down(member, why);
  check(member);  // who waits for it now finds the group's error
}

void Channel::left(int peer, const std::string& why) {
  if (const auto found = member_of_.find(peer); found != member_of_.end()) end(found->second, why);
}

void Channel::lost(int peer, const std::string& why) {
  const auto found = member_of_.find(peer);
  if (found == member_of_.end()) return;
  if (const State& state = at(found->second); !state.gone) connections_.peer_was_lost(state.place);
  end(found->second, why);
}

void Channel::lost_elsewhere(int member, const std::string& why) {
  if (const State& state = at(member); !state.joined) end(member, why);
}

// What a member is waited for to be connected with does not wait for ever.
void Channel::tick() {
  const auto until = std::chrono::steady_clock::now() - seconds(kDataCallS);
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    const State& state = at(member);
    if (!state.waiting.empty() && state.since < until) end(member, "no connection to it could be made: " + state.problem);
  }
  events_->on_tick();
}

void Channel::drop_data() {
  for (State& each : members_) each.waiting.clear();
  connections_.transport().drop_data(number_, -1);
}

void Channel::drop(int member, const std::string& why) {
  State& from = at(member);
  from.dropped = true;
  from.waiting.clear();
  connections_.transport().drop_data(number_, from.peer);
  if (std::exchange(from.gone, true)) return;
  check(member);
  if (from.asked) connections_.tell(from.peer, FrameType::leave, number_, payload_of(why));
}

bool Channel::flush(double timeout_s) {
  const auto until = std::chrono::steady_clock::now() + seconds(timeout_s);
  std::vector<int> peers;
  const auto look = [&] {
    connections_.assert_here();
    peers.clear();
    for (const State& each : members_) {
      if (each.joined && !each.gone) peers.push_back(each.peer);
    }
    return std::ranges::any_of(members_, [](const State& each) { return !each.waiting.empty(); });
  };
  while (on_network(look) && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return connections_.transport().flush(peers, timeout_s);
}

void Channel::close(const std::string& why) {
  std::shared_ptr<Connections> open = owner();
  if (!open) return;
  stop_calling();
  on_network([&] {
    connections_.assert_here();
    leave(why);
  });
  auto counts = open->transport().counters();
  {
    const MutexLock lock(mutex_);
    last_counters_ = std::move(counts);
    owner_.reset();
  }
  open->release(name_);
}

void Channel::leave(const std::string& why) {
  if (!std::exchange(events_, nullptr)) return;
  for (const State& each : members_) {
    if (each.asked && !each.gone) connections_.tell(each.peer, FrameType::leave, number_, payload_of(why));
  }
  drop_data();
  connections_.detach(*this);
}

}  // namespace shoal
