// A TCP connection after its handshake: reads and writes frames without blocking.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace shoal {

class Connection {
 public:
  struct Outgoing {
    FrameHeader header;
    Payload payload;
    std::size_t sent = 0;  // bytes of header and payload
  };

  Connection(int fd, int peer, bool control, BufferPool& pool);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return fd_; }
  int peer() const { return peer_; }
  bool control() const { return control_; }

  // Reads available bytes, up to a fair share, and passes on each complete frame. Returns false at the end of the
  // stream. Throws std::system_error for a failed socket and std::runtime_error for a malformed frame.
  bool read(Sink& sink);

  void enqueue(const FrameHeader& header, Payload payload);  // with its checksums
  // Writes until the socket would block. Returns true when the queue is empty. Throws std::system_error.
  bool write();

  // Releases the memory of a group's callers: drops its whole frames with data, and copies one that is partly sent.
  void drop_data(std::uint32_t group);
  // Receives the rest of a frame that is under way into a buffer instead of its place.
  void leave_place();

  // Keeps a copy of each frame until the peer's kernel has acknowledged it.
  void keep_unacknowledged() { keeps_ = true; }
  // Removes and returns the frames that the peer may not have, in their order.
  std::vector<Outgoing> take_unacknowledged();
  std::size_t bytes_in_kernel() const;  // written, and not acknowledged

  std::size_t queued_bytes() const { return queued_bytes_; }
  std::uint64_t bytes_in = 0, bytes_out = 0, frames_in = 0;
  bool watched = false;  // for writability
  std::size_t path = 0;  // number of the interface

 private:
  bool take_staged(Sink& sink);
  std::shared_ptr<std::byte> buffer_of(std::size_t size);
  void finish_frame(Sink& sink);
  void account(std::size_t sent);
  Payload copy_of(const Payload& payload);

  int fd_;
  int peer_;
  bool control_;
  BufferPool& pool_;

  std::array<std::byte, 16384> staged_;  // a read often returns the next header, or many small frames
  std::size_t staged_begin_ = 0, staged_end_ = 0;
  FrameHeader header_;
  std::size_t header_filled_ = 0;
  std::shared_ptr<std::byte> payload_;
  bool placed_ = false;  // payload_ is its place, not a buffer of the pool
  std::size_t payload_filled_ = 0;

  struct Kept {
    Outgoing frame;
    std::uint64_t end;  // of the frame in the stream
  };

  void trim();

  std::deque<Outgoing> out_;
  std::size_t queued_bytes_ = 0;
  bool keeps_ = false;
  std::deque<Kept> kept_;
  std::uint64_t whole_bytes_ = 0;  // of frames that are written
};

}  // namespace shoal
