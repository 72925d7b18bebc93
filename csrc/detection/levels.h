// A loop that the compiler vectorises by itself, compiled once a level. The body is an always-inlined function
// or lambda; inside a function of a level it gets that level's instructions. Every operation in it is one IEEE
// operation of each element, so that all levels give the same bits.
#pragma once

#include "base/cpu.h"

namespace shoal {

#if defined(__x86_64__)
template <class Body>
[[gnu::target("avx2")]] void run_avx2(const Body& body) {
  body();
}
#endif

// body is a lambda with __attribute__((always_inline)): the standard has no place for its own form there.
template <class Body>
void run_at(Level level, const Body& body) {
#if defined(__x86_64__)
  // 16 lanes do not pay here: the divisions take as long a lane as with 8.
  if (level != Level::portable) return run_avx2(body);
#endif
  (void)level;
  body();
}

}  // namespace shoal
