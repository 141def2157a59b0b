// libcupti.so.13: the functions that torch's profiler calls. Every line of the log becomes the records that
// CUPTI would create: the call on the host, the operator around it, and the kernel or copy on its stream.
// Times on the device are made up: 1,000 ticks of the profiler's clock each, one after the other. The names of
// the kernels of NVIDIA's libraries are made up in their style.
#include <cupti.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core.h"

static const uint64_t KERNEL_TICKS = 1000;
static const uint32_t DEFAULT_STREAM = 7;  // as CUPTI numbers it
static std::recursive_mutex lock;
typedef std::lock_guard<std::recursive_mutex> Guard;
static std::set<int> enabled;  // kinds of activity
static uint8_t* buffer;        // the caller's buffer that is being filled
static size_t buffer_size, buffer_used;
static std::set<std::string> names;              // records hold pointers to these names
static std::map<uint32_t, uint64_t> busy_until;  // by stream
static thread_local std::map<CUpti_ExternalCorrelationKind, std::vector<uint64_t>>
    around;  // operators and annotations, the innermost last
static CUpti_BuffersCallbackRequestFunc request_buffer;
static CUpti_BuffersCallbackCompleteFunc complete_buffer;
static CUpti_TimestampCallbackFunc clock_of_caller;

static uint64_t now() {
  if (clock_of_caller) return clock_of_caller();
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
static void hand_over() {
  if (buffer) complete_buffer(nullptr, 0, buffer, buffer_size, buffer_used);
  buffer = nullptr;
}
template <class Record>
static void add(const Record& record) {
  if (!enabled.count(record.kind)) return;
  if (buffer && buffer_used + sizeof record > buffer_size) hand_over();
  size_t most;
  if (!buffer) request_buffer(&buffer, &buffer_size, &most), buffer_used = 0;
  memcpy(buffer + buffer_used, &record, sizeof record);
  buffer_used += sizeof record;
}
static size_t size_of(int kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
      return sizeof(CUpti_ActivityKernel9);
    case CUPTI_ACTIVITY_KIND_MEMCPY:
      return sizeof(CUpti_ActivityMemcpy6);
    case CUPTI_ACTIVITY_KIND_MEMSET:
      return sizeof(CUpti_ActivityMemset4);
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION:
      return sizeof(CUpti_ActivityExternalCorrelation);
    default:
      return sizeof(CUpti_ActivityAPI);
  }
}

// Kinds of lines in the log

struct Call {
  CUpti_ActivityKind kind;
  CUpti_CallbackId id;
  const char* name;
};
#define RUNTIME(name) {CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_RUNTIME_TRACE_CBID_##name, #name}
#define DRIVER(name) {CUPTI_ACTIVITY_KIND_DRIVER, CUPTI_DRIVER_TRACE_CBID_##name, #name}
static const std::map<std::string, Call> CALLS = {{"kernel", RUNTIME(cudaLaunchKernel_v7000)},
                                                  {"gemm", RUNTIME(cudaLaunchKernelExC_v11060)},
                                                  {"nccl", RUNTIME(cudaLaunchKernelExC_v11060)},
                                                  {"cudnn", RUNTIME(cudaLaunchKernelExC_v11060)},
                                                  {"triton", DRIVER(cuLaunchKernelEx)},
                                                  {"memcpy", RUNTIME(cudaMemcpyAsync_v3020)},
                                                  {"memcpy_sync", RUNTIME(cudaMemcpy_v3020)},
                                                  {"memset", RUNTIME(cudaMemsetAsync_v3020)},
                                                  {"stream_sync", RUNTIME(cudaStreamSynchronize_v3020)},
                                                  {"event_sync", RUNTIME(cudaEventSynchronize_v3020)},
                                                  {"device_sync", RUNTIME(cudaDeviceSynchronize_v3020)},
                                                  {"malloc", RUNTIME(cudaMalloc_v3020)},
                                                  {"pin", RUNTIME(cudaHostAlloc_v3020)}};
static std::string kernel_name(const std::string& kind, const std::string& words) {
  const std::string first = words.substr(0, words.find('\t'));
  if (kind == "gemm") return "nvjet_fake_" + first + "_TNT";
  if (kind == "cudnn")
    return "cudnn_generated_fort_native_sdpa_sm90_flash_" +
           std::string(atoi(first.c_str()) >= 24 ? "bprop" : "fprop");
  if (kind != "nccl") return first;
  return first == "all_gather"       ? "ncclDevKernel_AllGather_RING_LL"
         : first == "reduce_scatter" ? "ncclDevKernel_ReduceScatter_Sum_RING_LL"
         : first == "all_reduce"     ? "ncclDevKernel_AllReduce_Sum_RING_LL"
                                     : "ncclDevKernel_" + first;
}
template <class Record>
static Record on_device(CUpti_ActivityKind kind, const void* stream, uint32_t correlation) {
  Record record;
  memset(&record, 0, sizeof record);
  record.kind = kind;
  record.streamId = stream ? (uint32_t)(uintptr_t)stream : DEFAULT_STREAM;
  record.deviceId = fake_device(), record.contextId = 1, record.correlationId = correlation;
  uint64_t& free = busy_until[record.streamId];
  record.start = free = std::max(free, now());
  record.end = free += KERNEL_TICKS;
  return record;
}
static void add_work(const std::string& kind, const void* stream, const std::string& words,
                     uint32_t correlation) {
  if (kind == "memcpy" || kind == "memcpy_sync") {
    auto record = on_device<CUpti_ActivityMemcpy6>(CUPTI_ACTIVITY_KIND_MEMCPY, stream, correlation);
    const bool from_device = words[0] == 'D', to_device = words[3] == 'D',
               pinned = words.find("pinned") != std::string::npos;
    const uint8_t host = pinned ? CUPTI_ACTIVITY_MEMORY_KIND_PINNED : CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
    record.srcKind = from_device ? (uint8_t)CUPTI_ACTIVITY_MEMORY_KIND_DEVICE : host;
    record.dstKind = to_device ? (uint8_t)CUPTI_ACTIVITY_MEMORY_KIND_DEVICE : host;
    record.copyKind = from_device
                          ? (to_device ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOD : CUPTI_ACTIVITY_MEMCPY_KIND_DTOH)
                          : CUPTI_ACTIVITY_MEMCPY_KIND_HTOD;
    record.bytes = strtoull(words.c_str() + words.find('\t'), nullptr, 10);
    add(record);
  } else if (kind == "memset") {
    auto record = on_device<CUpti_ActivityMemset4>(CUPTI_ACTIVITY_KIND_MEMSET, stream, correlation);
    record.bytes = strtoull(words.c_str(), nullptr, 10),
    record.memoryKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    add(record);
  } else if (kind == "kernel" || kind == "gemm" || kind == "nccl" || kind == "cudnn" || kind == "triton") {
    auto record =
        on_device<CUpti_ActivityKernel9>(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, stream, correlation);
    record.gridX = record.gridY = record.gridZ = 1, record.blockX = 128, record.blockY = record.blockZ = 1;
    record.registersPerThread = 64, record.gridId = correlation;
    record.name = names.insert(kernel_name(kind, words)).first->c_str();
    add(record);
  }
}
static void observe(const char* kind, const void* stream, const char* words) {
  static uint32_t correlation = 0;
  Guard guard(lock);
  const auto found = CALLS.find(kind);
  if (enabled.empty() || !request_buffer || found == CALLS.end()) return;
  correlation++;
  for (const auto& [external, ids] : around) {
    if (ids.empty()) continue;
    CUpti_ActivityExternalCorrelation record;
    memset(&record, 0, sizeof record);
    record.kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, record.correlationId = correlation;
    record.externalKind = external, record.externalId = ids.back();
    add(record);
  }
  CUpti_ActivityAPI api;
  memset(&api, 0, sizeof api);
  api.kind = found->second.kind, api.cbid = found->second.id, api.correlationId = correlation;
  api.processId = getpid(), api.threadId = (uint32_t)syscall(SYS_gettid);
  api.start = now();
  add_work(kind, stream, words, correlation);
  api.end = now();
  add(api);
}

extern "C" {
CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = 130000;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiGetResultString(CUptiResult, const char** text) {
  *text = "a fake CUPTI's result";
  return CUPTI_SUCCESS;
}
CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain domain, uint32_t id, const char** name) {
  const auto kind =
      domain == CUPTI_CB_DOMAIN_DRIVER_API ? CUPTI_ACTIVITY_KIND_DRIVER : CUPTI_ACTIVITY_KIND_RUNTIME;
  for (const auto& [_, call] : CALLS)
    if (call.kind == kind && call.id == id) {
      *name = call.name;
      return CUPTI_SUCCESS;
    }
  return CUPTI_ERROR_INVALID_PARAMETER;
}
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* who, CUpti_CallbackFunc, void*) {
  *who = (CUpti_SubscriberHandle)1;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) { return CUPTI_SUCCESS; }
CUptiResult cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) {
  return CUPTI_SUCCESS;
}
CUptiResult cuptiEnableDomain(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain) {
  return CUPTI_SUCCESS;
}
CUptiResult cuptiFinalize() { return CUPTI_SUCCESS; }

CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
  clock_of_caller = clock;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                           CUpti_BuffersCallbackCompleteFunc complete) {
  request_buffer = request, complete_buffer = complete;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  Guard guard(lock);
  enabled.insert(kind);
  fake_observe(observe);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  Guard guard(lock);
  enabled.erase(kind);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
  around[kind].push_back(id);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* last) {
  std::vector<uint64_t>& ids = around[kind];
  if (ids.empty()) return CUPTI_ERROR_QUEUE_EMPTY;
  if (last) *last = ids.back();
  ids.pop_back();
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityFlushAll(uint32_t) {
  Guard guard(lock);
  hand_over();
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t used, CUpti_Activity** record) {
  uint8_t* next = *record ? (uint8_t*)*record + size_of((*record)->kind) : buffer;
  if (next >= buffer + used) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = (CUpti_Activity*)next;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* dropped) {
  *dropped = 0;
  return CUPTI_SUCCESS;
}
}
