// libnccl.so.2: communicators without peers, and collectives that are only logged. `bytes` is the size of the
// full tensor: an all-gather's output, a reduce-scatter's input.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "core.h"

struct UniqueId {
  char data[128];
};
struct Communicator {
  int size, rank, number;
};
static const int BYTES_OF[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // by ncclDataType_t

static Communicator* make(int size, int rank) {
  static std::atomic<int> made{0};
  Communicator* c = (Communicator*)malloc(sizeof(Communicator));
  *c = {size, rank, made++};
  fake_log("communicator", nullptr, "%d\tsize %d\trank %d", c->number, size, rank);
  return c;
}
static thread_local int depth = 0, group = 0;  // of calls; nested ones are one
static int log_collective(const char* op, size_t elements, int type, const Communicator* c, void* stream) {
  if (int error = fake_expect(op, stream, fake_device())) return error;
  size_t bytes = elements * BYTES_OF[type];
  fake_log("nccl", stream, "%s\t%d\t%d\t%zu\t%d", op, c->number, c->size, bytes, group);
  return 0;
}

extern "C" {
int ncclGetVersion(int* version) {
  *version = 22907;
  return 0;
}
int ncclGetUniqueId(UniqueId* id) {
  memset(id, 7, sizeof *id);
  return 0;
}
int ncclCommInitRank(Communicator** c, int size, UniqueId, int rank) {
  *c = make(size, rank);
  return 0;
}
int ncclCommInitRankConfig(Communicator** c, int size, UniqueId, int rank, void*) {
  *c = make(size, rank);
  return 0;
}
int ncclCommInitRankScalable(Communicator** c, int size, int rank, int, UniqueId*, void*) {
  *c = make(size, rank);
  return 0;
}
int ncclCommCount(Communicator* c, int* size) {
  *size = c->size;
  return 0;
}
int ncclCommUserRank(Communicator* c, int* rank) {
  *rank = c->rank;
  return 0;
}
int ncclCommGetAsyncError(Communicator*, int* error) {
  *error = 0;
  return 0;
}
int ncclCommDestroy(Communicator*) { return 0; }
int ncclCommAbort(Communicator*) { return 0; }
int ncclCommFinalize(Communicator*) { return 0; }
int ncclCommRegister(Communicator*, void*, size_t, void** handle) {
  *handle = (void*)1;
  return 0;
}
int ncclCommDeregister(Communicator*, void*) { return 0; }
int ncclGroupStart() {
  static std::atomic<int> begun{0};
  if (depth++ == 0) group = ++begun;
  return 0;
}
int ncclGroupEnd() {
  depth--;
  return 0;
}
const char* ncclGetErrorString(int) { return "a fake NCCL's result"; }
const char* ncclGetLastError(Communicator*) { return ""; }
int ncclRedOpCreatePreMulSum(int* op, void*, int, int, Communicator*) {
  *op = 5;
  return 0;
}
int ncclRedOpDestroy(int, Communicator*) { return 0; }

int ncclAllGather(const void*, void*, size_t each, int type, Communicator* c, void* stream) {
  return log_collective("all_gather", each * c->size, type, c, stream);
}
int ncclReduceScatter(const void*, void*, size_t each, int type, int, Communicator* c, void* stream) {
  return log_collective("reduce_scatter", each * c->size, type, c, stream);
}
int ncclAllReduce(const void*, void*, size_t count, int type, int, Communicator* c, void* stream) {
  return log_collective("all_reduce", count, type, c, stream);
}
int ncclBroadcast(const void*, void*, size_t count, int type, int, Communicator* c, void* stream) {
  return log_collective("broadcast", count, type, c, stream);
}
int ncclReduce(const void*, void*, size_t count, int type, int, int, Communicator* c, void* stream) {
  return log_collective("reduce", count, type, c, stream);
}
int ncclSend(const void*, size_t count, int type, int, Communicator* c, void* stream) {
  return log_collective("send", count, type, c, stream);
}
int ncclRecv(void*, size_t count, int type, int, Communicator* c, void* stream) {
  return log_collective("recv", count, type, c, stream);
}
int ncclAlltoAll(const void*, void*, size_t each, int type, Communicator* c, void* stream) {
  return log_collective("all_to_all", each * c->size, type, c, stream);
}
}
