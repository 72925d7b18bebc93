// The one interface between the engine and whatever carries its frames.
//
// A transport owns a thread. Everything that it calls in the Sink, and everything that the Sink calls back,
// happens on that thread; only post() may be called from others.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "transport/frame.h"

namespace shoal {

// Who a connection says that it is.
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

  // Which peer an inbound connection belongs to, or -1 to refuse it and why.
  virtual int on_identity(const Identity& who, std::string& why_not) = 0;
  virtual void on_frame(int peer, const FrameHeader& header, Payload payload) = 0;
  // The peer is gone: its connections ended or its kernel no longer answers.
  virtual void on_down(int peer, const std::string& why) = 0;
  // A few times a second.
  virtual void on_tick() = 0;
  // A task that was posted has thrown: a defect of this process.
  virtual void on_error(const std::string& what) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // It listens as soon as it is made.
  virtual int port() const = 0;
  virtual void start() = 0;
  virtual void stop() = 0;

  // From the thread that sets the group up, before or after start().
  virtual void set_peer(int peer, const std::string& address, int port) = 0;
  virtual void call_peer(int peer, const Introduction& me, double timeout_s) = 0;
  // Whether each peer has as many connections as `wanted` within the time.
  virtual bool wait_for_connections(const std::vector<std::size_t>& wanted, double timeout_s) = 0;
  virtual std::size_t connections_of(int peer) = 0;  // made so far
  // Sends what waits until it has arrived; false when nothing moves for so long.
  virtual bool flush(double timeout_s) = 0;

  // Runs a task on the transport's thread. Any thread.
  virtual void post(std::function<void()> task) = 0;

  // The rest on the transport's own thread only.
  virtual void send(int peer, FrameHeader header, Payload payload) = 0;
  virtual void drop(int peer) = 0;
  // Forgets all data that waits to be sent: its memory is about to go. Control frames still travel.
  virtual void drop_data() = 0;
  virtual std::map<std::string, std::uint64_t> counters() const = 0;
};

}  // namespace shoal
