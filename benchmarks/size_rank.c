/* One rank of benchmarks/size.py: RANK SIZE ADDRESS. Prints its port, reads "HOST ADDRESS PORT PID" of every rank, connects,
 * sums once and prints "done"; it ends with its input. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shoal.h"

#define COUNT 65536
#define DEADLINE_S 600.0

static void require(shoal_status status) {
  if (status == SHOAL_SUCCESS) return;
  fprintf(stderr, "%s\n", shoal_last_error());
  exit(1);
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int rank = atoi(argv[1]), size = atoi(argv[2]);
  const shoal_group_options options = {.struct_size = sizeof options, .rank = rank, .size = size, .name = "size",
                                       .secret = "a secret of 16 bytes", .secret_bytes = 20, .address = argv[3],
                                       .protection = 1};
  shoal_group* group = NULL;
  require(shoal_group_create(&options, &group));
  printf("%d\n", shoal_group_port(group));
  fflush(stdout);

  shoal_peer* peers = calloc((size_t)size, sizeof *peers);
  char(*words)[2][32] = calloc((size_t)size, sizeof *words);
  for (int k = 0; k < size; ++k) {
    if (scanf("%31s %31s %d %d", words[k][0], words[k][1], &peers[k].port, &peers[k].pid) != 4) return 2;
    peers[k].host = words[k][0];
    peers[k].address = words[k][1];
    peers[k].global_rank = k;
  }
  char segment[64];
  snprintf(segment, sizeof segment, "shoal-size-%d", peers[0].pid);
  const shoal_members members = {.struct_size = sizeof members, .peers = peers, .num_peers = (size_t)size, .segment = segment};
  require(shoal_group_connect(group, &members, DEADLINE_S));

  float* numbers = malloc(COUNT * sizeof *numbers);
  for (int k = 0; k < COUNT; ++k) numbers[k] = (float)(rank % 8);
  const shoal_operation sum = {.struct_size = sizeof sum, .kind = SHOAL_ALL_REDUCE, .dtype = SHOAL_FLOAT32, .count = COUNT,
                               .input = numbers, .output = numbers, .timeout_s = DEADLINE_S};
  shoal_handle handle;
  require(shoal_submit(group, &sum, 1, &handle));
  require(shoal_wait(group, handle, -1));
  float total = 0;
  for (int k = 0; k < size; ++k) total += (float)(k % 8);
  for (int k = 0; k < COUNT; ++k) {
    if (numbers[k] != total) return 3;
  }
  printf("done\n");
  fflush(stdout);
  while (getchar() != EOF) {
  }
  require(shoal_group_close(group));
  shoal_group_release(group);
  return 0;
}
