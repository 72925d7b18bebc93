#include "transport/tcp.h"

#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/fork.h"
#include "transport/address.h"

namespace shoal {

namespace {

constexpr std::size_t kSmallBytes = 8 << 10;
constexpr std::size_t kLeastPart = 4 << 10;  // read of a connection where its job has very many: the others have more, too
constexpr int kPortTries = 16;
constexpr int kBacklog = 4096;  // the kernel may allow fewer

thread_local const void* this_loop = nullptr;  // of the threads of transports

int listen_at(const std::string& address, int port) {
  const SocketAddress at(address, port);
  const int fd = socket(at.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) throw std::runtime_error("cannot listen at " + address + ": " + std::strerror(errno));
  const int yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(fd, at.get(), at.size) < 0 || listen(fd, kBacklog) < 0) {
    const std::string why = std::strerror(errno);
    close(fd);
    throw std::runtime_error("cannot listen at " + address + ":" + std::to_string(port) + ": " + why);
  }
  close_in_children(fd);
  return fd;
}

Credentials credentials_of(const TcpOptions& options) {
  if (options.private_key == PrivateKey{}) return {options.secret, new_key_pair()};
  return {options.secret, {options.private_key, public_key_of(options.private_key)}};
}

// Listens at one port of all addresses. A port that the kernel has chosen at the first may be taken at another one.
std::vector<int> listen_at_all(const std::vector<std::string>& addresses, int port) {
  for (int tries = 1;; ++tries) {
    std::vector<int> fds;
    try {
      for (const std::string& address : addresses) fds.push_back(listen_at(address, fds.empty() ? port : local_port(fds.front())));
      return fds;
    } catch (const std::runtime_error&) {
      for (int fd : fds) close_socket(fd);
      if (port || fds.empty() || tries == kPortTries) throw;
    }
  }
}

}  // namespace

void TcpTransport::await_input(int epoll_fd, int fd) {
  epoll_event event{EPOLLIN, {.fd = fd}};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

TcpTransport::TcpTransport(TcpOptions options, Sink& sink)
    : options_(std::move(options)), credentials_(credentials_of(options_)), addresses_(addresses_of(options_.address)), sink_(sink) {
  listen_fds_ = listen_at_all(addresses_, options_.port);
  port_ = local_port(listen_fds_.front());
  for (int k = 0; k < (addresses_.size() > 1 ? 1 : std::max(1, options_.num_threads)); ++k) {
    loops_.push_back(std::make_unique<Loop>());
    Loop& loop = *loops_.back();
    loop.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    loop.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    await_input(loop.epoll_fd, loop.wake_fd);
  }
  for (int fd : listen_fds_) await_input(loops_.front()->epoll_fd, fd);
}

TcpTransport::~TcpTransport() {
  stop();
  const NetworkHold hold(shared_.network);
  for (auto& [index, peer] : peers_) stop_probes(peer);
  for (auto& [fd, newcomer] : newcomers_) close_socket(fd);
  for (int fd : listen_fds_) close_socket(fd);
  for (const auto& loop : loops_) {
    for (int fd : {loop->epoll_fd, loop->wake_fd}) {
      if (fd >= 0) close(fd);
    }
  }
}

void TcpTransport::add_poll_source(PollSource& source) {
  poll_source_ = &source;
  for (int fd : source.wait_fds()) await_input(loops_.front()->epoll_fd, fd);
}

void TcpTransport::start() {
  loops_.front()->thread = std::thread([this] { run_first(); });
  for (std::size_t k = 1; k < loops_.size(); ++k) loops_[k]->thread = std::thread([this, k] { run_other(*loops_[k]); });
}

void TcpTransport::stop() {
  if (!loops_.front()->thread.joinable()) return;
  stopping_ = true;
  for (const auto& loop : loops_) wake(*loop);
  for (const auto& loop : loops_) loop->thread.join();
  // Peers notice at once, even if this process continues.
  const NetworkHold hold(shared_.network);
  for (auto& [index, peer] : peers_) {
    peer.connections.clear();
    peer.control.reset();
  }
  for (const auto& loop : loops_) {
    const MutexLock lock(loop->mutex);
    loop->dirty.clear();
    loop->resumed.clear();
    loop->connections.clear();
  }
  num_connections_ = 0;
  for (int fd : std::exchange(listen_fds_, {})) close_socket(fd);
}

// ---- other threads --------------------------------------------------------------------------------------

void TcpTransport::post(std::function<void()> task) {
  bool wake;
  {
    const MutexLock lock(tasks_mutex_);
    wake = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  if (wake) this->wake(*loops_.front());
}

void TcpTransport::wake(Loop& loop) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(loop.wake_fd, &one, sizeof one);
}

void TcpTransport::set_peer(int peer, const std::string& address, int port, const PublicKey& key) {
  post([this, peer, address, port, key] {
    assert_here();
    Peer& at = peer_at(peer);
    at.addresses = addresses_of(address);
    at.port = port;
    if (is_known(key)) at.key = key;
    at.paths.resize(std::max(at.paths.size(), std::min(addresses_.size(), at.addresses.size())));
  });
}

void TcpTransport::call_peer(int peer, const Introduction& me, double timeout_s, const std::atomic<bool>* stopped) {
  Introduction introduction = me;
  introduction.protection = options_.protection;
  const auto known = std::make_shared<std::promise<Destination>>();
  post([this, peer, known, control = me.control] {
    assert_here();
    known->set_value(destination_of(peer_at(peer), control));
  });
  const auto [fd, session] = call(known->get_future().get(), credentials_, introduction, timeout_s, kUnreachedS, stopped);
  if (me.knocks) return static_cast<void>(close_socket(fd));
  post([this, fd = fd, session = session, peer, control = me.control] {
    assert_here();
    peer_at(peer).key = session.peer;  // of a helper: known from its first connection on
    adopt(fd, peer, control, session);
  });
}

bool TcpTransport::flush(const std::vector<int>& peers, double timeout_s) {
  const auto ask = [this](auto question) {
    const auto answer = std::make_shared<std::promise<decltype(question())>>();
    post([question, answer] { answer->set_value(question()); });
    return answer->get_future().get();
  };
  const Marks marks = ask([this, &peers] {
    assert_here();
    return marks_of(peers);
  });
  auto deadline = Clock::now() + seconds(timeout_s);
  std::size_t least = ~std::size_t{0};
  while (Clock::now() < deadline) {
    const std::size_t bytes = ask([this, &marks] {
      assert_here();
      return unsent_bytes(marks);
    });
    if (bytes == 0) return true;
    if (bytes < least) deadline = Clock::now() + seconds(timeout_s);
    least = std::min(least, bytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

TcpTransport::Marks TcpTransport::marks_of(const std::vector<int>& peers) {
  Marks marks;
  for (int index : peers) {
    for (const auto& each : peer_at(index).connections) marks.connections.emplace_back(each, each->mark());
    if (poll_source_) marks.source.emplace_back(index, poll_source_->mark(index));
  }
  return marks;
}

std::size_t TcpTransport::unsent_bytes(const Marks& marks) {
  std::size_t bytes = 0;
  for (const auto& [connection, mark] : marks.connections) {
    if (!connection->ended()) bytes += connection->unacknowledged_bytes(mark);
  }
  for (const auto& [index, mark] : marks.source) bytes += poll_source_->unsent_bytes(index, mark);
  return bytes;
}

std::map<std::string, std::uint64_t> TcpTransport::counters() const {
  return {{"bytes_sent", shared_.bytes_sent},
          {"bytes_received", shared_.bytes_received},
          {"frames_sent", frames_sent_},
          {"frames_received", shared_.frames_received},
          {"strangers_dropped", strangers_},
          {"connections", num_connections_},
          {"jobs", num_jobs_},
          {"paths_lost", paths_lost_}};
}

// ---- the loops ------------------------------------------------------------------------------------------

void TcpTransport::run_first() {
  Loop& loop = *loops_.front();
  this_loop = &loop;
  auto last_tick = Clock::now();
  while (!stopping_) {
    const double until_tick = options_.tick_s - std::chrono::duration<double>(Clock::now() - last_tick).count();
    int wait_ms = std::max(0, static_cast<int>(until_tick * 1000) + 1);
    if (const int most_ms = poll_source_ ? poll_source_->max_wait_ms() : -1; most_ms >= 0) wait_ms = std::min(wait_ms, most_ms);
    serve_round(loop, wait_ms);
    run_tasks();
    const double elapsed = std::chrono::duration<double>(Clock::now() - last_tick).count();
    const bool ticks = elapsed >= options_.tick_s;
    if (ticks) last_tick = Clock::now();
    if (ticks || poll_source_) {
      const NetworkHold hold(shared_.network);
      if (poll_source_) poll_source_->work();
      if (ticks) tick(elapsed);
    }
    flush_dirty(loop);
  }
}

void TcpTransport::run_other(Loop& loop) {
  this_loop = &loop;
  while (!stopping_) {
    serve_round(loop, -1);
    flush_dirty(loop);
  }
}

// Waits, and serves what is ready. Where there are several jobs, that is to be all of it: a round has a part of each.
void TcpTransport::serve_round(Loop& loop, int wait_ms) {
  const int count = epoll_wait(loop.epoll_fd, loop.events.data(), static_cast<int>(loop.events.size()), wait_ms);
  const std::span<const epoll_event> events(loop.events.data(), static_cast<std::size_t>(std::max(count, 0)));
  const Parts parts = parts_of(loop, events);
  for (const epoll_event& event : events) handle(loop, event, parts);
  if (num_jobs_ > 1 && events.size() == loop.events.size()) loop.events.resize(2 * events.size());
  read_resumed(loop);
}

TcpTransport::Parts TcpTransport::parts_of(Loop& loop, std::span<const epoll_event> events) const {
  if (num_jobs_ < 2) return {};
  std::vector<std::shared_ptr<Connection>> ready;
  const MutexLock lock(loop.mutex);
  for (const epoll_event& event : events) {
    const auto found = loop.connections.find(event.data.fd);
    if (found != loop.connections.end()) ready.push_back(found->second);
  }
  return parts_of(ready);
}

TcpTransport::Parts TcpTransport::parts_of(std::span<const std::shared_ptr<Connection>> ready) const {
  Parts parts;
  if (num_jobs_ < 2) return parts;
  std::size_t round = options_.job_bytes;
  for (const auto& connection : ready) round = std::max(round, ++parts[connection->job] * kLeastPart);
  for (auto& [job, part] : parts) part = round / part;
  return parts;
}

void TcpTransport::handle(Loop& loop, const epoll_event& event, const Parts& parts) {
  const int fd = event.data.fd;
  if (fd == loop.wake_fd) {
    std::uint64_t ignored;
    [[maybe_unused]] const ssize_t got = ::read(fd, &ignored, sizeof ignored);
    return;
  }
  std::shared_ptr<Connection> connection;
  {
    const MutexLock lock(loop.mutex);
    if (const auto found = loop.connections.find(fd); found != loop.connections.end()) connection = found->second;
  }
  if (connection) return serve(connection, event.events, parts);
  if (&loop != loops_.front().get()) return;
  const NetworkHold hold(shared_.network);
  if (std::ranges::count(listen_fds_, fd)) accept_all(fd);
  else if (newcomers_.count(fd)) hear_newcomer(fd);
}

void TcpTransport::run_tasks() {
  std::vector<std::function<void()>> tasks;
  {
    const MutexLock lock(tasks_mutex_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) {
    const NetworkHold hold(shared_.network);
    try {
      task();
    } catch (const std::exception& error) {
      sink_.on_error(error.what());
    }
  }
}

TcpTransport::Peer& TcpTransport::peer_at(int index) { return peers_[index]; }

// ---- frames ---------------------------------------------------------------------------------------------

void TcpTransport::send(int index, FrameHeader header, Payload payload) {
  assert_here();
  const auto found = peers_.find(index);
  if (found == peers_.end() || found->second.down || found->second.connections.empty()) return;
  Peer& peer = found->second;
  const auto connection = connection_for(peer, payload.size(), carries_data(header.type));
  if (peer.paths.size() > 1) header.counter = ++peer.num_sent;
  enqueue(connection, header, std::move(payload));
  ++frames_sent_;
}

// Queues a frame for the connection's thread, which writes at the end of its round.
void TcpTransport::enqueue(const std::shared_ptr<Connection>& connection, const FrameHeader& header, Payload payload) {
  connection->enqueue(header, std::move(payload));
  Loop& loop = *loops_[connection->loop];
  bool first;
  {
    const MutexLock lock(loop.mutex);
    first = loop.dirty.empty();
    loop.dirty.push_back(connection);
  }
  if (first && this_loop != &loop) wake(loop);
}

// The connection for data that has least to send, in the kernel too: a window may be less than the kernel's buffers.
std::shared_ptr<Connection> TcpTransport::connection_for(Peer& peer, std::size_t bytes, bool data) {
  if (!data && peer.control) return peer.control;
  const bool one = peer.connections.size() <= 2;
  std::shared_ptr<Connection> best;
  std::size_t least = 0;
  for (const auto& connection : peer.connections) {
    if (connection->control() && peer.connections.size() > 1) continue;
    if (bytes < kSmallBytes && connection->queued_bytes() < kSmallBytes) return connection;  // one system call writes many
    const std::size_t waiting = one ? 0 : connection->queued_bytes() + connection->bytes_in_kernel();
    if (best && waiting >= least) continue;
    best = connection;
    least = waiting;
  }
  return best;
}

// One round: what the Sink resumes meanwhile is read after the next events.
void TcpTransport::read_resumed(Loop& loop) {
  std::vector<std::shared_ptr<Connection>> resumed;
  {
    const MutexLock lock(loop.mutex);
    resumed.swap(loop.resumed);
  }
  const Parts parts = parts_of(resumed);
  for (const auto& connection : resumed) serve(connection, EPOLLIN, parts);
}

void TcpTransport::flush_dirty(Loop& loop) {
  while (true) {
    std::vector<std::shared_ptr<Connection>> dirty;
    {
      const MutexLock lock(loop.mutex);
      dirty.swap(loop.dirty);
    }
    if (dirty.empty()) return;
    for (const auto& connection : dirty) write(connection);
  }
}

void TcpTransport::write_queued() {
  assert_here();
  for (const auto& [index, peer] : peers_) {
    if (!peer.control || peer.control->queued_bytes() == 0) continue;
    try {
      peer.control->write();
    } catch (const std::system_error&) {  // the loop's write fails as well, and ends the connection
    }
  }
}

void TcpTransport::write(const std::shared_ptr<Connection>& connection) {
  if (connection->queued_bytes() == 0) return;
  try {
    connection->write();
  } catch (const std::system_error& error) {
    const NetworkHold hold(shared_.network);
    end_broken(connection, error);
  }
}

void TcpTransport::serve(const std::shared_ptr<Connection>& connection, std::uint32_t events, const Parts& parts) {
  if (events & EPOLLOUT) write(connection);
  if (!(events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))) return;
  if (connection->stalled()) {
    if (!(events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))) return;
    connection->resume(true);
  }
  const auto part = parts.find(connection->job);
  const auto most = part == parts.end() ? std::nullopt : std::optional(part->second);
  try {
    if (connection->read(addresses_.size() > 1 ? static_cast<Sink&>(once_) : sink_, most)) return;
    const NetworkHold hold(shared_.network);
    end_connection(connection, "it closed the connection");
  } catch (const std::system_error& error) {
    const NetworkHold hold(shared_.network);
    end_broken(connection, error);
  } catch (const std::exception& error) {  // a malformed frame: later data of the connection is dropped
    const NetworkHold hold(shared_.network);
    declare_down(connection->peer(), error.what());
  }
}

// Takes a connection out of its loop. Its socket closes with the last reference.
void TcpTransport::forget(Connection& connection) {
  if (connection.ended()) return;
  connection.end();
  Loop& loop = *loops_[connection.loop];
  const MutexLock lock(loop.mutex);
  loop.connections.erase(connection.fd());
  --num_connections_;
  epoll_ctl(loop.epoll_fd, EPOLL_CTL_DEL, connection.fd(), nullptr);
}

// A peer's connections end one after the other; data on the remaining ones is read first. If they do not end within
// the grace period, frames may be missing, and the peer counts as down.
void TcpTransport::end_connection(const std::shared_ptr<Connection>& connection, const std::string& why) {
  if (connection->ended()) return;
  std::vector<Connection::Outgoing> missing = connection->take_unacknowledged();
  forget(*connection);
  Peer& peer = peer_at(connection->peer());
  std::erase(peer.connections, connection);
  if (peer.control == connection) peer.control.reset();
  if (peer.paths.size() > 1 && !peer.connections.empty()) {
    if (!peer.control) peer.control = peer.connections.front();
    resend(peer, std::move(missing));
  }
  if (peer.connections.empty()) return declare_down(connection->peer(), peer.ended.empty() ? why : peer.ended);
  if (peer.ended.empty()) peer.ended = why;
}

// A reset comes from the other end; other errors are of the path.
void TcpTransport::end_broken(const std::shared_ptr<Connection>& connection, const std::system_error& error) {
  const bool ended = error.code() == std::errc::connection_reset || error.code() == std::errc::broken_pipe;
  const bool several = peer_at(connection->peer()).paths.size() > 1;
  if (several && !ended) return lose_path(connection->peer(), connection->path, true);
  end_connection(connection, error.code().message());
}

void TcpTransport::declare_down(int index, const std::string& why) {
  assert_here();
  Peer& peer = peer_at(index);
  if (peer.down) return;
  drop(index);
  sink_.on_down(index, why);
}

void TcpTransport::drop(int index) {
  assert_here();
  Peer& peer = peer_at(index);
  peer.down = true;
  stop_probes(peer);
  for (const auto& connection : peer.connections) forget(*connection);
  peer.connections.clear();
  peer.control.reset();
}

void TcpTransport::resume(int index) {
  assert_here();
  const auto found = peers_.find(index);
  if (found == peers_.end()) return;
  for (const auto& connection : found->second.connections) {
    if (!connection->stalled()) continue;
    connection->resume();
    Loop& loop = *loops_[connection->loop];
    {
      const MutexLock lock(loop.mutex);
      loop.resumed.push_back(connection);
    }
    wake(loop);
  }
}

void TcpTransport::share(const std::vector<std::vector<int>>& jobs) {
  assert_here();
  for (auto& [index, peer] : peers_) peer.job = 0;
  for (std::size_t job = 0; job < jobs.size(); ++job) {
    for (int index : jobs[job]) peer_at(index).job = static_cast<int>(job) + 1;
  }
  for (const auto& [index, peer] : peers_) {
    for (const auto& connection : peer.connections) connection->job = peer.job;
  }
  num_jobs_ = jobs.size();
}

std::size_t TcpTransport::held_bytes(int index) const {
  assert_here();
  const auto found = peers_.find(index);
  if (found == peers_.end()) return 0;
  std::size_t bytes = 0;
  for (const auto& connection : found->second.connections) bytes += connection->queued_bytes() + connection->arriving_bytes();
  return bytes;
}

void TcpTransport::drop_data(std::uint32_t group, int only) {
  assert_here();
  for (const auto& [index, peer] : peers_) {
    if (only >= 0 && index != only) continue;
    for (const auto& connection : peer.connections) connection->drop_data(group);
  }
}

}  // namespace shoal
