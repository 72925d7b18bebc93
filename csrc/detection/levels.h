// A loop that the compiler vectorizes, compiled once per level. The body is an always-inlined function or lambda,
// which gets the instructions of the level's function that calls it. Every operation in it is one IEEE operation per
// element, so that all levels give the same bits.
#pragma once

#include "base/cpu.h"

namespace shoal {

#if defined(__x86_64__)
template <class Body>
[[gnu::target("avx2")]] void run_avx2(const Body& body) {
  body();
}
#endif

// body is a lambda with __attribute__((always_inline)): the standard attribute syntax has no place for it there.
template <class Body>
void run_at(Level level, const Body& body) {
#if defined(__x86_64__)
  // 16 lanes do not pay here: divisions take as long per lane as with 8.
  if (level != Level::portable) return run_avx2(body);
#endif
  (void)level;
  body();
}

}  // namespace shoal
