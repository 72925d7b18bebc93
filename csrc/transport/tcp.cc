#include "transport/tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
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

namespace shoal {

namespace {

constexpr double kHandshakeS = 5.0;
constexpr std::size_t kMaxNewcomers = 256;

void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

std::chrono::steady_clock::duration seconds(double value) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(value));
}

int listen_at(const std::string& address, int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<std::uint16_t>(port));
  std::string why;
  if (inet_pton(AF_INET, address.c_str(), &at.sin_addr) != 1) why = "it is not an IPv4 address";
  set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  if (why.empty() && bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) < 0) why = std::strerror(errno);
  if (why.empty() && listen(fd, 1024) < 0) why = std::strerror(errno);
  if (!why.empty()) {
    close(fd);
    throw std::runtime_error("cannot listen at " + address + ":" + std::to_string(port) + ": " + why);
  }
  return fd;
}

}  // namespace

TcpTransport::TcpTransport(TcpOptions options, Sink& sink) : options_(std::move(options)), sink_(sink) {
  listen_fd_ = listen_at(options_.address, options_.port);
  sockaddr_in at{};
  socklen_t size = sizeof at;
  getsockname(listen_fd_, reinterpret_cast<sockaddr*>(&at), &size);
  port_ = ntohs(at.sin_port);
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  for (int fd : {listen_fd_, wake_fd_}) {
    epoll_event event{EPOLLIN, {.fd = fd}};
    epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  }
}

TcpTransport::~TcpTransport() {
  stop();
  for (auto& [index, peer] : peers_) stop_probe(peer);
  for (auto& [fd, newcomer] : newcomers_) close(fd);
  for (int fd : {listen_fd_, epoll_fd_, wake_fd_}) {
    if (fd >= 0) close(fd);
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
  // Peers notice at once, also where this process goes on.
  dirty_.clear();
  for (auto& [index, peer] : peers_) {
    peer.connections.clear();
    peer.control.reset();
  }
  connections_.clear();
  close(std::exchange(listen_fd_, -1));
}

// ---- other threads --------------------------------------------------------------------------------------

void TcpTransport::post(std::function<void()> task) {
  bool wake;
  {
    const std::lock_guard lock(tasks_mutex_);
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
    peer_at(peer).address = address;
    peer_at(peer).port = port;
  });
}

void TcpTransport::call_peer(int peer, const Introduction& me, double timeout_s) {
  Peer to;
  const int fd = [&] {
    const auto known = std::make_shared<std::promise<std::pair<std::string, int>>>();
    post([this, peer, known] { known->set_value({peer_at(peer).address, peer_at(peer).port}); });
    const auto [address, port] = known->get_future().get();
    return call(address, port, options_.secret, me, timeout_s);
  }();
  post([this, fd, peer, control = me.control] { adopt(fd, peer, control); });
}

bool TcpTransport::wait_for_connections(std::size_t count, double timeout_s) {
  std::unique_lock lock(established_mutex_);
  return established_changed_.wait_for(lock, seconds(timeout_s), [&] { return num_established_ >= count; });
}

std::size_t TcpTransport::connections_of(int peer) {
  const std::lock_guard lock(established_mutex_);
  return established_[peer];
}

bool TcpTransport::flush(double timeout_s) {
  auto deadline = Clock::now() + seconds(timeout_s);
  std::size_t least = ~std::size_t{0};
  while (Clock::now() < deadline) {
    const auto left = std::make_shared<std::promise<std::size_t>>();
    post([this, left] {
      flush_dirty();
      std::size_t bytes = 0;
      for (const auto& [fd, connection] : connections_) {
        int unacknowledged = 0;
        ioctl(fd, SIOCOUTQ, &unacknowledged);
        bytes += connection->queued_bytes() + static_cast<std::size_t>(unacknowledged);
      }
      left->set_value(bytes);
    });
    const std::size_t bytes = left->get_future().get();
    if (bytes == 0) return true;
    if (bytes < least) deadline = Clock::now() + seconds(timeout_s);
    least = std::min(least, bytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

std::map<std::string, std::uint64_t> TcpTransport::counters() const {
  return {{"bytes_sent", bytes_sent_},
          {"bytes_received", bytes_received_},
          {"frames_sent", frames_sent_},
          {"frames_received", frames_received_},
          {"strangers_dropped", strangers_}};
}

// ---- the loop -------------------------------------------------------------------------------------------

void TcpTransport::run() {
  auto last_tick = Clock::now();
  std::array<epoll_event, 64> events;
  while (!stopping_) {
    const double until_tick = options_.tick_s - std::chrono::duration<double>(Clock::now() - last_tick).count();
    const int wait_ms = std::max(0, static_cast<int>(until_tick * 1000) + 1);
    const int count = epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), wait_ms);
    for (int k = 0; k < count; ++k) {
      const int fd = events[static_cast<std::size_t>(k)].data.fd;
      if (fd == wake_fd_) {
        std::uint64_t ignored;
        [[maybe_unused]] const ssize_t got = ::read(wake_fd_, &ignored, sizeof ignored);
      } else if (fd == listen_fd_) {
        accept_all();
      } else if (newcomers_.count(fd)) {
        hear_newcomer(fd);
      } else if (auto found = connections_.find(fd); found != connections_.end()) {
        serve(std::shared_ptr(found->second), events[static_cast<std::size_t>(k)].events);
      }
    }
    run_tasks();
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
    const std::lock_guard lock(tasks_mutex_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) task();
}

TcpTransport::Peer& TcpTransport::peer_at(int index) { return peers_[index]; }

// ---- strangers become peers -----------------------------------------------------------------------------

void TcpTransport::accept_all() {
  while (true) {
    const int fd = accept4(listen_fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    if (newcomers_.size() >= kMaxNewcomers) {
      const auto oldest = std::min_element(newcomers_.begin(), newcomers_.end(), [](const auto& a, const auto& b) {
        return a.second.deadline < b.second.deadline;
      });
      forget_newcomer(oldest->first, "too many others came after it");
    }
    newcomers_[fd] = {{}, {}, {}, Clock::now() + seconds(kHandshakeS)};
    epoll_event event{EPOLLIN, {.fd = fd}};
    epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  }
}

void TcpTransport::hear_newcomer(int fd) {
  Newcomer& newcomer = newcomers_[fd];
  const std::size_t wanted = newcomer.caller.empty() ? kHelloBytes : kIdentityBytes;
  Bytes chunk(wanted - newcomer.received.size());
  const ssize_t got = recv(fd, chunk.data(), chunk.size(), 0);
  if (got <= 0) {
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    return forget_newcomer(fd, newcomer.received.empty() && newcomer.caller.empty() ? "" : "it hung up");
  }
  newcomer.received.insert(newcomer.received.end(), chunk.begin(), chunk.begin() + got);
  if (newcomer.received.size() < wanted) return;
  try {
    const Bytes received = std::exchange(newcomer.received, {});
    if (newcomer.caller.empty()) {
      newcomer.caller = read_hello(received);
      newcomer.listener = random_bytes(16);
      const Bytes challenge = make_challenge(options_.secret, newcomer.caller, newcomer.listener);
      if (::send(fd, challenge.data(), challenge.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(challenge.size())) {
        throw std::runtime_error("it does not read");
      }
      return;
    }
    const Introduction intro = read_identity(options_.secret, newcomer.caller, newcomer.listener, received);
    std::string why;
    const int peer = sink_.on_identity(intro.who, why);
    if (peer < 0) throw std::runtime_error(why);
    const std::uint8_t welcome = 1;
    [[maybe_unused]] const ssize_t sent = ::send(fd, &welcome, 1, MSG_NOSIGNAL);
    newcomers_.erase(fd);
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
    adopt(fd, peer, intro.control);
  } catch (const std::runtime_error& error) {
    forget_newcomer(fd, error.what());
  }
}

// Drops a connection that did not prove itself; the job goes on. A probe that says nothing is not reported.
void TcpTransport::forget_newcomer(int fd, const std::string& why) {
  newcomers_.erase(fd);
  sockaddr_in from{};
  socklen_t size = sizeof from;
  char text[INET_ADDRSTRLEN] = "?";
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&from), &size) == 0) {
    inet_ntop(AF_INET, &from.sin_addr, text, sizeof text);
  }
  close(fd);
  if (why.empty()) return;
  if (strangers_++ < 10) std::fprintf(stderr, "shoal: dropped a connection from %s: %s\n", text, why.c_str());
}

void TcpTransport::adopt(int fd, int index, bool control) {
  Peer& peer = peer_at(index);
  if (peer.down) {
    close(fd);
    return;
  }
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  if (!control && options_.send_buffer_bytes > 0) set_option(fd, SOL_SOCKET, SO_SNDBUF, options_.send_buffer_bytes);
  auto connection = std::make_shared<Connection>(fd, index, control, pool_);
  connections_[fd] = connection;
  peer.connections.push_back(connection);
  if (control) peer.control = connection;
  epoll_event event{EPOLLIN, {.fd = fd}};
  epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  {
    const std::lock_guard lock(established_mutex_);
    ++num_established_;
    ++established_[index];
  }
  established_changed_.notify_all();
}

// ---- frames ---------------------------------------------------------------------------------------------

void TcpTransport::send(int index, FrameHeader header, Payload payload) {
  const auto found = peers_.find(index);
  if (found == peers_.end() || found->second.down || found->second.connections.empty()) return;
  Peer& peer = found->second;
  std::shared_ptr<Connection> best;
  if (!carries_data(header.type) && peer.control) {
    best = peer.control;
  } else {
    for (const auto& connection : peer.connections) {
      if (connection->control() && peer.connections.size() > 1) continue;
      if (!best || connection->queued_bytes() < best->queued_bytes()) best = connection;
    }
  }
  seal(header, payload);
  best->enqueue(header, std::move(payload));
  ++frames_sent_;
  dirty_.push_back(best);
}

void TcpTransport::flush_dirty() {
  while (!dirty_.empty()) {
    std::vector<std::shared_ptr<Connection>> dirty;
    dirty.swap(dirty_);
    for (const auto& connection : dirty) write(connection);
  }
}

void TcpTransport::write(const std::shared_ptr<Connection>& connection) {
  if (connection->queued_bytes() == 0 || !connections_.count(connection->fd())) return;
  const std::uint64_t before = connection->bytes_out;
  try {
    watch(*connection, !connection->write());
  } catch (const std::runtime_error& error) {
    end_connection(connection, error.what());
  }
  bytes_sent_ += connection->bytes_out - before;
}

void TcpTransport::watch(const Connection& connection, bool writable) {
  epoll_event event{EPOLLIN | (writable ? static_cast<std::uint32_t>(EPOLLOUT) : 0u), {.fd = connection.fd()}};
  epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, connection.fd(), &event);
}

void TcpTransport::serve(const std::shared_ptr<Connection>& connection, std::uint32_t events) {
  if (events & EPOLLOUT) write(connection);
  if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
  const std::uint64_t before = connection->bytes_in;
  try {
    const bool open = connection->read([&](const FrameHeader& header, Payload payload) {
      ++frames_received_;
      peer_at(connection->peer()).silent_s = 0;
      sink_.on_frame(connection->peer(), header, std::move(payload));
    });
    bytes_received_ += connection->bytes_in - before;
    if (!open) end_connection(connection, "it closed the connection");
  } catch (const std::system_error& error) {
    end_connection(connection, error.code().message());
  } catch (const std::exception& error) {  // a frame that cannot be: what else it may have sent is lost
    declare_down(connection->peer(), error.what());
  }
}

// A peer's connections end one after the other; what the last ones still hold is read first. If the others do
// not follow within the grace, frames may be missing for ever and the peer is down all the same.
void TcpTransport::end_connection(const std::shared_ptr<Connection>& connection, const std::string& why) {
  if (!connections_.erase(connection->fd())) return;
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection->fd(), nullptr);
  Peer& peer = peer_at(connection->peer());
  std::erase(peer.connections, connection);
  if (peer.control == connection) peer.control.reset();
  if (peer.connections.empty()) return declare_down(connection->peer(), peer.ended.empty() ? why : peer.ended);
  if (peer.ended.empty()) peer.ended = why;
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
  stop_probe(peer);
  for (const auto& connection : peer.connections) {
    connections_.erase(connection->fd());
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection->fd(), nullptr);
  }
  peer.connections.clear();
  peer.control.reset();
}

void TcpTransport::drop_data() {
  for (auto& [index, peer] : peers_) {
    for (const auto& connection : std::vector(peer.connections)) {
      if (connection->control()) {
        connection->drop_data();
        continue;
      }
      connections_.erase(connection->fd());
      epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection->fd(), nullptr);
      std::erase(peer.connections, connection);
    }
  }
  dirty_.erase(std::remove_if(dirty_.begin(), dirty_.end(), [](const auto& each) { return !each->control(); }),
               dirty_.end());
}

// ---- health ---------------------------------------------------------------------------------------------

void TcpTransport::tick(double elapsed_s) {
  std::vector<int> late;
  for (const auto& [fd, newcomer] : newcomers_) {
    if (Clock::now() > newcomer.deadline) late.push_back(fd);
  }
  for (int fd : late) forget_newcomer(fd, "it did not prove that it knows the secret in time");
  std::vector<int> indices;
  for (const auto& [index, peer] : peers_) indices.push_back(index);
  for (int index : indices) {
    Peer& peer = peer_at(index);
    if (peer.down || check_ended(index, peer, elapsed_s)) continue;
    if (peer.control && !peer.address.empty()) check_peer(index, peer, elapsed_s);
  }
  sink_.on_tick();
}

bool TcpTransport::check_ended(int index, Peer& peer, double elapsed_s) {
  if (peer.ended.empty()) return false;
  peer.ended_s += std::min(elapsed_s, 2 * options_.tick_s);
  if (peer.ended_s <= options_.grace_s) return false;
  declare_down(index, "one of its connections ended: " + std::string(peer.ended));
  return true;
}

void TcpTransport::check_peer(int index, Peer& peer, double elapsed_s) {
  tcp_info info{};
  socklen_t size = sizeof info;
  getsockopt(peer.control->fd(), IPPROTO_TCP, TCP_INFO, &info, &size);
  const bool answers = info.tcpi_unacked == 0 || info.tcpi_last_ack_recv < 2.5e3 * options_.tick_s;
  if (answers || probe_answers(peer)) {
    peer.silent_s = 0;
    return;
  }
  // A step that came late says nothing about the peer: at most two ticks are counted.
  peer.silent_s += std::min(elapsed_s, 2 * options_.tick_s);
  const double already_s = 2.5 * options_.tick_s;
  if (peer.silent_s + already_s <= options_.grace_s) return;
  char why[96];
  std::snprintf(why, sizeof why, "its host has not answered for %.1f s", peer.silent_s + already_s);
  declare_down(index, why);
}

// Whether the kernel at the other end has taken a connection since the last tick; begins the next attempt.
bool TcpTransport::probe_answers(Peer& peer) {
  bool answers = false;
  if (peer.probe_fd >= 0) {
    tcp_info info{};
    socklen_t size = sizeof info;
    getsockopt(peer.probe_fd, IPPROTO_TCP, TCP_INFO, &info, &size);
    int error = 0;
    size = sizeof error;
    getsockopt(peer.probe_fd, SOL_SOCKET, SO_ERROR, &error, &size);
    answers = info.tcpi_state == TCP_ESTABLISHED || info.tcpi_state == TCP_CLOSE_WAIT || error == ECONNREFUSED;
  }
  stop_probe(peer);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(peer.port));
  inet_pton(AF_INET, peer.address.c_str(), &to.sin_addr);
  peer.probe_fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  connect(peer.probe_fd, reinterpret_cast<sockaddr*>(&to), sizeof to);
  return answers;
}

void TcpTransport::stop_probe(Peer& peer) {
  if (peer.probe_fd >= 0) close(std::exchange(peer.probe_fd, -1));
}

}  // namespace shoal
