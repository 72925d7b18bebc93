// Authentication of inbound connections, and detection of peers that no longer respond.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "base/clock.h"
#include "transport/address.h"
#include "transport/tcp.h"

namespace shoal {

namespace {

constexpr double kHandshakeS = 5.0;
constexpr std::size_t kMaxNewcomers = 256;

void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

}  // namespace

// ---- authentication -------------------------------------------------------------------------------------

void TcpTransport::accept_all() {
  while (true) {
    const int fd = accept4(listen_fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    if (newcomers_.size() >= kMaxNewcomers) {
      const auto oldest = std::min_element(newcomers_.begin(), newcomers_.end(), [](const auto& a, const auto& b) {
        return a.second.deadline < b.second.deadline;
      });
      forget_newcomer(oldest->first, "too many others connected after it");
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
    const int peer = sink_.on_introduction(intro, why);
    const std::uint8_t welcome = peer >= 0;  // without an answer it retries
    [[maybe_unused]] const ssize_t sent = ::send(fd, &welcome, 1, MSG_NOSIGNAL);
    if (peer < 0) throw std::runtime_error(why);
    newcomers_.erase(fd);
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
    adopt(fd, peer, intro.control);
  } catch (const std::runtime_error& error) {
    forget_newcomer(fd, error.what());
  }
}

// Drops a connection that did not authenticate; the job continues. A probe that sends nothing is not logged.
void TcpTransport::forget_newcomer(int fd, const std::string& why) {
  newcomers_.erase(fd);
  const std::string from = peer_address(fd);
  close(fd);
  if (why.empty()) return;
  ++strangers_;
  lines_.write("shoal: dropped a connection from " + from + ": " + why);
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
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  if (!control && options_.send_buffer_bytes > 0) set_option(fd, SOL_SOCKET, SO_SNDBUF, options_.send_buffer_bytes);
  auto connection = std::make_shared<Connection>(fd, index, control, pool_);
  connections_[fd] = connection;
  ++num_connections_;
  peer.connections.push_back(connection);
  if (control) peer.control = connection;
  epoll_event event{EPOLLIN, {.fd = fd}};
  epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  sink_.on_connected(index);
}

// ---- health ---------------------------------------------------------------------------------------------

void TcpTransport::tick(double elapsed_s) {
  std::vector<int> late;
  for (const auto& [fd, newcomer] : newcomers_) {
    if (Clock::now() > newcomer.deadline) late.push_back(fd);
  }
  for (int fd : late) forget_newcomer(fd, "it did not authenticate in time");
  lines_.tick();
  std::vector<int> indices;
  for (const auto& [index, peer] : peers_) indices.push_back(index);
  for (int index : indices) {
    Peer& peer = peer_at(index);
    if (peer.down || check_ended(index, peer, elapsed_s)) continue;
    if (peer.control && !peer.address.empty()) check_peer(index, peer, elapsed_s);
  }
  sink_.on_tick();
}

void TcpTransport::suspect(int index, const std::string& why) {
  Peer& peer = peer_at(index);
  if (peer.ended.empty()) peer.ended = why;
}

bool TcpTransport::check_ended(int index, Peer& peer, double elapsed_s) {
  if (peer.ended.empty()) return false;
  peer.ended_s += std::min(elapsed_s, 2 * options_.tick_s);
  if (peer.ended_s <= options_.grace_s) return false;
  declare_down(index, "one of its connections ended: " + peer.ended);
  return true;
}

void TcpTransport::check_peer(int index, Peer& peer, double elapsed_s) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (!peer.sent_control && peer.silent_s == 0) return;  // nothing is unacknowledged
  getsockopt(peer.control->fd(), IPPROTO_TCP, TCP_INFO, &info, &size);
  peer.sent_control = info.tcpi_unacked > 0;
  const bool answers = info.tcpi_unacked == 0 || info.tcpi_last_ack_recv < 2.5e3 * options_.tick_s;
  if (answers || probe_answers(peer)) {
    peer.silent_s = 0;
    return;
  }
  // A delayed tick of this process proves nothing about the peer: at most two ticks are counted.
  peer.silent_s += std::min(elapsed_s, 2 * options_.tick_s);
  const double already_s = 2.5 * options_.tick_s;
  if (peer.silent_s + already_s <= options_.grace_s) return;
  char why[96];
  std::snprintf(why, sizeof why, "its host has not answered for %.1f s", peer.silent_s + already_s);
  declare_down(index, why);
}

// Returns whether the peer's kernel has accepted a connection since the last tick; starts the next attempt.
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
  try {
    const SocketAddress to(peer.address, peer.port);
    peer.probe_fd = socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    connect(peer.probe_fd, to.get(), to.size);
  } catch (const std::runtime_error&) {  // a peer that called us and gave no address: it cannot be asked
  }
  return answers;
}

void TcpTransport::stop_probe(Peer& peer) {
  if (peer.probe_fd >= 0) close(std::exchange(peer.probe_fd, -1));
}

}  // namespace shoal
