#include "transport/connection.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/fork.h"

namespace shoal {

namespace {

constexpr std::size_t kStagedBytes = 16 << 10, kStagedControlBytes = 2 << 10;
constexpr std::size_t kFairShare = 512 << 10;  // bytes read from a connection before the others are served
constexpr std::size_t kNoLimit = ~std::size_t{0};
constexpr std::size_t kWriteBytes = 512 << 10;  // handed to the kernel at once, if there are more frames

}  // namespace

Connection::Connection(int fd, int peer, bool control, Shared& shared, int epoll_fd, Seals seals)
    : fd_(fd),
      peer_(peer),
      control_(control),
      shared_(shared),
      epoll_fd_(epoll_fd),
      staged_bytes_(control ? kStagedControlBytes : kStagedBytes),
      staged_(std::make_unique_for_overwrite<std::byte[]>(staged_bytes_)),
      receives_(std::move(seals.receives)),
      sends_(std::move(seals.sends)) {
  close_in_children(fd_);
}

Connection::~Connection() { close_socket(fd_); }

// ---- reading --------------------------------------------------------------------------------------------

bool Connection::read(Sink& sink, std::optional<std::size_t> most) {
  for (std::size_t total = 0; total < most.value_or(kFairShare);) {
    const Received received = receive(most ? *most - total : kNoLimit);
    total += received.bytes;
    if (received.waits) {
      const NetworkHold hold(shared_.network);
      take_staged(sink);
    }
    if (received.closed) return false;
    if (received.drained || stalled_) return true;
  }
  return true;
}

bool Connection::read_all(Sink& sink) {
  while (true) {
    const Received received = receive(kNoLimit);
    if (received.waits) take_staged(sink);
    if (stalled_) resume(true);  // nothing more comes
    if (received.closed) return false;
    if (received.drained) return true;
  }
}

// Reads what the socket has, at most so much, or nothing while bytes that were read before wait.
Connection::Received Connection::receive(std::size_t most) {
  const MutexLock lock(reading_);
  Received received;
  if (ended_) {
    received.drained = true;
    return received;
  }
  if (whole_ || staged_begin_ != staged_end_ || awaits_place()) {
    received.waits = true;
    return received;
  }
  iovec pieces[2];
  int count = 0;
  const std::size_t missing = payload_ ? header_.payload_bytes - payload_filled_ : 0, wanted = std::min(missing, most),
                    beside = wanted < missing ? 0 : std::min(staged_bytes_, most - wanted);
  if (wanted) pieces[count++] = {payload_.get() + payload_filled_, wanted};
  if (beside) pieces[count++] = {staged_.get(), beside};
  const ssize_t got = readv(fd_, pieces, count);
  static_cast<void>(shared_.num_writes.load(std::memory_order_acquire));
  if (got < 0 && errno != EAGAIN && errno != EINTR) throw std::system_error(errno, std::generic_category());
  received.closed = got == 0;
  received.drained = got < 0 && errno == EAGAIN;
  if (got <= 0) return received;
  received.bytes = static_cast<std::size_t>(got);
  bytes_in += received.bytes;
  shared_.bytes_received += received.bytes;
  const std::size_t direct = std::min(received.bytes, wanted);
  payload_filled_ += direct;
  staged_begin_ = 0;
  staged_end_ = received.bytes - direct;
  if (payload_ && payload_filled_ == header_.payload_bytes) open_payload();
  received.waits = whole_ || staged_end_ > 0;
  received.drained = received.bytes < wanted + beside;
  return received;
}

void Connection::take_staged(Sink& sink) {
  while (take_one(sink)) {
  }
}

// Passes on a whole frame, or consumes one header or payload of the staged bytes. Returns false if there is neither.
bool Connection::take_one(Sink& sink) {
  FrameHeader header;
  std::optional<Payload> whole;
  {
    const MutexLock lock(reading_);
    if (ended_) return false;
    const std::size_t left = staged_end_ - staged_begin_;
    if (!whole_ && left == 0 && !awaits_place()) return false;
    const std::byte* from = staged_.get() + staged_begin_;
    if (!whole_ && payload_) {
      const std::size_t size = std::min(left, header_.payload_bytes - payload_filled_);
      std::memcpy(payload_.get() + payload_filled_, from, size);
      staged_begin_ += size;
      payload_filled_ += size;
      if (payload_filled_ < header_.payload_bytes) return true;
      open_payload();
    } else if (!whole_ && !awaits_place()) {
      const std::size_t size = std::min(left, sizeof header_ - header_filled_);
      std::memcpy(reinterpret_cast<std::byte*>(&header_) + header_filled_, from, size);
      staged_begin_ += size;
      header_filled_ += size;
      if (header_filled_ < sizeof header_) return true;
      if (const std::string wrong = receives_.check(header_); !wrong.empty()) throw std::runtime_error(wrong);
    }
    header = header_;
    if (whole_) {
      whole.swap(whole_);
      placed_ = false;
      header_filled_ = payload_filled_ = 0;
      ++frames_in;
      ++shared_.frames_received;
    }
  }
  if (whole) {
    sink.on_frame(peer_, header, std::move(*whole));
    return true;
  }
  if (!hung_up_ && !sink.admits(peer_, header)) {
    stall();
    return false;
  }
  std::shared_ptr<std::byte> place = header.payload_bytes ? sink.place_for(peer_, header) : nullptr;
  const MutexLock lock(reading_);
  if (!header.payload_bytes) {
    open_payload();
    return true;
  }
  placed_ = place != nullptr;
  payload_ = placed_ ? std::move(place) : shared_.pool.take(header.payload_bytes);
  arriving_bytes_ = header.payload_bytes;
  return true;
}

void Connection::open_payload() {
  arriving_bytes_ = 0;
  whole_ = receives_.open(header_, std::exchange(payload_, nullptr));
}

void Connection::stall() {
  const MutexLock lock(writing_);
  stalled_ = true;
  watch(writable_, false);
}

void Connection::resume(bool hung_up) {
  const MutexLock lock(writing_);
  stalled_ = false;
  if (hung_up) hung_up_ = true;
  watch(writable_, true);
}

// Receives the rest of a frame that is under way into a buffer instead of its place.
void Connection::leave_place() {
  if (!std::exchange(placed_, false)) return;
  std::shared_ptr<std::byte> buffer = shared_.pool.take(header_.payload_bytes);
  if (whole_) {
    whole_ = whole_->copied_to(std::move(buffer));
    return;
  }
  std::memcpy(buffer.get(), payload_.get(), payload_filled_);
  payload_ = std::move(buffer);
}

// ---- writing --------------------------------------------------------------------------------------------

void Connection::enqueue(const FrameHeader& header, Payload payload) {
  const MutexLock lock(queue_);
  if (ended_) return;
  queued_bytes_ += sizeof header + payload.size();
  out_.push_back({header, std::move(payload)});
}

bool Connection::write() {
  const MutexLock lock(writing_);
  trim();
  std::array<Outgoing*, kMostFrames> frames;
  while (const std::size_t num_frames = ended_ ? 0 : pick(frames)) {
    iovec pieces[2 * kMostFrames];
    std::size_t count = 0;
    for (std::size_t k = 0; k < num_frames; ++k) {
      Outgoing& frame = *frames[k];
      if (!frame.sealed) seal(frame);
      const std::size_t header_sent = std::min(frame.sent, sizeof frame.header);
      if (header_sent < sizeof frame.header) {
        pieces[count++] = {reinterpret_cast<std::byte*>(&frame.header) + header_sent, sizeof frame.header - header_sent};
      }
      const std::size_t payload_sent = frame.sent - header_sent;
      if (payload_sent < frame.payload.size()) {
        pieces[count++] = {const_cast<std::byte*>(frame.payload.data()) + payload_sent, frame.payload.size() - payload_sent};
      }
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    shared_.num_writes.fetch_add(1, std::memory_order_release);
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EAGAIN) {
        watch(true, readable_);
        return false;
      }
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category());
    }
    account(static_cast<std::size_t>(sent));
  }
  watch(false, readable_);
  return true;
}

void Connection::seal(Outgoing& frame) {
  frame.sealed = true;
  if (keeps_ && sends_.encrypts()) frame.plain = frame.payload;
  frame.payload = sends_.close(frame.header, std::move(frame.payload), shared_.pool);
}

// Returns the first frames of the queue, which stay where they are: only a holder of writing_ removes them.
std::size_t Connection::pick(std::array<Outgoing*, kMostFrames>& frames) {
  const MutexLock lock(queue_);
  std::size_t num_frames = 0, bytes = 0;
  for (Outgoing& frame : out_) {
    if (num_frames == kMostFrames || bytes >= kWriteBytes) break;
    frames[num_frames++] = &frame;
    bytes += sizeof frame.header + frame.payload.size() - frame.sent;
  }
  return num_frames;
}

// Lets go of the frames that are written: with writing_, so that drop_data() returns after their owners are gone.
void Connection::account(std::size_t sent) {
  for (bool first = true; sent > 0; first = false) {
    Outgoing written;
    {
      const MutexLock lock(queue_);
      if (first) {
        bytes_out += sent;
        shared_.bytes_sent += sent;
        queued_bytes_ -= sent;
      }
      Outgoing& frame = out_.front();
      const std::size_t whole = sizeof frame.header + frame.payload.size();
      const std::size_t part = std::min(sent, whole - frame.sent);
      frame.sent += part;
      sent -= part;
      if (frame.sent != whole) return;
      written = std::move(frame);
      out_.pop_front();
    }
    whole_bytes_ += written.sent;
    if (keeps_) kept_.push_back({{written.header, copy_of(written.plain.size() ? written.plain : written.payload)}, whole_bytes_});
  }
}

void Connection::watch(bool writable, bool readable) {
  const bool same = std::exchange(writable_, writable) == writable;
  if ((std::exchange(readable_, readable) == readable && same) || epoll_fd_ < 0) return;
  epoll_event event{(readable ? EPOLLIN : EPOLLRDHUP) | (writable ? static_cast<std::uint32_t>(EPOLLOUT) : 0u), {.fd = fd_}};
  epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd_, &event);
}

// ---- what others take back ------------------------------------------------------------------------------

void Connection::drop_data(std::uint32_t group) {
  {
    const MutexLock lock(reading_);
    if (header_.group == group) leave_place();
  }
  const MutexLock lock(writing_);
  std::erase_if(kept_, [&](const Kept& each) { return each.frame.header.group == group && carries_data(each.frame.header.type); });
  std::deque<Outgoing> dropped;  // their owners are called without the queue's lock
  {
    const MutexLock queue(queue_);
    std::deque<Outgoing> kept;
    for (Outgoing& frame : out_) {
      const bool is_data = frame.header.group == group && carries_data(frame.header.type);
      const bool drops = is_data && !frame.sealed;  // a sealed one has its number: the peer waits for it
      if (drops) {
        queued_bytes_ -= sizeof frame.header + frame.payload.size();
      } else if (is_data) {
        frame.payload = copy_of(frame.payload);
        frame.plain = copy_of(frame.plain);
      }
      (drops ? dropped : kept).push_back(std::move(frame));
    }
    out_.swap(kept);
  }
}

void Connection::end() {
  std::deque<Outgoing> dropped;
  std::shared_ptr<std::byte> place;
  std::optional<Payload> whole;
  const MutexLock reads(reading_), writes(writing_), queue(queue_);
  ended_ = true;
  place.swap(payload_);
  whole.swap(whole_);
  out_.swap(dropped);
  queued_bytes_ = 0;
}

// What is in the kernel is no more than a send buffer: a copy lets go of the caller's memory as soon as it is written.
Payload Connection::copy_of(const Payload& payload) {
  return payload.copied_to(shared_.pool.take(payload.size()));
}

std::size_t Connection::bytes_in_kernel() const {
  int bytes = 0;
  ioctl(fd_, SIOCOUTQ, &bytes);
  return static_cast<std::size_t>(bytes);
}

std::uint64_t Connection::mark() const {
  const MutexLock lock(queue_);
  return bytes_out + queued_bytes_;
}

std::size_t Connection::unacknowledged_bytes(std::uint64_t mark) {
  const MutexLock lock(writing_);
  const std::size_t in_kernel = bytes_in_kernel();
  const std::uint64_t acknowledged = bytes_out - in_kernel;
  const std::size_t all = queued_bytes() + in_kernel;
  return acknowledged < mark ? std::min<std::size_t>(all, mark - acknowledged) : 0;  // data may have been dropped since
}

void Connection::keep_unacknowledged() {
  const MutexLock lock(writing_);
  keeps_ = true;
}

void Connection::trim() {
  if (kept_.empty()) return;
  const std::uint64_t acknowledged = bytes_out - bytes_in_kernel();
  while (!kept_.empty() && kept_.front().end <= acknowledged) kept_.pop_front();
}

std::vector<Connection::Outgoing> Connection::take_unacknowledged() {
  const MutexLock lock(writing_);
  trim();
  std::vector<Outgoing> frames;
  for (Kept& each : kept_) frames.push_back(std::move(each.frame));
  kept_.clear();
  const MutexLock queue(queue_);
  for (Outgoing& each : out_) {
    if (each.plain.size()) each.payload = std::move(each.plain);
    frames.push_back(std::move(each));
  }
  out_.clear();
  queued_bytes_ = 0;
  return frames;
}

}  // namespace shoal
