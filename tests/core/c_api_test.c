/* A program in C on libshoal.so: groups of one and of two ranks, each rank a thread. Exits with 1 at a failed check. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shoal.h"

/* Of CUDA's runtime (tests/fake_cuda). */
int cudaMalloc(void** memory, size_t bytes);
int cudaFree(void* memory);
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority);
int cudaStreamSynchronize(void* stream);
int cudaStreamDestroy(void* stream);

#define COUNT 1000
#define NUM_OPERATIONS 3
#define DEADLINE_S 30.0

#define CHECK(condition)                                                                       \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      fprintf(stderr, "%s:%d: %s is false: %s\n", __FILE__, __LINE__, #condition, shoal_last_error()); \
      exit(1);                                                                                 \
    }                                                                                          \
  } while (0)

static shoal_group_options options_of(int rank, int size) {
  return (shoal_group_options){.struct_size = sizeof(shoal_group_options), .rank = rank, .size = size, .name = "c",
                               .secret = "a secret of 16 bytes", .secret_bytes = 20, .protection = 2};
}

static shoal_operation all_reduce_of(const float* input, float* output) {
  return (shoal_operation){.struct_size = sizeof(shoal_operation), .kind = SHOAL_ALL_REDUCE, .count = COUNT,
                           .input = input, .output = output, .timeout_s = DEADLINE_S};
}

/* ---- a group of one ----------------------------------------------------------------------------------- */

struct calls {
  atomic_int num;
  shoal_handle handles[NUM_OPERATIONS];
  int num_failed;
};

static void note(void* context, shoal_handle handle, shoal_status status, const char* message) {
  struct calls* calls = context;
  const int k = atomic_load(&calls->num);
  calls->handles[k % NUM_OPERATIONS] = handle;
  calls->num_failed += status != SHOAL_SUCCESS || strcmp(message, "") != 0;
  atomic_store(&calls->num, k + 1);
}

static void count_all_reduces(void* context, const char* name, uint64_t value) {
  if (strcmp(name, "ops_all_reduce") == 0) *(uint64_t*)context = value;
}

static void test_one_rank(void) {
  const shoal_group_options options = options_of(0, 1);
  shoal_group* group = NULL;
  CHECK(shoal_group_create(&options, &group) == SHOAL_SUCCESS);
  CHECK(shoal_group_rank(group) == 0 && shoal_group_size(group) == 1 && shoal_group_port(group) == 0);
  float input[COUNT], output[COUNT] = {0};
  for (int i = 0; i < COUNT; ++i) input[i] = (float)i;
  struct calls calls = {0};
  shoal_operation operations[NUM_OPERATIONS];
  for (int k = 0; k < NUM_OPERATIONS; ++k) {
    operations[k] = all_reduce_of(input, output);
    operations[k].on_complete = note;
    operations[k].context = &calls;
  }
  shoal_handle handles[NUM_OPERATIONS];
  CHECK(shoal_submit(group, operations, NUM_OPERATIONS, handles) == SHOAL_SUCCESS);
  CHECK(handles[0] == 0 && handles[2] == 2 && shoal_test(group, handles[2]));
  CHECK(memcmp(input, output, sizeof input) == 0);
  uint64_t num_all_reduces = 0;
  CHECK(shoal_group_counters(group, count_all_reduces, &num_all_reduces) == SHOAL_SUCCESS && num_all_reduces == 3);

  /* the second of three is invalid: none has been submitted */
  operations[1].dtype = 99;
  CHECK(shoal_submit(group, operations, NUM_OPERATIONS, handles) == SHOAL_INVALID_ARGUMENT);
  CHECK(strcmp(shoal_last_error(), "the dtype is 99; it is 0 to 7 (see shoal.h)") == 0);
  for (int k = 0; k < NUM_OPERATIONS; ++k) CHECK(handles[k] == SHOAL_NO_HANDLE);
  operations[1].dtype = operations[0].dtype;
  operations[1].root = 1; /* found invalid by the group, not by the conversion */
  CHECK(shoal_submit(group, operations, NUM_OPERATIONS, handles) == SHOAL_INVALID_ARGUMENT);
  for (int k = 0; k < NUM_OPERATIONS; ++k) CHECK(handles[k] == SHOAL_NO_HANDLE);

  CHECK(shoal_group_close(group) == SHOAL_SUCCESS);
  CHECK(atomic_load(&calls.num) == 3 && calls.num_failed == 0); /* all, and in order */
  CHECK(calls.handles[0] == 0 && calls.handles[1] == 1 && calls.handles[2] == 2);
  CHECK(shoal_submit(group, operations, 1, handles) == SHOAL_GROUP_FAILED);
  CHECK(strstr(shoal_last_error(), "closed"));
  shoal_group_release(group);
}

/* A caller with an older, shorter structure, and one with a newer one. */
static void test_versions(void) {
  const shoal_group_options options = options_of(0, 1);
  shoal_group* group = NULL;
  CHECK(shoal_group_create(&options, &group) == SHOAL_SUCCESS);
  struct {
    size_t struct_size;
    int32_t kind, dtype, reduction, root;
    uint64_t count;
    const void* input;
    void* output;
  } old = {.struct_size = sizeof old, .count = 1};
  float in = 3, out = 0;
  old.input = &in;
  old.output = &out;
  CHECK(shoal_submit(group, (const shoal_operation*)(const void*)&old, 1, NULL) == SHOAL_SUCCESS && out == 3);
  struct {
    shoal_operation known;
    uint64_t added;
  } new_one = {.known = all_reduce_of(&in, &out)};
  new_one.known.struct_size = sizeof new_one;
  new_one.known.count = 1;
  CHECK(shoal_submit(group, &new_one.known, 1, NULL) == SHOAL_SUCCESS);
  new_one.added = 1;
  CHECK(shoal_submit(group, &new_one.known, 1, NULL) == SHOAL_INVALID_ARGUMENT);
  CHECK(strstr(shoal_last_error(), "update the library"));
  shoal_group_release(group);
  shoal_group_options unknown = options_of(0, 2);
  unknown.protection = 3;
  CHECK(shoal_group_create(&unknown, &group) == SHOAL_INVALID_ARGUMENT && strstr(shoal_last_error(), "protection is 3"));
  const shoal_group_options none = {0};
  CHECK(shoal_group_create(&none, &group) == SHOAL_INVALID_ARGUMENT && strstr(shoal_last_error(), "struct_size is 0"));
}

/* ---- two ranks ---------------------------------------------------------------------------------------- */

struct rank {
  int rank;
  shoal_group* group;
  const shoal_members* members;
  pthread_barrier_t* meet;
};

static void check_sums(struct rank* self) {
  float inputs[NUM_OPERATIONS][COUNT], outputs[NUM_OPERATIONS][COUNT];
  struct calls calls = {0};
  shoal_operation operations[NUM_OPERATIONS];
  shoal_handle handles[NUM_OPERATIONS];
  for (int k = 0; k < NUM_OPERATIONS; ++k) {
    for (int i = 0; i < COUNT; ++i) inputs[k][i] = (float)(i + 10 * k + self->rank);
    operations[k] = all_reduce_of(inputs[k], outputs[k]);
    operations[k].on_complete = note;
    operations[k].context = &calls;
  }
  if (self->rank == 0) { /* a list with an invalid one begins none: the numbers of both ranks still agree */
    operations[2].kind = SHOAL_BROADCAST;
    operations[2].root = 2;
    CHECK(shoal_submit(self->group, operations, NUM_OPERATIONS, handles) == SHOAL_INVALID_ARGUMENT);
    CHECK(handles[0] == SHOAL_NO_HANDLE);
    operations[2] = all_reduce_of(inputs[2], outputs[2]);
    operations[2].on_complete = note;
    operations[2].context = &calls;
  }
  operations[1].reduction = SHOAL_MAX;
  CHECK(shoal_submit(self->group, operations, NUM_OPERATIONS, handles) == SHOAL_SUCCESS);
  for (int k = NUM_OPERATIONS - 1; k >= 0; --k) {
    CHECK(shoal_wait(self->group, handles[k], DEADLINE_S) == SHOAL_SUCCESS && shoal_test(self->group, handles[k]));
    for (int i = 0; i < COUNT; ++i) {
      const int mine = i + 10 * k;
      CHECK(outputs[k][i] == (float)(k == 1 ? mine + 1 : 2 * mine + 1));
    }
  }
  while (atomic_load(&calls.num) < NUM_OPERATIONS) continue;
  CHECK(calls.num_failed == 0 && calls.handles[0] == 0 && calls.handles[1] == 1 && calls.handles[2] == 2);
}

/* A callback that comes after the submission, and one after the operation has completed. */
static void check_late_callbacks(struct rank* self) {
  float input[COUNT] = {1}, output[COUNT] = {0};
  struct calls calls = {0};
  const shoal_operation operation = all_reduce_of(input, output);
  shoal_handle handle;
  CHECK(shoal_submit(self->group, &operation, 1, &handle) == SHOAL_SUCCESS);
  CHECK(shoal_on_complete(self->group, handle, NULL, NULL) == SHOAL_INVALID_ARGUMENT);
  CHECK(shoal_on_complete(self->group, handle, note, &calls) == SHOAL_SUCCESS);
  while (atomic_load(&calls.num) < 1) continue;
  CHECK(output[0] == 2);
  CHECK(shoal_on_complete(self->group, handle, note, &calls) == SHOAL_SUCCESS);
  while (atomic_load(&calls.num) < 2) continue;
  CHECK(calls.num_failed == 0 && calls.handles[0] == handle && calls.handles[1] == handle);
}

struct chain {
  shoal_group* group;
  float input[COUNT], output[COUNT];
  atomic_int num;
};

/* Submits an operation and waits for it, which a callback of shoal_on_complete must not. */
static void go_on(void* context, shoal_handle handle, shoal_status status, const char* message) {
  struct chain* chain = context;
  (void)handle;
  CHECK(status == SHOAL_SUCCESS && strcmp(message, "") == 0);
  const shoal_operation operation = all_reduce_of(chain->input, chain->output);
  shoal_handle next;
  CHECK(shoal_submit(chain->group, &operation, 1, &next) == SHOAL_SUCCESS);
  CHECK(shoal_wait(chain->group, next, DEADLINE_S) == SHOAL_SUCCESS);
  atomic_fetch_add(&chain->num, 1);
}

static void submit_late(void* context, shoal_handle handle, shoal_status status, const char* message) {
  struct chain* chain = context;
  (void)handle, (void)status, (void)message;
  while (atomic_load(&chain->num) < 2) continue; /* until the program has submitted another one */
  const shoal_operation operation = all_reduce_of(chain->input, chain->output);
  CHECK(shoal_submit(chain->group, &operation, 1, NULL) == SHOAL_OUT_OF_ORDER);
  CHECK(strstr(shoal_last_error(), "a callback begins all_reduce"));
  atomic_fetch_add(&chain->num, 1);
}

static void check_then(struct rank* self) {
  struct chain chain = {.group = self->group, .input = {3}};
  float input[COUNT] = {1}, output[COUNT] = {0};
  const shoal_operation operation = all_reduce_of(input, output);
  shoal_handle handle;
  CHECK(shoal_submit(self->group, &operation, 1, &handle) == SHOAL_SUCCESS);
  CHECK(shoal_then(self->group, handle, NULL, NULL) == SHOAL_INVALID_ARGUMENT);
  CHECK(shoal_then(self->group, handle, go_on, &chain) == SHOAL_SUCCESS);
  while (atomic_load(&chain.num) < 1) continue;
  CHECK(output[0] == 2 && chain.output[0] == 6);
  CHECK(shoal_then(self->group, handle, submit_late, &chain) == SHOAL_SUCCESS);
  CHECK(shoal_submit(self->group, &operation, 1, &handle) == SHOAL_SUCCESS);
  atomic_fetch_add(&chain.num, 1);
  CHECK(shoal_wait(self->group, handle, DEADLINE_S) == SHOAL_SUCCESS);
  while (atomic_load(&chain.num) < 3) continue;
}

/* Each rank gives the other one more element than itself, then they send each other a message. */
static void check_messages(struct rank* self) {
  const int other = 1 - self->rank;
  int32_t given[5], taken[5] = {0}, own[2], source = -1, number = 7 + self->rank, received = 0;
  for (int i = 0; i < 5; ++i) given[i] = 10 * self->rank + i;
  memcpy(own, given, sizeof own);
  shoal_block inputs[2], outputs[2];
  inputs[self->rank] = (shoal_block){given, 2};
  inputs[other] = (shoal_block){given + 2, 3};
  outputs[self->rank] = (shoal_block){taken, 2};
  outputs[other] = (shoal_block){taken + 2, 3};
  const shoal_operation operations[3] = {
      {.struct_size = sizeof(shoal_operation), .kind = SHOAL_ALL_TO_ALL, .dtype = SHOAL_INT32, .count = 5,
       .timeout_s = DEADLINE_S, .inputs = inputs, .outputs = outputs},
      {.struct_size = sizeof(shoal_operation), .kind = SHOAL_SEND, .dtype = SHOAL_INT32, .count = 1, .root = other,
       .timeout_s = DEADLINE_S, .input = &number, .tag = 3},
      {.struct_size = sizeof(shoal_operation), .kind = SHOAL_RECV, .dtype = SHOAL_INT32, .count = 1, .root = -1,
       .timeout_s = DEADLINE_S, .output = &received, .tag = 3, .source = &source}};
  shoal_handle handles[3];
  CHECK(shoal_submit(self->group, operations, 3, handles) == SHOAL_SUCCESS);
  for (int k = 2; k >= 0; --k) CHECK(shoal_wait(self->group, handles[k], DEADLINE_S) == SHOAL_SUCCESS);
  CHECK(memcmp(taken, own, sizeof own) == 0 && taken[2] == 10 * other + 2 && taken[4] == 10 * other + 4);
  CHECK(source == other && received == 7 + other);
}

/* A receive that waits for its message does not hold back the callback of what was submitted after it. */
static void check_order_of_callbacks(struct rank* self) {
  struct calls calls = {0};
  int32_t number = 5, received = 0;
  shoal_operation operations[2] = {
      {.struct_size = sizeof(shoal_operation), .kind = SHOAL_RECV, .dtype = SHOAL_INT32, .count = 1, .root = 1,
       .timeout_s = DEADLINE_S, .output = &received, .on_complete = note, .context = &calls},
      {.struct_size = sizeof(shoal_operation), .kind = SHOAL_BARRIER, .timeout_s = DEADLINE_S, .on_complete = note,
       .context = &calls}};
  shoal_handle handles[2];
  if (self->rank == 0) {
    CHECK(shoal_submit(self->group, operations, 2, handles) == SHOAL_SUCCESS);
    while (atomic_load(&calls.num) < 1) continue;
    CHECK(calls.handles[0] == handles[1] && received == 0);
    pthread_barrier_wait(self->meet);
    while (atomic_load(&calls.num) < 2) continue;
    CHECK(calls.handles[1] == handles[0] && calls.num_failed == 0 && received == 5);
    return;
  }
  operations[0].kind = SHOAL_SEND;
  operations[0].root = 0;
  operations[0].input = &number;
  operations[0].output = NULL;
  operations[0].on_complete = operations[1].on_complete = NULL;
  CHECK(shoal_submit(self->group, &operations[1], 1, handles) == SHOAL_SUCCESS);
  pthread_barrier_wait(self->meet);
  CHECK(shoal_submit(self->group, operations, 1, handles) == SHOAL_SUCCESS);
  CHECK(shoal_wait(self->group, handles[0], DEADLINE_S) == SHOAL_SUCCESS);
}

static shoal_lane* lane_of(const char* runtime) {
  const shoal_lane_options options = {.struct_size = sizeof options, .runtime = runtime, .num_buffers = 2};
  shoal_lane* lane = NULL;
  CHECK(shoal_lane_create(&options, &lane) == (lane ? SHOAL_SUCCESS : SHOAL_SYSTEM_ERROR));
  return lane;
}

/* Memory of a device: sums of two tensors, copies without a group, and calls that have no effect. */
static void check_lane(struct rank* self) {
  CHECK(lane_of("libcudart.so.none") == NULL && strstr(shoal_last_error(), "'libcudart.so.none' is not loaded"));
  CHECK(shoal_lane_create(NULL, NULL) == SHOAL_INVALID_ARGUMENT);
  shoal_lane* const lane = lane_of("libfake_cudart.so");
  CHECK(lane != NULL);
  float *inputs[2], *outputs[2];
  void* stream;
  CHECK(cudaStreamCreateWithPriority(&stream, 0, 0) == 0);
  shoal_operation operations[2];
  for (int k = 0; k < 2; ++k) {
    CHECK(cudaMalloc((void**)&inputs[k], COUNT * sizeof(float)) == 0 && cudaMalloc((void**)&outputs[k], COUNT * sizeof(float)) == 0);
    for (int i = 0; i < COUNT; ++i) inputs[k][i] = (float)(i + 10 * k + self->rank);
    operations[k] = all_reduce_of(inputs[k], outputs[k]);
  }
  shoal_operation barrier = {.struct_size = sizeof barrier, .kind = SHOAL_BARRIER};
  CHECK(shoal_lane_run(lane, self->group, &barrier, 1, stream) == SHOAL_INVALID_ARGUMENT);
  barrier.on_complete = note;
  CHECK(shoal_lane_run(lane, self->group, &barrier, 1, stream) == SHOAL_INVALID_ARGUMENT && strstr(shoal_last_error(), "on_complete"));
  CHECK(shoal_lane_run(lane, self->group, operations, 2, stream) == SHOAL_SUCCESS && cudaStreamSynchronize(stream) == 0);
  for (int k = 0; k < 2; ++k) {
    for (int i = 0; i < COUNT; ++i) CHECK(outputs[k][i] == (float)(2 * (i + 10 * k) + 1));
  }
  CHECK(shoal_lane_run(lane, NULL, operations, 2, stream) == SHOAL_SUCCESS && cudaStreamSynchronize(stream) == 0);
  for (int k = 0; k < 2; ++k) CHECK(memcmp(inputs[k], outputs[k], COUNT * sizeof(float)) == 0);
  for (int k = 0; k < 2; ++k) CHECK(cudaFree(inputs[k]) == 0 && cudaFree(outputs[k]) == 0);
  shoal_lane_release(lane);
  CHECK(cudaStreamDestroy(stream) == 0);
}

static void check_failure(struct rank* self) {
  int64_t shape[2] = {5, 8 + self->rank};
  float tensor[45] = {0};
  shoal_operation other = all_reduce_of(tensor, tensor);
  other.count = 5 * (uint64_t)shape[1];
  other.num_dims = 2;
  other.shape = shape;
  shoal_handle handle;
  CHECK(shoal_submit(self->group, &other, 1, &handle) == SHOAL_SUCCESS);
  CHECK(shoal_wait(self->group, handle, DEADLINE_S) == SHOAL_GROUP_FAILED);
  CHECK(strstr(shoal_last_error(), "float32[5, 8]") && strstr(shoal_last_error(), "float32[5, 9]"));
}

static void* run_rank(void* given) {
  struct rank* self = given;
  CHECK(shoal_group_connect(self->group, self->members, DEADLINE_S) == SHOAL_SUCCESS);
  check_sums(self);
  check_late_callbacks(self);
  check_then(self);
  check_messages(self);
  check_order_of_callbacks(self);
  check_lane(self);
  /* rank 0 waits for an operation that rank 1 begins later */
  shoal_operation barrier = {.struct_size = sizeof barrier, .kind = SHOAL_BARRIER, .timeout_s = DEADLINE_S};
  shoal_handle handle;
  if (self->rank == 1) pthread_barrier_wait(self->meet);
  CHECK(shoal_submit(self->group, &barrier, 1, &handle) == SHOAL_SUCCESS);
  if (self->rank == 0) {
    CHECK(shoal_wait(self->group, handle, 0.01) == SHOAL_TIMED_OUT && !shoal_test(self->group, handle));
    pthread_barrier_wait(self->meet);
  }
  CHECK(shoal_wait(self->group, handle, -1) == SHOAL_SUCCESS);
  check_failure(self);
  CHECK(shoal_group_close(self->group) == SHOAL_SUCCESS);
  return NULL;
}

static void test_two_ranks(int num_hosts) {
  struct rank ranks[2];
  shoal_peer peers[2];
  char segment[64];
  pthread_barrier_t meet;
  CHECK(pthread_barrier_init(&meet, NULL, 2) == 0);
  snprintf(segment, sizeof segment, "c-api-test-%d-%p", num_hosts, (void*)&meet);
  const shoal_members members = {.struct_size = sizeof members, .peers = peers, .num_peers = 2, .segment = segment};
  for (int rank = 0; rank < 2; ++rank) {
    const shoal_group_options options = options_of(rank, 2);
    ranks[rank] = (struct rank){.rank = rank, .members = &members, .meet = &meet};
    CHECK(shoal_group_create(&options, &ranks[rank].group) == SHOAL_SUCCESS);
    peers[rank] = (shoal_peer){.host = rank && num_hosts == 2 ? "b" : "a", .address = "127.0.0.1",
                               .port = shoal_group_port(ranks[rank].group), .global_rank = rank};
  }
  pthread_t threads[2];
  for (int rank = 0; rank < 2; ++rank) CHECK(pthread_create(&threads[rank], NULL, run_rank, &ranks[rank]) == 0);
  for (int rank = 0; rank < 2; ++rank) CHECK(pthread_join(threads[rank], NULL) == 0);
  for (int rank = 0; rank < 2; ++rank) shoal_group_release(ranks[rank].group);
  pthread_barrier_destroy(&meet);
}

int main(void) {
  CHECK(shoal_api_version() == SHOAL_API_VERSION);
  CHECK(strcmp(shoal_last_error(), "") == 0);
  test_one_rank();
  test_versions();
  test_two_ranks(1);
  test_two_ranks(2);
  puts("the C interface: all passed");
  return 0;
}
