// The GIL for threads that may ask for it while the interpreter ends.
//
// Before 3.14, Python ends such a thread by unwinding it, which the first frame that must not throw, as a destructor, turns
// into the end of the process. Here the thread sleeps for good, as it does in 3.14.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace shoal {

[[noreturn]] inline void sleep_for_good() {
  while (true) ::pause();
}

// Holds the GIL, on any thread.
class WithGil {
 public:
  WithGil() noexcept {
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {
      sleep_for_good();
    }
  }
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Releases the GIL, which the calling thread holds.
class WithoutGil {
 public:
  WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      sleep_for_good();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace shoal
