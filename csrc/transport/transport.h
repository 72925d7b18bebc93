// The interface between the engine and the transports that carry its frames.
//
// A transport has its own thread. All its calls to the Sink, and all calls that the Sink makes in turn, are on that
// thread; only post() may be called from others.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "transport/frame.h"

namespace shoal {

// The identity that a connection claims.
struct Identity {
  std::string group;
  int rank = 0;
  int size = 0;
  int host = 0;       // index of the rank's host
  int num_hosts = 1;  // of the group
};

struct Introduction {
  Identity who;
  bool control = false;
};

class Sink {
 public:
  virtual ~Sink() = default;

  // Returns the peer of an inbound connection, or -1 to reject it with a reason.
  virtual int on_identity(const Identity& who, std::string& why_not) = 0;
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
  virtual void start() = 0;
  virtual void stop() = 0;

  // Called by the thread that connects the group, before or after start().
  virtual void set_peer(int peer, const std::string& address, int port) = 0;
  virtual void call_peer(int peer, const Introduction& me, double timeout_s) = 0;
  // Returns whether each peer has the number of connections in `wanted` within the timeout.
  virtual bool wait_for_connections(const std::vector<std::size_t>& wanted, double timeout_s) = 0;
  virtual std::size_t connections_of(int peer) = 0;  // established so far
  // Waits until everything queued has been received; returns false if there is no progress for `timeout_s`.
  virtual bool flush(double timeout_s) = 0;

  // Runs a task on the transport's thread. Any thread.
  virtual void post(std::function<void()> task) = 0;

  // All other methods are called on the transport's thread only.
  virtual void send(int peer, FrameHeader header, Payload payload) = 0;
  virtual void drop(int peer) = 0;
  // Drops all queued data, whose memory is about to be released. Control frames are still sent.
  virtual void drop_data() = 0;
  virtual std::map<std::string, std::uint64_t> counters() const = 0;
};

}  // namespace shoal
