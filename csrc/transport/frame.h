// What travels between two processes: a header of fixed size and a payload, each with its own checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace shoal {

enum class FrameType : std::uint8_t {
  push,         // a contribution to a chunk, to its server
  result,       // a chunk's result, or (empty) that the contribution has been used
  supply,       // a result from a worker that has it already, to the server that stands in for a lost one
  heartbeat,    // how far this rank is
  order,        // from rank 0: chunks of `seq` before `chunk` go next; signature = number of the run
  server_down,  // a helper is lost: chunk = its index
  announce,     // payload: what this rank asks for at `seq`
  mismatch,         // two contributions at `seq` did not agree: announce yours
  fail,         // payload: why the group has failed
  goodbye,      // this rank leaves the group in order
  fabric,       // payload: where libfabric reaches this process; between transports only
};

// Little-endian on the wire, as on every machine that we run on.
struct FrameHeader {
  std::uint32_t magic = 0;
  FrameType type = FrameType::heartbeat;
  std::uint8_t kind = 0;     // Kind
  std::uint8_t element = 0;  // of the result
  std::uint8_t input = 0;    // of the contribution
  std::uint8_t combine = 0;
  std::uint8_t redo = 0;     // 1: pushed again after its server was lost
  std::uint16_t host = 0;    // index of the contributing host
  std::uint16_t needed = 0;  // contributions that make the chunk complete
  std::uint16_t divisor = 1;
  std::int32_t root = -1;
  std::uint64_t seq = 0;
  std::uint64_t chunk = 0;
  std::uint64_t signature = 0;
  std::uint64_t submitted = 0;  // operations that the sender has begun
  std::uint64_t completed = 0;  // operations that have ended at the sender (from a helper: at every rank)
  std::uint32_t payload_bytes = 0;
  std::uint32_t payload_crc = 0;
  std::uint32_t server = 0;
  std::uint32_t header_crc = 0;  // of all bytes before it
};
static_assert(sizeof(FrameHeader) == 80);

inline constexpr std::uint32_t kFrameMagic = 0x314c4853;  // "SHL1"
inline constexpr std::size_t kMaxPayload = std::size_t{16} << 20;

// Bytes that somebody owns: the user's tensor, a pooled buffer, or the result that goes to many peers.
struct Payload {
  const std::byte* data = nullptr;
  std::size_t size = 0;
  std::shared_ptr<const void> owner;
  std::uint32_t crc = 0;
  bool has_crc = false;
};

// Whether the payload holds elements; the other frames are small and hold text.
inline bool carries_data(FrameType type) {
  return type == FrameType::push || type == FrameType::result || type == FrameType::supply;
}

void set_checksums(FrameHeader& header, Payload& payload);

// An empty string, or what is wrong with the header.
std::string check_header(const FrameHeader& header);

Payload payload_of(const std::string& text);
std::string text_of(const Payload& payload);

// A pool of buffers, so that a chunk does not fault in fresh pages each time. Any thread.
class BufferPool {
 public:
  // Uninitialised memory, given back to the pool when the last owner lets go.
  std::shared_ptr<std::byte[]> take(std::size_t size);

  BufferPool();

 private:
  struct Shelves;
  std::shared_ptr<Shelves> shelves_;
};

}  // namespace shoal
