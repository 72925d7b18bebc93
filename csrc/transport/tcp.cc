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
#include "transport/address.h"

namespace shoal {

namespace {

constexpr std::size_t kSmallBytes = 8 << 10;
constexpr int kPortTries = 16;

int listen_at(const std::string& address, int port) {
  const SocketAddress at(address, port);
  const int fd = socket(at.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) throw std::runtime_error("cannot listen at " + address + ": " + std::strerror(errno));
  const int yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(fd, at.get(), at.size) < 0 || listen(fd, 1024) < 0) {
    const std::string why = std::strerror(errno);
    close(fd);
    throw std::runtime_error("cannot listen at " + address + ":" + std::to_string(port) + ": " + why);
  }
  return fd;
}

// Listens at one port of all addresses. A port that the kernel has chosen at the first may be taken at another one.
std::vector<int> listen_at_all(const std::vector<std::string>& addresses, int port) {
  for (int tries = 1;; ++tries) {
    std::vector<int> fds;
    try {
      for (const std::string& address : addresses) fds.push_back(listen_at(address, fds.empty() ? port : local_port(fds.front())));
      return fds;
    } catch (const std::runtime_error&) {
      for (int fd : fds) close(fd);
      if (port || fds.empty() || tries == kPortTries) throw;
    }
  }
}

}  // namespace

TcpTransport::TcpTransport(TcpOptions options, Sink& sink)
    : options_(std::move(options)), addresses_(addresses_of(options_.address)), sink_(sink) {
  listen_fds_ = listen_at_all(addresses_, options_.port);
  port_ = local_port(listen_fds_.front());
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  std::vector<int> waited = listen_fds_;
  waited.push_back(wake_fd_);
  for (int fd : waited) {
    epoll_event event{EPOLLIN, {.fd = fd}};
    epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  }
}

TcpTransport::~TcpTransport() {
  stop();
  for (auto& [index, peer] : peers_) stop_probes(peer);
  for (auto& [fd, newcomer] : newcomers_) close(fd);
  for (int fd : listen_fds_) close(fd);
  for (int fd : {epoll_fd_, wake_fd_}) {
    if (fd >= 0) close(fd);
  }
}

void TcpTransport::add_poll_source(PollSource& source) {
  poll_source_ = &source;
  for (int fd : source.wait_fds()) {
    epoll_event event{EPOLLIN, {.fd = fd}};
    epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  }
}

void TcpTransport::start() {
  thread_ = std::thread([this] { run(); });
}

void TcpTransport::stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  post([] {});
  thread_.join();
  // Peers notice at once, even if this process continues.
  dirty_.clear();
  for (auto& [index, peer] : peers_) {
    peer.connections.clear();
    peer.control.reset();
  }
  connections_.clear();
  num_connections_ = 0;
  for (int fd : std::exchange(listen_fds_, {})) close(fd);
}

// ---- other threads --------------------------------------------------------------------------------------

void TcpTransport::post(std::function<void()> task) {
  bool wake;
  {
    const MutexLock lock(tasks_mutex_);
    wake = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  if (wake) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof one);
  }
}

void TcpTransport::set_peer(int peer, const std::string& address, int port) {
  post([this, peer, address, port] {
    Peer& at = peer_at(peer);
    at.addresses = addresses_of(address);
    at.port = port;
    at.paths.resize(std::max(at.paths.size(), std::min(addresses_.size(), at.addresses.size())));
  });
}

void TcpTransport::call_peer(int peer, const Introduction& me, double timeout_s) {
  const int fd = [&] {
    const auto known = std::make_shared<std::promise<std::pair<std::pair<std::string, std::string>, int>>>();
    post([this, peer, known, control = me.control] {
      known->set_value({next_path(peer_at(peer), control), peer_at(peer).port});
    });
    const auto [path, port] = known->get_future().get();
    return call(path.second, port, options_.secret, me, timeout_s, kUnreachedS, path.first);
  }();
  post([this, fd, peer, control = me.control] { adopt(fd, peer, control); });
}

bool TcpTransport::flush(const std::vector<int>& peers, double timeout_s) {
  const auto ask = [this](auto question) {
    const auto answer = std::make_shared<std::promise<decltype(question())>>();
    post([question, answer] { answer->set_value(question()); });
    return answer->get_future().get();
  };
  const Marks marks = ask([this, &peers] { return marks_of(peers); });
  auto deadline = Clock::now() + seconds(timeout_s);
  std::size_t least = ~std::size_t{0};
  while (Clock::now() < deadline) {
    const std::size_t bytes = ask([this, &marks] { return unsent_bytes(marks); });
    if (bytes == 0) return true;
    if (bytes < least) deadline = Clock::now() + seconds(timeout_s);
    least = std::min(least, bytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

TcpTransport::Marks TcpTransport::marks_of(const std::vector<int>& peers) {
  flush_dirty();
  Marks marks;
  for (int index : peers) {
    for (const auto& each : peer_at(index).connections) {
      marks.connections.emplace_back(each, each->bytes_out + each->queued_bytes());
    }
    if (poll_source_) marks.source.emplace_back(index, poll_source_->mark(index));
  }
  return marks;
}

std::size_t TcpTransport::unsent_bytes(const Marks& marks) {
  flush_dirty();
  std::size_t bytes = 0;
  for (const auto& [connection, mark] : marks.connections) {
    if (!connections_.count(connection->fd())) continue;  // it has ended
    const std::size_t in_kernel = connection->bytes_in_kernel();
    const std::size_t all = connection->queued_bytes() + in_kernel;
    const std::uint64_t received = connection->bytes_out - in_kernel;
    if (received < mark) bytes += std::min<std::size_t>(all, mark - received);  // data may have been dropped since
  }
  for (const auto& [index, mark] : marks.source) bytes += poll_source_->unsent_bytes(index, mark);
  return bytes;
}

std::map<std::string, std::uint64_t> TcpTransport::counters() const {
  return {{"bytes_sent", bytes_sent_},
          {"bytes_received", bytes_received_},
          {"frames_sent", frames_sent_},
          {"frames_received", frames_received_},
          {"strangers_dropped", strangers_},
          {"connections", num_connections_},
          {"paths_lost", paths_lost_}};
}

// ---- the loop -------------------------------------------------------------------------------------------

void TcpTransport::run() {
  auto last_tick = Clock::now();
  std::array<epoll_event, 64> events;
  while (!stopping_) {
    const double until_tick = options_.tick_s - std::chrono::duration<double>(Clock::now() - last_tick).count();
    int wait_ms = std::max(0, static_cast<int>(until_tick * 1000) + 1);
    if (const int most_ms = poll_source_ ? poll_source_->max_wait_ms() : -1; most_ms >= 0) wait_ms = std::min(wait_ms, most_ms);
    const int count = epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), wait_ms);
    for (int k = 0; k < count; ++k) {
      const int fd = events[static_cast<std::size_t>(k)].data.fd;
      if (fd == wake_fd_) {
        std::uint64_t ignored;
        [[maybe_unused]] const ssize_t got = ::read(wake_fd_, &ignored, sizeof ignored);
      } else if (std::ranges::count(listen_fds_, fd)) {
        accept_all(fd);
      } else if (newcomers_.count(fd)) {
        hear_newcomer(fd);
      } else if (auto found = connections_.find(fd); found != connections_.end()) {
        serve(std::shared_ptr(found->second), events[static_cast<std::size_t>(k)].events);
      }
    }
    run_tasks();
    if (poll_source_) poll_source_->work();
    const double elapsed = std::chrono::duration<double>(Clock::now() - last_tick).count();
    if (elapsed >= options_.tick_s) {
      last_tick = Clock::now();
      tick(elapsed);
    }
    flush_dirty();
  }
}

void TcpTransport::run_tasks() {
  std::vector<std::function<void()>> tasks;
  {
    const MutexLock lock(tasks_mutex_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) {
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
  const auto found = peers_.find(index);
  if (found == peers_.end() || found->second.down || found->second.connections.empty()) return;
  Peer& peer = found->second;
  const auto connection = connection_for(peer, payload.size, carries_data(header.type));
  if (peer.paths.size() > 1) header.counter = ++peer.num_sent;
  set_checksums(header, payload);
  connection->enqueue(header, std::move(payload));
  ++frames_sent_;
  dirty_.push_back(connection);
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

void TcpTransport::flush_dirty() {
  while (!dirty_.empty()) {
    std::vector<std::shared_ptr<Connection>> dirty;
    dirty.swap(dirty_);
    for (const auto& connection : dirty) write(connection);
  }
}

void TcpTransport::write_queued() {
  for (const auto& connection : std::vector(dirty_)) {
    if (peer_at(connection->peer()).control != connection || !connections_.count(connection->fd())) continue;
    const std::uint64_t before = connection->bytes_out;
    try {
      watch(*connection, !connection->write());
    } catch (const std::system_error&) {  // the loop's write fails as well, and ends the connection
    }
    bytes_sent_ += connection->bytes_out - before;
  }
}

void TcpTransport::write(const std::shared_ptr<Connection>& connection) {
  if (connection->queued_bytes() == 0 || !connections_.count(connection->fd())) return;
  const std::uint64_t before = connection->bytes_out;
  try {
    watch(*connection, !connection->write());
  } catch (const std::system_error& error) {
    end_broken(connection, error);
  }
  bytes_sent_ += connection->bytes_out - before;
}

void TcpTransport::watch(Connection& connection, bool writable) {
  if (std::exchange(connection.watched, writable) == writable) return;
  epoll_event event{EPOLLIN | (writable ? static_cast<std::uint32_t>(EPOLLOUT) : 0u), {.fd = connection.fd()}};
  epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, connection.fd(), &event);
}

void TcpTransport::serve(const std::shared_ptr<Connection>& connection, std::uint32_t events) {
  if (events & EPOLLOUT) write(connection);
  if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
  const std::uint64_t bytes_before = connection->bytes_in, frames_before = connection->frames_in;
  try {
    const bool open = connection->read(addresses_.size() > 1 ? static_cast<Sink&>(once_) : sink_);
    bytes_received_ += connection->bytes_in - bytes_before;
    frames_received_ += connection->frames_in - frames_before;
    if (connection->frames_in > frames_before) peer_at(connection->peer()).paths[connection->path].silent_s = 0;
    if (!open) end_connection(connection, "it closed the connection");
  } catch (const std::system_error& error) {
    end_broken(connection, error);
  } catch (const std::exception& error) {  // a malformed frame: later data of the connection is dropped
    declare_down(connection->peer(), error.what());
  }
}

// Takes a connection out of the loop. Its socket closes with the last reference.
void TcpTransport::forget(Connection& connection) {
  if (!connections_.erase(connection.fd())) return;
  connection.leave_place();
  --num_connections_;
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection.fd(), nullptr);
}

// A peer's connections end one after the other; data on the remaining ones is read first. If they do not end within
// the grace period, frames may be missing, and the peer counts as down.
void TcpTransport::end_connection(const std::shared_ptr<Connection>& connection, const std::string& why) {
  if (!connections_.count(connection->fd())) return;
  forget(*connection);
  Peer& peer = peer_at(connection->peer());
  std::erase(peer.connections, connection);
  if (peer.control == connection) peer.control.reset();
  if (peer.paths.size() > 1 && !peer.connections.empty()) {
    if (!peer.control) peer.control = peer.connections.front();
    resend(peer, connection->take_unacknowledged());
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
  Peer& peer = peer_at(index);
  if (peer.down) return;
  drop(index);
  sink_.on_down(index, why);
}

void TcpTransport::drop(int index) {
  Peer& peer = peer_at(index);
  peer.down = true;
  stop_probes(peer);
  for (const auto& connection : peer.connections) forget(*connection);
  peer.connections.clear();
  peer.control.reset();
}

void TcpTransport::drop_data(std::uint32_t group) {
  for (const auto& [fd, connection] : connections_) connection->drop_data(group);
}

}  // namespace shoal
