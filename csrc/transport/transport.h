// The one interface between the engine and whatever carries its frames.
//
// A transport owns a thread. Everything that it calls in the Sink, and everything that the Sink calls back,
// happens on that thread; only post() may be called from others.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "transport/frame.h"

namespace shoal {

// Who a connection says that it is.
struct Identity {
  std::string group;
  int rank = 0;
  int size = 0;
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
};

class Transport {
 public:
  virtual ~Transport() = default;

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
