// What reads bytes of other processes, as one target of a fuzzer. The first byte of an input chooses the part: frames,
// sum server, served weights, handshake, a rank. Whatever follows: a result, or the error that the part promises.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuzz {

// Aborts with a line on a broken promise. Other findings are a sanitizer's, and exceptions that come out.
void run(const std::uint8_t* data, std::size_t size);

}  // namespace fuzz
