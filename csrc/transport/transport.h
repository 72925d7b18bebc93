// The interface between the process's connections and the transports that carry their frames.
//
// A transport has threads of its own. They hold its NetworkLock in all calls to the Sink, one at a time, and so in all
// calls that the Sink makes in turn; only post() may be called from other threads. Peers are processes, numbered by the
// Sink.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "transport/frame.h"

namespace shoal {

// A process's introduction on a connection.
struct Introduction {
  std::string name;  // Place::name
  bool control = false;
  bool knocks = false;  // it asks to be called, and hangs up
  std::string from = {};  // the address that it comes from
  PublicKey key = {};     // the process has proved that it has the private one
  Protection protection = Protection::checksum;  // of the frames of both directions
};

class Sink {
 public:
  virtual ~Sink() = default;

  // Returns the peer of an inbound connection, or -1 to reject it with a reason; without one, nobody is told. Where it
  // knocks, the peer is not connected by it.
  virtual int on_introduction(const Introduction& who, std::string& why_not) = 0;
  // A further connection of the peer stands; its libfabric addresses count as one.
  virtual void on_connected(int peer) = 0;
  // Returns where to write the payload of a frame that begins to arrive: payload_bytes that stay valid while the
  // pointer is held, and that may be written although the frame is never completed. Null: into a buffer.
  virtual std::shared_ptr<std::byte> place_for(int, const FrameHeader&) { return nullptr; }
  // Whether there is memory for a frame that begins to arrive over TCP. If not, the connection is not read any further
  // before Transport::resume().
  virtual bool admits(int, const FrameHeader&) { return true; }
  virtual void on_frame(int peer, const FrameHeader& header, Payload payload) = 0;
  // The peer is lost: its connections ended or its kernel no longer responds.
  virtual void on_down(int peer, const std::string& why) = 0;
  // Called a few times per second.
  virtual void on_tick() = 0;
  // A posted task has thrown: a bug in this process.
  virtual void on_error(const std::string& what) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // A transport listens on construction.
  virtual int port() const = 0;
  virtual const PublicKey& public_key() const = 0;
  virtual void start() = 0;
  virtual void stop() = 0;

  // Where a peer listens, and its key, if it is known. Connects to it, once, unless `stopped` is set meanwhile. Any thread,
  // but the second one of the transport's own.
  virtual void set_peer(int peer, const std::string& address, int port, const PublicKey& key) = 0;
  virtual void call_peer(int peer, const Introduction& me, double timeout_s, const std::atomic<bool>* stopped = nullptr) = 0;
  // Waits until these peers have received all that is queued for them now; returns false if there is no progress for
  // `timeout_s`. Any thread without the NetworkLock.
  virtual bool flush(const std::vector<int>& peers, double timeout_s) = 0;

  // Runs a task with the NetworkLock. Any thread.
  virtual void post(std::function<void()> task) = 0;

  // All other methods are called with the NetworkLock only, which the first one asserts.
  virtual void assert_here() const ASSERT_CAPABILITY(network_thread) = 0;
  virtual void send(int peer, FrameHeader header, Payload payload) = 0;
  virtual void drop(int peer) = 0;
  // Asks Sink::admits() again for the frames of a peer that wait for it.
  virtual void resume(int peer) = 0;
  // The peers of each job: in a round of reading, each job has the same part, whatever its number of connections.
  virtual void share(const std::vector<std::vector<int>>& jobs) = 0;
  // Bytes of a peer's frames that are arriving, and of those that are queued for it.
  virtual std::size_t held_bytes(int peer) const = 0;
  // Where frames are received.
  virtual BufferPool& pool() = 0;
  // Drops a group's queued data for a peer, or for all (-1), whose memory is about to be released. Its other frames are
  // still sent.
  virtual void drop_data(std::uint32_t group, int peer) = 0;
  // Hands the kernel what it takes of the control frames queued by now, before the loop does so. A connection that
  // fails meanwhile ends later, in the loop.
  virtual void write_queued() = 0;
  // Any thread.
  virtual std::map<std::string, std::uint64_t> counters() const = 0;
};

}  // namespace shoal
