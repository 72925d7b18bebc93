// Authentication of inbound connections, and detection of peers, and of paths to them, that no longer respond.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "base/clock.h"
#include "base/fork.h"
#include "transport/address.h"
#include "transport/tcp.h"

namespace shoal {

namespace {

constexpr double kHandshakeS = 10.0;  // of a member too, on a machine that is busy
constexpr std::size_t kMaxNewcomers = 4096;
constexpr int kSpareFiles = 16;  // of a process, for what else it opens
constexpr std::size_t kMostAhead = 1 << 16;  // frames that have overtaken a missing one

void set_option(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); }

rlim_t max_files() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

// Of accept(): the next attempt fails as well, until something is closed.
bool is_exhausted(int error) { return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM; }

}  // namespace

// ---- authentication -------------------------------------------------------------------------------------

void TcpTransport::accept_all(int listen_fd) {
  while (true) {
    const int fd = accept4(listen_fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0 && !is_exhausted(errno)) return;
    const bool full = fd < 0 || static_cast<rlim_t>(fd) + kSpareFiles >= max_files();
    if (full && newcomers_.empty()) {
      if (fd >= 0) close(fd);
      return pause_accepting();
    }
    if (full || newcomers_.size() >= kMaxNewcomers) forget_newcomer(arrivals_.begin()->second, "too many others connected after it");
    if (fd < 0) continue;
    close_in_children(fd);
    const std::string place = place_text(local_address(fd), local_port(fd));
    newcomers_.emplace(fd, Newcomer{Listener(credentials_, place), num_arrivals_, Clock::now() + seconds(kHandshakeS), peer_address(fd)});
    arrivals_[num_arrivals_++] = fd;
    await_input(loops_.front()->epoll_fd, fd);
  }
}

// Until the next tick: members have all files of this process. Those who call wait in the kernel.
void TcpTransport::pause_accepting() {
  if (std::exchange(accepts_, false)) {
    for (int fd : listen_fds_) epoll_ctl(loops_.front()->epoll_fd, EPOLL_CTL_DEL, fd, nullptr);
  }
  lines_.write("shoal: this process may open " + std::to_string(max_files()) +
               " files (RLIMIT_NOFILE) and has no more for connections; raise it (ulimit -n) or close some");
}

void TcpTransport::hear_newcomer(int fd) {
  Newcomer& newcomer = newcomers_.at(fd);
  const std::size_t wanted = newcomer.knows_secret ? kIdentityBytes : kHelloBytes;
  Bytes chunk(wanted - newcomer.received.size());
  const ssize_t got = recv(fd, chunk.data(), chunk.size(), 0);
  if (got <= 0) {
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    return forget_newcomer(fd, newcomer.received.empty() ? "" : "it hung up");
  }
  newcomer.received.insert(newcomer.received.end(), chunk.begin(), chunk.begin() + got);
  if (newcomer.received.size() < wanted) return;
  try {
    const Bytes message = std::exchange(newcomer.received, {});
    if (newcomer.knows_secret) return admit(fd, newcomer, message);
    answer_newcomer(fd, newcomer, message);
  } catch (const std::runtime_error& error) {
    forget_newcomer(fd, error.what());
  }
}

void TcpTransport::answer_newcomer(int fd, Newcomer& newcomer, const Bytes& hello) {
  const auto answer = [fd](const Bytes& bytes) { return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()); };
  try {
    if (!answer(newcomer.listener.challenge(hello))) throw std::runtime_error("it does not read");
  } catch (const UnknownSecret&) {
    answer(Bytes(kChallengeBytes));  // no HMAC for a stranger; a worker with another secret need not call again
    throw;
  }
  newcomer.knows_secret = true;
}

void TcpTransport::admit(int fd, Newcomer& newcomer, const Bytes& identity) {
  Introduction intro = newcomer.listener.introduction(identity);
  intro.from = newcomer.from;
  std::string why;
  const int peer = sink_.on_introduction(intro, why);
  const Bytes welcome = newcomer.listener.welcome(peer >= 0);
  [[maybe_unused]] const ssize_t sent = ::send(fd, welcome.data(), welcome.size(), MSG_NOSIGNAL);
  if (peer < 0) throw std::runtime_error(why);
  if (intro.knocks) return forget_newcomer(fd, "");
  const Session session = newcomer.listener.session();
  take_newcomer(fd);
  epoll_ctl(loops_.front()->epoll_fd, EPOLL_CTL_DEL, fd, nullptr);
  adopt(fd, peer, intro.control, session);
}

TcpTransport::Newcomer TcpTransport::take_newcomer(int fd) {
  Newcomer newcomer = std::move(newcomers_.extract(fd).mapped());
  arrivals_.erase(newcomer.number);
  return newcomer;
}

// Drops a connection that did not authenticate; the job continues. A probe that sends nothing is not logged, nor a
// process that has asked for the key.
void TcpTransport::forget_newcomer(int fd, const std::string& why) {
  const std::string from = take_newcomer(fd).from;
  close_socket(fd);
  if (why.empty()) return;
  ++strangers_;
  lines_.write("shoal: dropped a connection from " + from + ": " + why);
}

void TcpTransport::adopt(int fd, int index, bool control, const Session& session) {
  Peer& peer = peer_at(index);
  if (peer.down) {
    close_socket(fd);
    return;
  }
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  if (!control && options_.send_buffer_bytes > 0) set_option(fd, SOL_SOCKET, SO_SNDBUF, options_.send_buffer_bytes);
  const std::size_t number = control ? 0 : num_data_++ % loops_.size();
  Loop& loop = *loops_[number];
  auto connection = std::make_shared<Connection>(
      fd, index, control, shared_, loop.epoll_fd,
      Connection::Seals{Seal(session.protection, session.sends), Seal(session.protection, session.receives)});
  connection->loop = number;
  connection->job = peer.job;
  if (addresses_.size() > 1) {
    connection->path = path_of(fd);
    peer.paths.resize(std::max(peer.paths.size(), connection->path + 1));  // its addresses may come later
    if (peer.addresses.size() != 1) connection->keep_unacknowledged();
  }
  ++num_connections_;
  peer.connections.push_back(connection);
  if (control) peer.control = connection;
  {
    const MutexLock lock(loop.mutex);
    loop.connections[fd] = connection;
  }
  await_input(loop.epoll_fd, fd);
  sink_.on_connected(index);
}

// ---- paths ----------------------------------------------------------------------------------------------

std::size_t TcpTransport::path_of(int fd) const {
  const auto found = std::ranges::find(addresses_, local_address(fd));
  return found == addresses_.end() ? 0 : static_cast<std::size_t>(found - addresses_.begin());
}

// Returns where the next connection to a peer goes, and from where: over the path with the fewest for data. One path
// is the kernel's choice, for all of them: the peer takes none from elsewhere (Arrivals).
Destination TcpTransport::destination_of(const Peer& peer, bool control) const {
  if (peer.addresses.empty()) throw std::logic_error("a peer without an address is called");
  if (std::min(peer.paths.size(), peer.addresses.size()) < 2) {
    return {peer.addresses.front(), peer.port, peer.key, control || !peer.control ? "" : local_address(peer.control->fd())};
  }
  std::vector<int> num(peer.paths.size());
  for (const auto& each : peer.connections) num[each->path] += !each->control();
  const auto path = static_cast<std::size_t>(control ? 0 : std::ranges::min_element(num) - num.begin());
  return {peer.addresses[path], peer.port, peer.key, addresses_[path]};
}

// Gives up a path of a peer, and sends what it had taken over the others. What has arrived by it is read first: that is
// acknowledged, and the peer will not send it again.
void TcpTransport::lose_path(int index, std::size_t path, bool tell) {
  Peer& peer = peer_at(index);
  if (peer.down || path >= peer.paths.size() || std::exchange(peer.paths[path].lost, true)) return;
  ++paths_lost_;
  const std::string other = path < peer.addresses.size() ? peer.addresses[path] : "a peer";
  lines_.write("shoal: " + addresses_[path] + " and " + other +
               " no longer reach each other; what goes between them takes another interface");
  std::vector<std::shared_ptr<Connection>> ended;
  for (const auto& each : peer.connections) {
    if (each->path == path) ended.push_back(each);
  }
  for (const auto& each : ended) {
    try {
      each->read_all(once_);
    } catch (const std::system_error&) {  // it has ended by itself
    } catch (const std::exception& error) {
      return declare_down(index, error.what());
    }
    if (peer.down) return;
    end_connection(each, "its interface does not answer");
  }
  if (peer.down) return;
  peer.ended.clear();
  peer.ended_s = 0;
  if (!tell) return;
  FrameHeader header;
  header.type = FrameType::path_lost;
  header.chunk = path;
  send(index, header, {});
}

void TcpTransport::resend(Peer& peer, std::vector<Connection::Outgoing> frames) {
  for (Connection::Outgoing& frame : frames) {
    const auto connection = connection_for(peer, frame.payload.size(), carries_data(frame.header.type));
    enqueue(connection, frame.header, std::move(frame.payload));
  }
}

void TcpTransport::Once::on_frame(int index, const FrameHeader& header, Payload payload) {
  transport_.assert_here();
  if (header.counter == 0) return to().on_frame(index, header, std::move(payload));  // of a peer with one path
  Peer& peer = transport_.peer_at(index);
  if (header.counter < peer.seen_below || !peer.seen.insert(header.counter).second) return;
  if (peer.seen.size() > kMostAhead) peer.seen_below = *peer.seen.begin();  // what is missing was dropped with its group
  while (!peer.seen.empty() && *peer.seen.begin() == peer.seen_below) {
    peer.seen.erase(peer.seen.begin());
    ++peer.seen_below;
  }
  if (header.type != FrameType::path_lost) return to().on_frame(index, header, std::move(payload));
  if (header.chunk >= peer.paths.size()) throw std::runtime_error("it gives up path " + std::to_string(header.chunk) + ", which it does not have");
  transport_.post([this, index, path = header.chunk] {
    transport_.assert_here();
    transport_.lose_path(index, path, false);
  });  // it reads too
}

// ---- health ---------------------------------------------------------------------------------------------

void TcpTransport::tick(double elapsed_s) {
  std::vector<int> late;
  for (const auto& [fd, newcomer] : newcomers_) {
    if (Clock::now() > newcomer.deadline) late.push_back(fd);
  }
  for (int fd : late) forget_newcomer(fd, "it did not authenticate in time");
  if (!std::exchange(accepts_, true)) {
    for (int fd : listen_fds_) await_input(loops_.front()->epoll_fd, fd);
  }
  lines_.tick();
  std::vector<int> indices;
  for (const auto& [index, peer] : peers_) indices.push_back(index);
  for (int index : indices) {
    Peer& peer = peer_at(index);
    for (const auto& each : peer.connections) {
      const std::uint64_t frames = each->frames_in;
      if (std::exchange(each->frames_at_tick, frames) != frames) peer.paths[each->path].silent_s = 0;
    }
    if (peer.down || check_ended(index, peer, elapsed_s)) continue;
    if (peer.control && !peer.addresses.empty()) check_peer(index, peer, elapsed_s);
  }
  sink_.on_tick();
}

void TcpTransport::suspect(int index, const std::string& why) {
  assert_here();
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

// Looks whether a peer's kernel acknowledges what was sent to it, on each path. Where one does not, connection attempts
// on all of them tell a host that is gone from one whose interface is.
void TcpTransport::check_peer(int index, Peer& peer, double elapsed_s) {
  std::vector<bool> hears(peer.paths.size());
  for (std::size_t k = 0; k < hears.size(); ++k) hears[k] = peer.paths[k].lost || answers(peer, k);
  if (std::ranges::count(hears, false) == 0) {
    for (Path& path : peer.paths) path.silent_s = 0;
    return stop_probes(peer);
  }
  // A delayed tick of this process proves nothing about the peer: at most two ticks are counted.
  const double passed_s = std::min(elapsed_s, 2 * options_.tick_s), already_s = 2.5 * options_.tick_s;
  std::size_t dead = hears.size();
  bool another = false;
  for (std::size_t k = 0; k < hears.size(); ++k) {
    Path& path = peer.paths[k];
    if (path.lost) continue;
    const bool probed = probe_answers(peer, k, path);
    path.silent_s = hears[k] || probed ? 0 : path.silent_s + passed_s;
    if (path.silent_s + already_s > options_.grace_s) dead = k;
    else another = another || probed;
  }
  if (dead == hears.size()) return;
  if (another) return lose_path(index, dead, true);
  char why[96];
  std::snprintf(why, sizeof why, "its host has not answered for %.1f s", peer.paths[dead].silent_s + already_s);
  declare_down(index, why);
}

// Returns whether the peer's kernel has acknowledged all that was sent to it on a path, or has lately acknowledged some.
bool TcpTransport::answers(const Peer& peer, std::size_t path) const {
  bool all = true;
  for (const auto& each : peer.connections) {
    if (each->path != path || (peer.paths.size() == 1 && each != peer.control)) continue;
    tcp_info info{};
    socklen_t size = sizeof info;
    getsockopt(each->fd(), IPPROTO_TCP, TCP_INFO, &info, &size);
    all = all && (info.tcpi_unacked == 0 || info.tcpi_last_ack_recv < 2.5e3 * options_.tick_s);
  }
  return all;
}

// Returns whether the peer's kernel has accepted a connection on a path since the last tick; starts the next attempt.
bool TcpTransport::probe_answers(const Peer& peer, std::size_t path, Path& state) {
  bool answers = false;
  if (state.probe_fd >= 0) {
    tcp_info info{};
    socklen_t size = sizeof info;
    getsockopt(state.probe_fd, IPPROTO_TCP, TCP_INFO, &info, &size);
    int error = 0;
    size = sizeof error;
    getsockopt(state.probe_fd, SOL_SOCKET, SO_ERROR, &error, &size);
    answers = info.tcpi_state == TCP_ESTABLISHED || info.tcpi_state == TCP_CLOSE_WAIT || error == ECONNREFUSED;
    close(std::exchange(state.probe_fd, -1));
  }
  try {
    const SocketAddress to(peer.addresses.at(path), peer.port);
    state.probe_fd = socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (peer.paths.size() > 1) bind_to(state.probe_fd, addresses_[path]);
    connect(state.probe_fd, to.get(), to.size);
  } catch (const std::exception&) {  // it cannot be asked: its address is none, or ours is gone
  }
  return answers;
}

void TcpTransport::stop_probes(Peer& peer) {
  for (Path& path : peer.paths) {
    if (path.probe_fd >= 0) close(std::exchange(path.probe_fd, -1));
  }
}

}  // namespace shoal
