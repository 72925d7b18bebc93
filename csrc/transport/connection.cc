#include "transport/connection.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/crc32c.h"

namespace shoal {

namespace {

constexpr std::size_t kFairShare = 512 << 10;  // bytes read from a connection before the others are served
constexpr std::size_t kMaxPieces = 32;

}  // namespace

Connection::Connection(int fd, int peer, bool control, BufferPool& pool)
    : fd_(fd), peer_(peer), control_(control), pool_(pool) {}

Connection::~Connection() { close(fd_); }

bool Connection::read(Sink& sink) {
  std::size_t total = 0;
  while (total < kFairShare) {
    iovec pieces[2];
    int count = 0;
    std::size_t wanted = 0;
    if (payload_) {
      wanted = header_.payload_bytes - payload_filled_;
      pieces[count++] = {payload_.get() + payload_filled_, wanted};
    }
    pieces[count++] = {staged_.data(), staged_.size()};
    const ssize_t got = readv(fd_, pieces, count);
    if (got == 0) return false;
    if (got < 0) {
      if (errno == EAGAIN) return true;
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category());
    }
    const auto size = static_cast<std::size_t>(got);
    total += size;
    bytes_in += size;
    const std::size_t direct = std::min(size, wanted);
    payload_filled_ += direct;
    staged_begin_ = 0;
    staged_end_ = size - direct;
    if (payload_ && payload_filled_ == header_.payload_bytes) finish_frame(sink);
    while (take_staged(sink)) {
    }
    if (size < wanted + staged_.size()) return true;  // the socket is empty
  }
  return true;
}

// Consumes one header or payload of the staged bytes. Returns false if none are left.
bool Connection::take_staged(Sink& sink) {
  const std::size_t left = staged_end_ - staged_begin_;
  if (left == 0) return false;
  const std::byte* from = staged_.data() + staged_begin_;
  if (!payload_) {
    const std::size_t size = std::min(left, sizeof header_ - header_filled_);
    std::memcpy(reinterpret_cast<std::byte*>(&header_) + header_filled_, from, size);
    staged_begin_ += size;
    header_filled_ += size;
    if (header_filled_ < sizeof header_) return true;
    if (const std::string wrong = check_header(header_); !wrong.empty()) throw std::runtime_error(wrong);
    payload_ = header_.payload_bytes ? sink.place_for(peer_, header_) : nullptr;
    placed_ = payload_ != nullptr;
    if (!placed_) payload_ = buffer_of(header_.payload_bytes);
    payload_filled_ = 0;
  } else {
    const std::size_t size = std::min(left, header_.payload_bytes - payload_filled_);
    std::memcpy(payload_.get() + payload_filled_, from, size);
    staged_begin_ += size;
    payload_filled_ += size;
  }
  if (payload_filled_ == header_.payload_bytes) finish_frame(sink);
  return true;
}

std::shared_ptr<std::byte> Connection::buffer_of(std::size_t size) {
  const std::shared_ptr<std::byte[]> buffer = pool_.take(size);
  return {buffer, buffer.get()};
}

void Connection::finish_frame(Sink& sink) {
  const std::size_t size = header_.payload_bytes;
  if (size && crc32c(payload_.get(), size) != header_.payload_crc) {
    throw std::runtime_error("a frame's payload does not match its checksum");
  }
  Payload payload{payload_.get(), size, payload_, header_.payload_crc, true};
  payload_.reset();
  placed_ = false;
  header_filled_ = 0;
  ++frames_in;
  sink.on_frame(peer_, header_, std::move(payload));
}

void Connection::enqueue(const FrameHeader& header, Payload payload) {
  queued_bytes_ += sizeof header + payload.size;
  out_.push_back({header, std::move(payload)});
}

bool Connection::write() {
  trim();
  while (!out_.empty()) {
    iovec pieces[kMaxPieces];
    std::size_t count = 0;
    for (Outgoing& frame : out_) {
      if (count + 2 > kMaxPieces) break;
      const std::size_t header_sent = std::min(frame.sent, sizeof frame.header);
      if (header_sent < sizeof frame.header) {
        pieces[count++] = {reinterpret_cast<std::byte*>(&frame.header) + header_sent, sizeof frame.header - header_sent};
      }
      const std::size_t payload_sent = frame.sent - header_sent;
      if (payload_sent < frame.payload.size) {
        pieces[count++] = {const_cast<std::byte*>(frame.payload.data) + payload_sent, frame.payload.size - payload_sent};
      }
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EAGAIN) return false;
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category());
    }
    bytes_out += static_cast<std::uint64_t>(sent);
    account(static_cast<std::size_t>(sent));
  }
  return true;
}

void Connection::leave_place() {
  if (!std::exchange(placed_, false)) return;
  std::shared_ptr<std::byte> buffer = buffer_of(header_.payload_bytes);
  std::memcpy(buffer.get(), payload_.get(), payload_filled_);
  payload_ = std::move(buffer);
}

void Connection::drop_data(std::uint32_t group) {
  if (header_.group == group) leave_place();
  std::erase_if(kept_, [&](const Kept& each) { return each.frame.header.group == group && carries_data(each.frame.header.type); });
  std::deque<Outgoing> kept;
  for (Outgoing& frame : out_) {
    if (frame.header.group == group && carries_data(frame.header.type)) {
      if (frame.sent == 0) {
        queued_bytes_ -= sizeof frame.header + frame.payload.size;
        continue;
      }
      frame.payload = copy_of(frame.payload);
    }
    kept.push_back(std::move(frame));
  }
  out_.swap(kept);
}

void Connection::account(std::size_t sent) {
  queued_bytes_ -= sent;
  while (sent > 0) {
    Outgoing& frame = out_.front();
    const std::size_t whole = sizeof frame.header + frame.payload.size;
    const std::size_t part = std::min(sent, whole - frame.sent);
    frame.sent += part;
    sent -= part;
    if (frame.sent != whole) continue;
    whole_bytes_ += whole;
    if (keeps_) kept_.push_back({{frame.header, copy_of(frame.payload)}, whole_bytes_});
    out_.pop_front();
  }
}

// What is in the kernel is no more than a send buffer: a copy lets go of the caller's memory as soon as it is written.
Payload Connection::copy_of(const Payload& payload) {
  const auto copy = pool_.take(payload.size);
  if (payload.size) std::memcpy(copy.get(), payload.data, payload.size);
  return {copy.get(), payload.size, copy, payload.crc, payload.has_crc};
}

std::size_t Connection::bytes_in_kernel() const {
  int bytes = 0;
  ioctl(fd_, SIOCOUTQ, &bytes);
  return static_cast<std::size_t>(bytes);
}

void Connection::trim() {
  if (kept_.empty()) return;
  const std::uint64_t acknowledged = bytes_out - bytes_in_kernel();
  while (!kept_.empty() && kept_.front().end <= acknowledged) kept_.pop_front();
}

std::vector<Connection::Outgoing> Connection::take_unacknowledged() {
  trim();
  std::vector<Outgoing> frames;
  for (Kept& each : kept_) frames.push_back(std::move(each.frame));
  for (Outgoing& each : out_) frames.push_back(std::move(each));
  kept_.clear();
  out_.clear();
  queued_bytes_ = 0;
  return frames;
}

}  // namespace shoal
