// A TCP connection after its handshake: reads and writes frames without blocking.
//
// One thread reads and writes it. It holds the NetworkLock while it asks for a place and passes on a frame, and not
// while it copies from and to the socket and computes tags. Holders of the NetworkLock on other threads queue
// frames, take back what they have queued, and take away the place of a frame that is arriving: for that they wait until
// the copy under way has ended. Locks are taken in the order NetworkLock, reading_ or writing_, queue_.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "transport/frame.h"
#include "transport/transport.h"

namespace shoal {

class Connection {
 public:
  // What the connections of a transport share.
  struct Shared {
    NetworkLock network;
    BufferPool pool;
    std::atomic<std::uint64_t> bytes_sent{0}, bytes_received{0}, frames_received{0};
    // A thread may write an answer where another one has read what was sent. The peer has put the one before the other;
    // this counter says so in terms of the language.
    std::atomic<std::uint64_t> num_writes{0};
  };
  struct Outgoing {
    FrameHeader header;
    Payload payload;
    std::size_t sent = 0;  // bytes of header and payload
    bool sealed = false;   // has its tags, and its place in the stream
    Payload plain = {};    // the payload before it was encrypted, if it may have to be sent again
  };
  // What protects the frames of both directions.
  struct Seals {
    Seal sends, receives;
  };

  // Watches the socket for writability by this epoll instance while frames wait; none: -1.
  Connection(int fd, int peer, bool control, Shared& shared, int epoll_fd = -1, Seals seals = {});
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return fd_; }
  int peer() const { return peer_; }
  bool control() const { return control_; }

  // Reads available bytes, up to a fair share or no more than `most`, and passes on each complete frame. Returns false at
  // the end of the stream. Throws std::system_error for a failed socket and std::runtime_error for a malformed frame.
  bool read(Sink& sink, std::optional<std::size_t> most = {}) EXCLUDES(network_thread);
  // The same, of all that is available.
  bool read_all(Sink& sink) REQUIRES(network_thread);

  void enqueue(const FrameHeader& header, Payload payload) REQUIRES(network_thread);
  // Writes until the socket would block. Returns true when the queue is empty. Throws std::system_error.
  bool write();

  // Releases the memory of a group's callers: drops its frames with data, and copies those that are sealed.
  void drop_data(std::uint32_t group) REQUIRES(network_thread);
  // Neither reads nor writes any more, and holds no memory of callers.
  void end() REQUIRES(network_thread);
  bool ended() const { return ended_; }

  // Keeps a copy of each frame until the peer's kernel has acknowledged it.
  void keep_unacknowledged();
  // Removes and returns the frames that the peer may not have, in their order.
  std::vector<Outgoing> take_unacknowledged() REQUIRES(network_thread);

  // Where the stream will end when all that is queued is written; bytes up to such a mark that the peer's kernel has
  // not acknowledged.
  std::uint64_t mark() const REQUIRES(network_thread);
  std::size_t unacknowledged_bytes(std::uint64_t mark) REQUIRES(network_thread);
  std::size_t bytes_in_kernel() const;  // written, and not acknowledged

  // The Sink does not admit the next frame: the socket is not watched for what it has to read.
  bool stalled() const { return stalled_; }
  // Asks the Sink again with the next read. Not where the peer has hung up: what it has sent is in the kernel already.
  void resume(bool hung_up = false) EXCLUDES(writing_);

  std::size_t queued_bytes() const { return queued_bytes_; }
  std::size_t arriving_bytes() const { return arriving_bytes_; }  // room for a payload that is not whole yet
  std::atomic<std::uint64_t> bytes_in{0}, bytes_out{0}, frames_in{0};
  std::size_t path = 0;  // number of the interface
  std::size_t loop = 0;  // number of the thread
  std::atomic<int> job{0};  // of the peer; 0: of none
  std::uint64_t frames_at_tick = 0;  // frames_in at the last tick

 private:
  struct Received {
    bool waits = false;    // bytes to be passed on
    bool drained = false;  // the socket is empty
    bool closed = false;
    std::size_t bytes = 0;
  };
  static constexpr std::size_t kMostFrames = 16;  // of one system call
  struct Kept {
    Outgoing frame;
    std::uint64_t end;  // of the frame in the stream
  };

  Received receive(std::size_t most) EXCLUDES(reading_);
  void take_staged(Sink& sink) REQUIRES(network_thread) EXCLUDES(reading_);
  bool take_one(Sink& sink) REQUIRES(network_thread) EXCLUDES(reading_);
  // The header has come, and its payload has no memory yet.
  bool awaits_place() const REQUIRES(reading_) { return header_filled_ == sizeof header_ && !payload_ && !whole_; }
  void open_payload() REQUIRES(reading_);
  void seal(Outgoing& frame) REQUIRES(writing_);
  void leave_place() REQUIRES(reading_);
  std::size_t pick(std::array<Outgoing*, kMostFrames>& frames) REQUIRES(writing_) EXCLUDES(queue_);
  void account(std::size_t sent) REQUIRES(writing_) EXCLUDES(queue_);
  void stall() REQUIRES(network_thread) EXCLUDES(writing_);
  void watch(bool writable, bool readable) REQUIRES(writing_);
  Payload copy_of(const Payload& payload);
  void trim() REQUIRES(writing_);

  const int fd_;
  const int peer_;
  const bool control_;
  Shared& shared_;
  const int epoll_fd_;
  std::atomic<bool> ended_{false};  // set with the NetworkLock, reading_ and writing_
  std::atomic<bool> stalled_{false};  // set with writing_
  std::atomic<bool> hung_up_{false};
  std::atomic<std::size_t> arriving_bytes_{0};

  Mutex reading_;
  const std::size_t staged_bytes_;  // of a control connection few: there are many, and frames are small
  const std::unique_ptr<std::byte[]> staged_;  // a read often returns the next header, or many small frames; with reading_
  std::size_t staged_begin_ GUARDED_BY(reading_) = 0, staged_end_ GUARDED_BY(reading_) = 0;
  FrameHeader header_ GUARDED_BY(reading_);
  std::size_t header_filled_ GUARDED_BY(reading_) = 0;
  std::shared_ptr<std::byte> payload_ GUARDED_BY(reading_);
  bool placed_ GUARDED_BY(reading_) = false;  // payload_ is its place, not a buffer of the pool
  std::size_t payload_filled_ GUARDED_BY(reading_) = 0;
  std::optional<Payload> whole_ GUARDED_BY(reading_);  // has been received, and matches its tag
  Seal receives_ GUARDED_BY(reading_);

  Mutex writing_;
  bool writable_ GUARDED_BY(writing_) = false, readable_ GUARDED_BY(writing_) = true;  // watched for
  bool keeps_ GUARDED_BY(writing_) = false;
  Seal sends_ GUARDED_BY(writing_);
  std::deque<Kept> kept_ GUARDED_BY(writing_);
  std::uint64_t whole_bytes_ GUARDED_BY(writing_) = 0;  // of frames that are written

  mutable Mutex queue_;
  std::deque<Outgoing> out_ GUARDED_BY(queue_);  // frames are removed with writing_ too: a writer refers to them
  std::atomic<std::size_t> queued_bytes_{0};
};

}  // namespace shoal
