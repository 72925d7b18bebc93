// libshoal_mpi.so: the part of MPI that XLA's collectives for CPUs call, on groups of shoal.
//
// jaxlib contains MPItrampoline, which opens the library that MPITRAMPOLINE_LIB names and looks up the symbols of its
// MPI ABI 2.9 there. XLA calls a dozen of the functions (xla/backends/cpu/collectives/mpi_communicator.cc); the others
// are defined because MPItrampoline ends the process where one is missing. A communicator is a group that Python makes
// (shoal.jax.collectives), since only Python knows the job's store.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "c_api/shoal.h"

namespace {

constexpr int most_error_bytes = 1000;  // MPI_MAX_ERROR_STRING is 1024
constexpr int failure = 1;
constexpr double no_limit = -1;

// Makes the group of a communicator: number of the split in this process, color, key; then the group (NULL for one rank
// alone), the rank and the size. With number -1 it says those of all processes. Returns 0, or 1 with a message.
using Connect = int (*)(int number, int color, int key, shoal_group** group, int* rank, int* size, char* message,
                        int message_bytes);

constexpr int of_all_processes = -1;

struct Settings {
  double timeout_s = 0;
  Connect connect = nullptr;
  int splits = 0;
};
Settings settings;

struct Communicator {
  shoal_group* group = nullptr;
  int rank = 0;
  int size = 1;
  std::string error;
};

struct Request {
  shoal_group* group;
  shoal_handle handle;
};

thread_local std::string last_error;

int fail(std::string message) {
  last_error = std::move(message);
  return failure;
}

int status_of(shoal_status status) { return status == SHOAL_SUCCESS ? 0 : fail(shoal_last_error()); }

}  // namespace

extern "C" {

#define CONSTANT(name, value) SHOAL_API std::uintptr_t name[2] = {value};
#define MISSING(name)                                                                             \
  SHOAL_API int name() {                                                                          \
    std::fprintf(stderr, "shoal: JAX has called " #name ", which shoal does not have; report it\n"); \
    std::abort();                                                                                 \
  }
#include "mpi_abi/names.inc"

SHOAL_API int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 11, mpiwrapper_version_patch = 1;
SHOAL_API int mpiabi_version_major = 2, mpiabi_version_minor = 9, mpiabi_version_patch = 0;
SHOAL_API void mpiwrapper_export_fortran_constants_() {}

}

namespace {

struct ElementType {
  shoal_dtype dtype;
  std::uint64_t bytes;  // of one element of MPI's type
  std::uint64_t parts;  // elements of `dtype` in it
  bool sums;
  bool orders;  // min, max and prod
};

bool find_type(std::uintptr_t type, ElementType* found) {
  const struct {
    std::uintptr_t type;
    ElementType element;
  } known[] = {
      {MPIABI_FLOAT[0], {SHOAL_FLOAT32, 4, 1, true, true}},
      {MPIABI_DOUBLE[0], {SHOAL_FLOAT64, 8, 1, true, true}},
      {MPIABI_INT8_T[0], {SHOAL_INT8, 1, 1, true, true}},
      {MPIABI_UINT8_T[0], {SHOAL_UINT8, 1, 1, true, true}},
      {MPIABI_BYTE[0], {SHOAL_UINT8, 1, 1, true, true}},
      {MPIABI_INT32_T[0], {SHOAL_INT32, 4, 1, true, true}},
      {MPIABI_INT64_T[0], {SHOAL_INT64, 8, 1, true, true}},
      {MPIABI_UINT32_T[0], {SHOAL_INT32, 4, 1, true, false}},
      {MPIABI_UINT64_T[0], {SHOAL_INT64, 8, 1, true, false}},
      {MPIABI_C_COMPLEX[0], {SHOAL_FLOAT32, 8, 2, true, false}},
      {MPIABI_C_DOUBLE_COMPLEX[0], {SHOAL_FLOAT64, 16, 2, true, false}},
      {MPIABI_INT16_T[0], {SHOAL_UINT8, 2, 2, false, false}},
      {MPIABI_UINT16_T[0], {SHOAL_UINT8, 2, 2, false, false}},
  };
  for (const auto& each : known) {
    if (each.type != type) continue;
    *found = each.element;
    return true;
  }
  return false;
}

shoal_operation operation_of(shoal_kind kind, shoal_dtype dtype, std::uint64_t count, const void* input, void* output) {
  shoal_operation operation{};
  operation.struct_size = sizeof operation;
  operation.kind = kind;
  operation.dtype = dtype;
  operation.count = count;
  operation.input = input;
  operation.output = output;
  operation.timeout_s = settings.timeout_s;
  return operation;
}

Communicator* communicator_of(std::uintptr_t handle) { return reinterpret_cast<Communicator*>(handle); }

std::unique_ptr<Communicator> communicator_from(int number, int color, int key) {
  auto made = std::make_unique<Communicator>();
  char message[4096] = "shoal.jax.use_collectives() was not called in this process";
  if (settings.connect == nullptr ||
      settings.connect(number, color, key, &made->group, &made->rank, &made->size, message, sizeof message)) {
    made->error = message;
    std::fprintf(stderr, "shoal: %s\n", message);
  }
  return made;
}

// Runs a collective to its end.
int run(shoal_kind kind, const void* input, void* output, std::uint64_t count, std::uintptr_t mpi_type,
        std::uintptr_t reduction, std::uintptr_t handle) {
  const Communicator& communicator = *communicator_of(handle);
  if (!communicator.error.empty()) return fail(communicator.error);
  ElementType type;
  if (!find_type(mpi_type, &type)) return fail("shoal cannot send arrays of this dtype; convert them");
  if (communicator.group == nullptr) {
    if (input != output && count) std::memcpy(output, input, count * type.bytes);
    return 0;
  }
  shoal_operation operation = operation_of(kind, type.dtype, count * type.parts, input, output);
  if (kind != SHOAL_ALL_GATHER) {
    const bool sums = reduction == MPIABI_SUM[0];
    if (!(sums ? type.sums : type.orders)) {
      return fail("shoal does not reduce arrays of this dtype so (int16 and uint16 at all; min, max and prod of "
                  "uint32, uint64 and complex numbers); convert them to float32 or int32");
    }
    operation.reduction = sums                           ? SHOAL_SUM
                          : reduction == MPIABI_PROD[0] ? SHOAL_PROD
                          : reduction == MPIABI_MIN[0]  ? SHOAL_MIN
                                                        : SHOAL_MAX;
  }
  shoal_handle number = SHOAL_NO_HANDLE;
  if (const int failed = status_of(shoal_submit(communicator.group, &operation, 1, &number))) return failed;
  return status_of(shoal_wait(communicator.group, number, no_limit));
}

// Begins a message of bytes; the request is freed by MPIABI_Wait.
int begin_message(shoal_kind kind, const void* input, void* output, int count, std::uintptr_t mpi_type, int other,
                  int tag, std::uintptr_t handle, std::uintptr_t* request) {
  const Communicator& communicator = *communicator_of(handle);
  if (!communicator.error.empty()) return fail(communicator.error);
  ElementType type;
  if (!find_type(mpi_type, &type)) return fail("shoal cannot send arrays of this dtype; convert them");
  shoal_operation operation =
      operation_of(kind, SHOAL_UINT8, static_cast<std::uint64_t>(count) * type.bytes, input, output);
  operation.root = other;
  operation.tag = tag;
  auto made = std::make_unique<Request>(Request{communicator.group, SHOAL_NO_HANDLE});
  if (const int failed = status_of(shoal_submit(communicator.group, &operation, 1, &made->handle))) return failed;
  *request = reinterpret_cast<std::uintptr_t>(made.release());
  return 0;
}

}  // namespace

extern "C" {

// Sets the limit of each operation, and the function that makes groups. Called once, before jaxlib is loaded.
SHOAL_API void shoal_mpi_configure(double timeout_s, Connect connect) {
  settings.timeout_s = timeout_s;
  settings.connect = connect;
}

// ---- the process ---------------------------------------------------------------------------------------

SHOAL_API int MPIABI_Init_thread(int*, char***, int, int* provided) {
  *provided = static_cast<int>(MPIABI_THREAD_MULTIPLE[0]);
  return 0;
}
SHOAL_API int MPIABI_Init(int*, char***) { return 0; }
SHOAL_API int MPIABI_Initialized(int* flag) {
  *flag = 1;
  return 0;
}
SHOAL_API int MPIABI_Finalized(int* flag) {
  *flag = 0;
  return 0;
}
SHOAL_API int MPIABI_Finalize() { return 0; }
SHOAL_API int MPIABI_Query_thread(int* provided) {
  *provided = static_cast<int>(MPIABI_THREAD_MULTIPLE[0]);
  return 0;
}
// XLA refuses to make a communicator in another thread than MPI's main one. Groups have no such thread.
SHOAL_API int MPIABI_Is_thread_main(int* flag) {
  *flag = 1;
  return 0;
}
SHOAL_API int MPIABI_Get_version(int* version, int* subversion) {
  *version = 3;
  *subversion = 1;
  return 0;
}
SHOAL_API int MPIABI_Get_library_version(char* text, int* length) {
  std::strcpy(text, "shoal");
  *length = 5;
  return 0;
}
SHOAL_API int MPIABI_Error_string(int, char* text, int* length) {
  *length = std::min(static_cast<int>(last_error.size()), most_error_bytes);
  std::memcpy(text, last_error.data(), static_cast<std::size_t>(*length));
  text[*length] = '\0';
  return 0;
}

// ---- communicators -------------------------------------------------------------------------------------

// XLA does not look at the result: a communicator that could not be made says so when it is used.
SHOAL_API int MPIABI_Comm_split(std::uintptr_t, int color, int key, std::uintptr_t* made) {
  *made = reinterpret_cast<std::uintptr_t>(communicator_from(settings.splits++, color, key).release());
  return 0;
}
// Python closes the group: other ranks may still need what this one has sent.
SHOAL_API int MPIABI_Comm_free(std::uintptr_t* handle) {
  const std::unique_ptr<Communicator> communicator(communicator_of(*handle));
  shoal_group_release(communicator->group);
  *handle = MPIABI_COMM_NULL[0];
  return 0;
}
SHOAL_API int MPIABI_Comm_rank(std::uintptr_t handle, int* rank) {
  *rank = handle == MPIABI_COMM_WORLD[0] ? communicator_from(of_all_processes, 0, 0)->rank
                                         : communicator_of(handle)->rank;
  return 0;
}
SHOAL_API int MPIABI_Comm_size(std::uintptr_t handle, int* size) {
  *size = handle == MPIABI_COMM_WORLD[0] ? communicator_from(of_all_processes, 0, 0)->size
                                         : communicator_of(handle)->size;
  return 0;
}

// ---- collectives and messages --------------------------------------------------------------------------

SHOAL_API int MPIABI_Allreduce(const void* input, void* output, int count, std::uintptr_t type,
                               std::uintptr_t reduction, std::uintptr_t communicator) {
  return run(SHOAL_ALL_REDUCE, input, output, static_cast<std::uint64_t>(count), type, reduction, communicator);
}
SHOAL_API int MPIABI_Allgather(const void* input, int count, std::uintptr_t type, void* output, int, std::uintptr_t,
                               std::uintptr_t communicator) {
  return run(SHOAL_ALL_GATHER, input, output, static_cast<std::uint64_t>(count), type, 0, communicator);
}
// XLA gives all ranks the same count.
SHOAL_API int MPIABI_Reduce_scatter(const void* input, void* output, const int* counts, std::uintptr_t type,
                                    std::uintptr_t reduction, std::uintptr_t communicator) {
  return run(SHOAL_REDUCE_SCATTER, input, output, static_cast<std::uint64_t>(counts[0]), type, reduction,
             communicator);
}
SHOAL_API int MPIABI_Isend(const void* input, int count, std::uintptr_t type, int to, int tag,
                           std::uintptr_t communicator, std::uintptr_t* request) {
  return begin_message(SHOAL_SEND, input, nullptr, count, type, to, tag, communicator, request);
}
SHOAL_API int MPIABI_Irecv(void* output, int count, std::uintptr_t type, int from, int tag,
                           std::uintptr_t communicator, std::uintptr_t* request) {
  return begin_message(SHOAL_RECV, nullptr, output, count, type, from, tag, communicator, request);
}
SHOAL_API int MPIABI_Wait(std::uintptr_t* handle, void*) {
  const std::unique_ptr<Request> request(reinterpret_cast<Request*>(*handle));
  *handle = MPIABI_REQUEST_NULL[0];
  return status_of(shoal_wait(request->group, request->handle, no_limit));
}
SHOAL_API int MPIABI_Sendrecv(const void* input, int send_count, std::uintptr_t send_type, int to, int send_tag,
                              void* output, int receive_count, std::uintptr_t receive_type, int from, int receive_tag,
                              std::uintptr_t communicator, void* status) {
  std::uintptr_t receive = 0;
  std::uintptr_t send = 0;
  if (const int failed = MPIABI_Irecv(output, receive_count, receive_type, from, receive_tag, communicator, &receive)) {
    return failed;
  }
  const int not_sent = MPIABI_Isend(input, send_count, send_type, to, send_tag, communicator, &send);
  if (not_sent) {  // the group has failed, and so the receive ends
    const std::string reason = last_error;
    MPIABI_Wait(&receive, status);
    return fail(reason);
  }
  const int not_done = MPIABI_Wait(&send, status);
  const int not_received = MPIABI_Wait(&receive, status);
  return not_done ? not_done : not_received;
}

}
