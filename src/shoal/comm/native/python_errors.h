// Raises errors of the group as the Python exceptions that shoal/comm raises.
#pragma once

#include <shoal.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

namespace shoal_torch {

inline bool python_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// Releases the GIL where the calling thread holds it: callers in C++ may.
class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

[[noreturn]] inline void raise(const char* module, const char* type, const std::string& message) {
  if (python_is_ending()) throw std::runtime_error(message);
  const py::gil_scoped_acquire gil;
  PyErr_SetString(py::module_::import(module).attr(type).ptr(), message.c_str());
  throw py::error_already_set();
}

[[noreturn]] inline void raise_comm_error(const std::string& message) {
  raise("shoal.comm.engine", "CommError", message);
}

[[noreturn]] inline void raise_usage_error(const std::string& message) {
  raise("shoal.errors", "UsageError", message);
}

// Raises the error of a call of the C interface.
[[noreturn]] inline void raise_status(shoal_status status, const std::string& message) {
  if (status == SHOAL_GROUP_FAILED) raise_comm_error(message);
  if (status == SHOAL_INVALID_ARGUMENT) raise("builtins", "ValueError", message);
  throw std::runtime_error(message);
}

}  // namespace shoal_torch
