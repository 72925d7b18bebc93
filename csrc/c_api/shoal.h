/* The C interface of shoal: collectives of a group of processes on memory of the host, and on memory of CUDA devices
 * through the host.
 *
 * A program links libshoal.so, or opens it with dlopen, and needs no other header of shoal. A process has one copy of
 * the library, which Python's `shoal` package uses too. The life of a group:
 *
 *     shoal_group_options options = {.struct_size = sizeof options, .rank = rank, .size = size, .name = "job",
 *                                    .secret = secret, .secret_bytes = sizeof secret, .address = "10.0.0.7"};
 *     shoal_group* group;
 *     if (shoal_group_create(&options, &group) != SHOAL_SUCCESS) die(shoal_last_error());
 *     shoal_group_connect(group, &members, 60.0);              // every rank's address, exchanged by the program
 *
 *     shoal_operation sum = {.struct_size = sizeof sum, .kind = SHOAL_ALL_REDUCE, .dtype = SHOAL_FLOAT32,
 *                            .count = n, .input = gradient, .output = gradient};
 *     shoal_handle handle;
 *     shoal_submit(group, &sum, 1, &handle);                   // returns at once
 *     if (shoal_wait(group, handle, -1) != SHOAL_SUCCESS) die(shoal_last_error());
 *
 *     shoal_group_close(group);
 *     shoal_group_release(group);
 *
 * Rules for all functions:
 *   - Every rank of a group submits the same operations in the same order. Ranks that do not get SHOAL_GROUP_FAILED
 *     with a message that names both operations.
 *   - Functions may be called by any thread, and none calls exit or throws.
 *   - Structures begin with struct_size, set to sizeof by the caller, so that later versions can add fields at the end.
 *     A field that is zero has its default.
 *   - Times are in seconds. A group does not survive fork(): the child may only call exec or exit.
 */
#ifndef SHOAL_H
#define SHOAL_H

#include <stddef.h>
#include <stdint.h>

#define SHOAL_API __attribute__((visibility("default")))

/* Incremented when a function or a field is added. */
#define SHOAL_API_VERSION 5

#ifdef __cplusplus
extern "C" {
#endif

/* ---- results ------------------------------------------------------------------------------------------ */

typedef enum shoal_status {
  SHOAL_SUCCESS = 0,
  SHOAL_TIMED_OUT = 1,         /* shoal_wait: the operation is still pending */
  SHOAL_INVALID_ARGUMENT = 2,  /* the call has had no effect */
  SHOAL_GROUP_FAILED = 3,      /* a rank was lost or differs, a deadline passed, or the group was aborted or closed */
  SHOAL_SYSTEM_ERROR = 4,      /* memory, a socket, or a rank that could not be reached while connecting */
  SHOAL_OUT_OF_ORDER = 5       /* shoal_submit in a function of shoal_then: the program has submitted others since */
} shoal_status;

/* Returns the message of the last call of this thread that did not succeed, for users: it names the rank and the
 * remedy. Valid until the thread's next call that does not succeed. Never NULL. */
SHOAL_API const char* shoal_last_error(void);

/* Returns the SHOAL_API_VERSION of the library. */
SHOAL_API int shoal_api_version(void);

/* ---- groups ------------------------------------------------------------------------------------------- */

/* One rank's membership in a group. Counts references; shoal_group_create returns the first one. */
typedef struct shoal_group shoal_group;

typedef struct shoal_group_options {
  size_t struct_size;
  int32_t rank;
  int32_t size;              /* a group of 1 opens no socket and completes operations at once */
  const char* name;          /* of the group, the same on all ranks */
  const void* secret;        /* shared by the ranks, which prove that they know it; not sent */
  size_t secret_bytes;
  const char* address;       /* IPv4 address to listen at; several: "10.0.0.7,10.1.0.7"; NULL: 127.0.0.1 */
  const char* fabric;        /* libfabric's providers, one per rail, separated by commas; NULL: TCP */
  uint64_t chunk_bytes;      /* largest message between hosts, a multiple of 128 */
  uint64_t shared_chunk_bytes; /* largest chunk inside a host, a multiple of 128 */
  int32_t connections_per_peer;
  double peer_grace_s;       /* silence after which a host counts as lost */
  int32_t protection;        /* of messages between processes: 0: checksums, 1: tags (GMAC), 2: encryption (AES-GCM) */
} shoal_group_options;

/* Starts listening. The caller owns *group and releases it. */
SHOAL_API shoal_status shoal_group_create(const shoal_group_options* options, shoal_group** group);

/* Returns the TCP port at which the group listens; 0 for a group of 1. */
SHOAL_API int shoal_group_port(const shoal_group* group);
SHOAL_API int shoal_group_rank(const shoal_group* group);
SHOAL_API int shoal_group_size(const shoal_group* group);

typedef struct shoal_peer {
  const char* host;    /* ranks with the same string share memory */
  const char* address; /* IPv4, as in its options */
  int32_t port;
  int32_t global_rank; /* for messages */
  int32_t pid;         /* for messages; with address and port it names the process in all its groups */
} shoal_peer;

typedef struct shoal_helper {
  const char* address;
  int32_t port;
  const char* name;
} shoal_helper;

typedef struct shoal_members {
  size_t struct_size;
  const shoal_peer* peers;     /* one per rank, in rank order */
  size_t num_peers;
  const shoal_helper* helpers; /* servers on helper hosts, in the same order on all ranks */
  size_t num_helpers;
  const int32_t* pattern;      /* servers of successive chunks, repeated: ranks first, then helpers; NULL: each once */
  size_t pattern_length;
  const char* segment;         /* name for shared memory, unique to the group and the same on all ranks */
} shoal_members;

/* Connects to all ranks and helpers; called once, by all ranks, before the first operation. Returns
 * SHOAL_SYSTEM_ERROR with the rank that did not come in `timeout_s`. */
SHOAL_API shoal_status shoal_group_connect(shoal_group* group, const shoal_members* members, double timeout_s);

/* Fails all pending operations here and on all other ranks, with `reason` in their messages. */
SHOAL_API shoal_status shoal_group_abort(shoal_group* group, const char* reason);

/* Leaves the group, once. Pending operations fail; when it returns, the library uses none of the caller's memory and
 * every callback has returned, except one that has called it. Other ranks fail only if they wait for this one. */
SHOAL_API shoal_status shoal_group_close(shoal_group* group);

/* Adds a reference and returns the group. */
SHOAL_API shoal_group* shoal_group_retain(shoal_group* group);

/* Drops a reference. The last one of a group that shoal_group_create made closes it. NULL is ignored. */
SHOAL_API void shoal_group_release(shoal_group* group);

/* Calls visit(context, name, value) for each counter: bytes, frames, and operations by kind, since the creation. */
SHOAL_API shoal_status shoal_group_counters(shoal_group* group,
                                            void (*visit)(void* context, const char* name, uint64_t value),
                                            void* context);

/* ---- operations --------------------------------------------------------------------------------------- */

typedef enum shoal_kind {
  SHOAL_ALL_REDUCE = 0,
  SHOAL_REDUCE = 1,
  SHOAL_BROADCAST = 2,
  SHOAL_ALL_GATHER = 3,
  SHOAL_REDUCE_SCATTER = 4,
  SHOAL_BARRIER = 5,
  SHOAL_DELEGATED = 6, /* moves no data: takes a number in the group's order for an operation that runs elsewhere */
  SHOAL_ALL_TO_ALL = 7,
  SHOAL_GATHER = 8,
  SHOAL_SCATTER = 9,
  SHOAL_SEND = 10, /* SHOAL_SEND and SHOAL_RECV concern two ranks only: the others do not submit them. Messages of */
  SHOAL_RECV = 11  /* one tag from one rank to another arrive in the order in which they were submitted. */
} shoal_kind;

typedef enum shoal_dtype {
  SHOAL_FLOAT32 = 0,
  SHOAL_FLOAT64 = 1,
  SHOAL_FLOAT16 = 2,
  SHOAL_BFLOAT16 = 3,
  SHOAL_INT8 = 4,
  SHOAL_UINT8 = 5,
  SHOAL_INT32 = 6,
  SHOAL_INT64 = 7
} shoal_dtype;

typedef enum shoal_reduction {
  SHOAL_SUM = 0,
  SHOAL_AVG = 1, /* of floating-point numbers */
  SHOAL_PROD = 2,
  SHOAL_MIN = 3,
  SHOAL_MAX = 4,
  SHOAL_BAND = 5, /* the bitwise ones: of integers */
  SHOAL_BOR = 6,
  SHOAL_BXOR = 7
} shoal_reduction;

/* Number of an operation in its group: 0, 1, 2, ...; a message has a number of its own, above 2^63. */
typedef uint64_t shoal_handle;
#define SHOAL_NO_HANDLE UINT64_MAX

/* Called once per operation when it has completed or failed, in the order in which they do, by a thread of the group.
 * `message` is that of shoal_last_error, "" on success, and valid during the call. It may submit operations. It must
 * not wait for one, and must not drop the last reference to the group. */
typedef void (*shoal_callback)(void* context, shoal_handle handle, shoal_status status, const char* message);

/* The elements that a rank exchanges with another one. */
typedef struct shoal_block {
  void* data;
  uint64_t count;
} shoal_block;

typedef struct shoal_operation {
  size_t struct_size;
  int32_t kind;          /* shoal_kind */
  int32_t dtype;         /* shoal_dtype */
  int32_t reduction;     /* shoal_reduction; of all_reduce, reduce and reduce_scatter */
  int32_t root;          /* source of a broadcast or scatter, destination of a reduce or gather; the other rank of a
                            message, -1 to receive from any */
  uint64_t count;        /* elements of the tensor; of the input of all_gather, of the output of reduce_scatter */
  const void* input;     /* stays valid and unchanged until the operation has completed; */
  void* output;          /* so does this; it may equal input, or this rank's own part of the larger one */
  double timeout_s;      /* from the submission; 0: none */
  int32_t priority;      /* of an all_reduce; 0: in the order of submission; else higher ones are sent first */
  uint32_t num_dims;     /* length of `shape`; 0: one dimension of `count` elements */
  const int64_t* shape;  /* for messages; copied */
  const char* name;      /* of a delegated operation, the same on all ranks; copied */
  shoal_callback on_complete; /* NULL: none */
  void* context;         /* passed to on_complete */
  const shoal_block* inputs;  /* one per rank, of any size; of an all_to_all, and of the root of a scatter */
  const shoal_block* outputs; /* of an all_to_all, and of the root of a gather; both copied */
  int32_t tag;           /* of a message: a receive takes those of its tag */
  int32_t* source;       /* of a receive: where the rank is written that has sent; may be NULL */
} shoal_operation;

/* Begins operations, all or none, and writes their handles. Never waits for other ranks. The operations of one call
 * are sent together, so give those that are ready in one call.
 *
 * All operations have the struct_size of the first one. If the call does not succeed, none has begun, and all handles
 * are SHOAL_NO_HANDLE. `handles` may be NULL. */
SHOAL_API shoal_status shoal_submit(shoal_group* group, const shoal_operation* operations, size_t num_operations,
                                    shoal_handle* handles);

/* Waits until an operation has completed, at most `timeout_s` (negative: no limit). Returns SHOAL_TIMED_OUT if it is
 * still pending, which sets no message, or SHOAL_GROUP_FAILED if it failed. May be called any number of times. */
SHOAL_API shoal_status shoal_wait(shoal_group* group, shoal_handle handle, double timeout_s);

/* Returns 1 if the operation has completed or failed, which shoal_wait then tells without waiting; else 0. */
SHOAL_API int shoal_test(shoal_group* group, shoal_handle handle);

/* Gives an operation that was submitted without on_complete a callback. If it has completed already, the callback is
 * the group's next one. */
SHOAL_API shoal_status shoal_on_complete(shoal_group* group, shoal_handle handle, shoal_callback on_complete,
                                         void* context);

/* As shoal_on_complete, in the order of the operations instead of that in which they end, and `then` may wait for
 * operations: while it waits, other threads of the group call later functions. It may submit collectives unless the
 * program has submitted others since it called this function, in an order that ranks may not share. A group that is
 * closed calls what is left, with SHOAL_TIMED_OUT for what is pending. The group lives until `then` has returned. */
SHOAL_API shoal_status shoal_then(shoal_group* group, shoal_handle handle, shoal_callback then, void* context);

/* Completes a delegated operation on this rank. */
SHOAL_API shoal_status shoal_finish_delegated(shoal_group* group, shoal_handle handle);

/* ---- memory of a CUDA device -------------------------------------------------------------------------- */

/* Two threads, two streams and pinned buffers, through which tensors of one device pass on their way to groups and back. */
typedef struct shoal_lane shoal_lane;

typedef struct shoal_lane_options {
  size_t struct_size;
  const char* runtime;   /* CUDA's runtime library, which the process has loaded: "libcudart.so.13", or its path */
  int32_t device;
  uint32_t num_buffers;  /* 0: 8 */
  uint64_t buffer_bytes; /* the same on all ranks; 0: 4 MiB. Tensors are cut into parts of a quarter, of 1 MiB at least */
} shoal_lane_options;

/* The caller owns *lane and releases it. */
SHOAL_API shoal_status shoal_lane_create(const shoal_lane_options* options, shoal_lane** lane);

/* Runs operations on memory of the lane's device as work of a stream (cudaStream_t): they begin after what the stream has
 * been given, and what it gets later finds the results. Returns once they have ended on the host; the stream may still
 * copy results. All ranks call it for the same operations, which are submitted in parts: no rank may use shoal_submit.
 *
 * For all_reduce, reduce, broadcast, all_gather and reduce_scatter; on_complete is NULL. A broadcast leaves the root's
 * input in its output. Without a group (NULL) each operation is a copy, as in a group of one rank. Returns what shoal_wait
 * would, or SHOAL_SYSTEM_ERROR with the call of CUDA that failed. */
SHOAL_API shoal_status shoal_lane_run(shoal_lane* lane, shoal_group* group, const shoal_operation* operations,
                                      size_t num_operations, void* stream);

/* Ends a lane that nobody uses. It keeps the groups' connections open until then. NULL is ignored. */
SHOAL_API void shoal_lane_release(shoal_lane* lane);

#ifdef __cplusplus
}
#endif

#endif /* SHOAL_H */
