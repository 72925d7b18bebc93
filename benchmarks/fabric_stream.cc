// Processor time of a stream of messages from one process to another on this machine: over a socket, and over libfabric.
//
//   g++ -std=c++20 -O2 benchmarks/fabric_stream.cc -lfabric -o fabric_stream && ./fabric_stream
//
// Each message is copied into registered memory and out of it, as shoal's transport does, and nothing else is done: no
// checksums, no sums. 16 messages are in flight. They go to the peer's receives (fi_send), or to its memory with an
// immediate number (fi_writedata), where slots are written again before they are read: only time counts. Settings of
// ofi_rxm are shoal's (csrc/transport/libfabric.cc). Prints seconds of processor time for each GB, of both processes
// together, medians of 7 by turns.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr std::size_t kTotal = 400 << 20, kInFlight = 16, kHeader = 64;
constexpr int kRepeats = 7;

void require(long result, const char* what) {
  if (result >= 0) return;
  std::fprintf(stderr, "%s: %s\n", what, result > -4096 ? fi_strerror(static_cast<int>(-result)) : "failed");
  std::exit(1);
}

double processor_s() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + 1e-6 * static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

void put(int to, const void* data, std::size_t bytes) { require(write(to, data, bytes) == static_cast<ssize_t>(bytes) ? 0 : -1, "write"); }
void get(int from, void* data, std::size_t bytes) { require(recv(from, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes) ? 0 : -1, "recv"); }

// Runs `side` in two processes that a pair of sockets connects; returns the sum of what both return.
template <class Side>
double both(Side side) {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), "socketpair");
  const pid_t child = fork();
  const double mine = side(child == 0, ends[child == 0]);
  if (child == 0) {
    put(ends[1], &mine, sizeof mine);
    _exit(0);
  }
  double other = 0;
  get(ends[0], &other, sizeof other);
  waitpid(child, nullptr, 0);
  close(ends[0]), close(ends[1]);
  return mine + other;
}

// ---- a socket: one system call for a message, from the tensor and to it ----------------------------------

double over_socket(bool sends, int control, std::size_t bytes) {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof at;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (sends) {
    get(control, &at.sin_port, sizeof at.sin_port);
    require(connect(fd, reinterpret_cast<sockaddr*>(&at), length), "connect");
  } else {
    require(bind(fd, reinterpret_cast<sockaddr*>(&at), length), "bind");
    require(listen(fd, 1), "listen");
    getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length);
    put(control, &at.sin_port, sizeof at.sin_port);
    fd = accept(fd, nullptr, nullptr);
  }
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  std::vector<char> tensor(bytes * kInFlight, 1), header(kHeader, 1);
  const double begin = processor_s();
  for (std::size_t k = 0; k < kTotal / bytes; ++k) {
    std::array<iovec, 2> parts{iovec{header.data(), kHeader}, iovec{tensor.data() + k % kInFlight * bytes, bytes}};
    for (std::size_t left = bytes + kHeader; left > 0;) {
      const ssize_t moved = sends ? writev(fd, parts.data(), 2) : readv(fd, parts.data(), 2);
      require(moved > 0 ? 0 : -1, "the stream");
      std::size_t done = static_cast<std::size_t>(moved);
      left -= done;
      for (iovec& part : parts) {
        const std::size_t here = std::min(done, part.iov_len);
        part = {static_cast<char*>(part.iov_base) + here, part.iov_len - here};
        done -= here;
      }
    }
  }
  return processor_s() - begin;
}

// ---- libfabric -------------------------------------------------------------------------------------------

struct Endpoint {
  fi_info* info = nullptr;
  fid_fabric* fabric = nullptr;
  fid_domain* domain = nullptr;
  fid_cq* queue = nullptr;
  fid_av* peers = nullptr;
  fid_ep* endpoint = nullptr;
  fi_addr_t peer = 0;
  int fd = -1;

  Endpoint(const char* provider, int control) {
    fi_info* hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    hints->fabric_attr->prov_name = strdup(provider);
    require(fi_getinfo(FI_VERSION(1, 9), "127.0.0.1", nullptr, FI_SOURCE, hints, &info), "fi_getinfo");
    while (info && std::strcmp(info->fabric_attr->prov_name, provider) != 0) info = info->next;
    require(info ? 0 : -1, provider);
    require(fi_fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
    require(fi_domain(fabric, info, &domain, nullptr), "fi_domain");
    fi_cq_attr of_queue{};
    of_queue.size = 1024;
    of_queue.format = FI_CQ_FORMAT_DATA;
    of_queue.wait_obj = FI_WAIT_FD;
    require(fi_cq_open(domain, &of_queue, &queue, nullptr), "fi_cq_open");
    require(fi_control(&queue->fid, FI_GETWAIT, &fd), "FI_GETWAIT");
    fi_av_attr of_peers{};
    of_peers.type = FI_AV_TABLE;
    require(fi_av_open(domain, &of_peers, &peers, nullptr), "fi_av_open");
    require(fi_endpoint(domain, info, &endpoint, nullptr), "fi_endpoint");
    require(fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    require(fi_ep_bind(endpoint, &peers->fid, 0), "fi_ep_bind");
    require(fi_enable(endpoint), "fi_enable");
    std::array<char, 256> name{};
    std::size_t size = name.size();
    require(fi_getname(&endpoint->fid, name.data(), &size), "fi_getname");
    put(control, name.data(), name.size());
    get(control, name.data(), name.size());
    require(fi_av_insert(peers, name.data(), 1, &peer, 0, nullptr), "fi_av_insert");
  }

  // Reads completions, sleeping until there are some.
  std::size_t completions(std::array<fi_cq_data_entry, 64>& entries) {
    for (;;) {
      const long count = fi_cq_read(queue, entries.data(), entries.size());
      if (count > 0) return static_cast<std::size_t>(count);
      if (count != -FI_EAGAIN) require(count, "fi_cq_read");
      fid* waits[1] = {&queue->fid};
      pollfd ready{fd, POLLIN, 0};
      if (fi_trywait(fabric, waits, 1) == FI_SUCCESS) poll(&ready, 1, 100);
    }
  }
};

double over_fabric(bool sends, int control, std::size_t bytes, bool writes) {
  Endpoint on("tcp;ofi_rxm", control);
  const std::size_t slot = bytes + kHeader, count = kTotal / bytes;
  std::vector<char> memory(slot * kInFlight, 1), tensor(bytes * kInFlight, 1);
  fid_mr* registered = nullptr;
  require(fi_mr_reg(on.domain, memory.data(), memory.size(), FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE, 0, 0, 0, &registered, nullptr), "fi_mr_reg");
  void* const descriptor = fi_mr_desc(registered);
  const bool by_address = on.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
  std::array<std::uint64_t, 2> place{by_address ? reinterpret_cast<std::uint64_t>(memory.data()) : 0, fi_mr_key(registered)};
  put(control, place.data(), sizeof place);
  get(control, place.data(), sizeof place);
  std::vector<fi_context2> contexts(kInFlight);
  const auto data_of = [&](std::size_t k) { return memory.data() + k * slot; };
  const auto receive = [&](std::size_t k) { require(fi_recv(on.endpoint, data_of(k), slot, descriptor, FI_ADDR_UNSPEC, &contexts[k]), "fi_recv"); };
  for (std::size_t k = 0; !sends && !writes && k < kInFlight; ++k) receive(k);
  char go = 0;
  put(control, &go, 1);
  get(control, &go, 1);
  const double begin = processor_s();
  std::array<fi_cq_data_entry, 64> entries{};
  if (sends) {
    std::vector<std::size_t> free(kInFlight);
    for (std::size_t k = 0; k < kInFlight; ++k) free[k] = k;
    for (std::size_t posted = 0, done = 0; done < count;) {
      while (posted < count && !free.empty()) {
        const std::size_t k = free.back();
        std::memcpy(data_of(k) + kHeader, tensor.data() + k * bytes, bytes);
        const long result = writes ? fi_writedata(on.endpoint, data_of(k), slot, descriptor, k, on.peer, place[0] + k * slot, place[1], &contexts[k])
                                   : fi_send(on.endpoint, data_of(k), slot, descriptor, on.peer, &contexts[k]);
        if (result == -FI_EAGAIN) break;
        require(result, "sending");
        free.pop_back();
        ++posted;
      }
      if (posted == done) {  // the first message connects the endpoints
        fi_cq_read(on.queue, entries.data(), 0);
        continue;
      }
      const std::size_t ended = on.completions(entries);
      for (std::size_t k = 0; k < ended; ++k) free.push_back(static_cast<std::size_t>(static_cast<fi_context2*>(entries[k].op_context) - contexts.data()));
      done += ended;
    }
  } else {
    for (std::size_t done = 0; done < count;) {
      const std::size_t ended = on.completions(entries);
      for (std::size_t each = 0; each < ended; ++each) {
        const std::size_t k = writes ? entries[each].data : static_cast<std::size_t>(static_cast<fi_context2*>(entries[each].op_context) - contexts.data());
        std::memcpy(tensor.data() + k * bytes, data_of(k) + kHeader, bytes);
        if (!writes) receive(k);
      }
      done += ended;
    }
  }
  const double used = processor_s() - begin;
  put(control, &go, 1);  // nobody closes while the other one still waits
  get(control, &go, 1);
  return used;
}

}  // namespace

int main() {
  setenv("FI_OFI_RXM_MSG_RX_SIZE", "64", 0);
  setenv("FI_OFI_RXM_COMP_PER_PROGRESS", "64", 0);
  struct Case {
    const char* name;
    std::size_t bytes;
    bool fabric, writes, whole;
    std::vector<double> samples{};
  };
  constexpr std::size_t kKiB = 1024;
  std::vector<Case> cases{{"a socket", 32 * kKiB, false, false, false},
                          {"fi_send, by ofi_rxm's buffers", 32 * kKiB, true, false, true},
                          {"fi_send, by ofi_rxm's buffers", 128 * kKiB, true, false, true},
                          {"fi_send, by a handshake", 256 * kKiB, true, false, false},
                          {"fi_writedata", 32 * kKiB, true, true, false},
                          {"fi_writedata", 256 * kKiB, true, true, false}};
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (Case& each : cases) {
      setenv("FI_OFI_RXM_BUFFER_SIZE", std::to_string(each.whole ? each.bytes + 4 * kKiB : 36 * kKiB).c_str(), 1);
      const double used = both([&](bool sends, int control) {
        return each.fabric ? over_fabric(sends, control, each.bytes, each.writes) : over_socket(sends, control, each.bytes);
      });
      each.samples.push_back(used / (static_cast<double>(kTotal) / 1e9));
    }
  }
  for (Case& each : cases) {
    std::sort(each.samples.begin(), each.samples.end());
    std::printf("%-30s %4zu KiB  %.3f s a GB (%.3f to %.3f)\n", each.name, each.bytes / kKiB, each.samples[kRepeats / 2],
                each.samples.front(), each.samples.back());
  }
}
