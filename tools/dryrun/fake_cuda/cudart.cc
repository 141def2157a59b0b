// libcudart.so.13, the runtime: the functions of torch's kernels, allocator, streams and events.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core.h"

struct LaunchConfig {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local cudaError_t last_error = cudaSuccess;
static thread_local LaunchConfig pushed;

static cudaError_t fail(int error) { return last_error = (cudaError_t)error; }
static cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  const unsigned blocks[] = {grid.x, grid.y, grid.z}, threads[] = {block.x, block.y, block.z};
  if (int error = fake_launch("cudaLaunchKernel", stream, blocks, threads, shared)) return fail(error);
  fake_log("kernel", stream, "%s\t%u,%u,%u\t%u,%u,%u\t%zu", fake_kernel_name(kernel), grid.x, grid.y, grid.z,
           block.x, block.y, block.z, shared);
  return cudaSuccess;
}
static cudaError_t copy(const char* kind, void* to, const void* from, size_t bytes, cudaStream_t stream) {
  fake_make_context();
  const bool to_device = fake_device_of(to) >= 0, from_device = fake_device_of(from) >= 0;
  const char* const ways[] = {"HtoH", "HtoD", "DtoH", "DtoD"};
  const bool pinned = (to_device || fake_is_pinned(to)) && (from_device || fake_is_pinned(from));
  fake_log(kind, stream, "%s\t%zu\t%s", ways[2 * from_device + to_device], bytes,
           pinned ? "pinned" : "pageable");
  fake_copy(to, from, bytes);
  return cudaSuccess;
}
static cudaError_t fill(size_t bytes, cudaStream_t stream) {
  if (int error = fake_expect("cudaMemsetAsync", stream, fake_device())) return fail(error);
  fake_log("memset", stream, "%zu", bytes);
  return cudaSuccess;
}
static cudaError_t pin(void* host, size_t bytes) {
  fake_make_context();
  fake_pin(host, bytes);
  fake_log("pin", nullptr, "%zu", bytes);
  return cudaSuccess;
}

static cudaError_t unpin(void* host) {
  fake_pin(host, 0);
  fake_log("unpin", nullptr, "-");
  return cudaSuccess;
}

extern "C" {
// Kernels of torch's libraries, which register themselves when they are loaded

void** __cudaRegisterFatBinary(void*) { return (void**)calloc(1, 64); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  fake_name_kernel(host, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(cudaStream_t*)stream = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = (cudaKernel_t)host;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared,
                               cudaStream_t stream) {
  return launch(kernel, grid, block, shared, stream);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t shared,
                             cudaStream_t stream) {
  return launch(kernel, grid, block, shared, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t shared,
                                        cudaStream_t stream) {
  return launch(kernel, grid, block, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* kernel, void**) {
  return launch(kernel, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  fake_log("host_function", stream, "-");
  function(data);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  fake_log("host_function", stream, "-");
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 64,
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                   unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static void* const symbol = fake_reserve(65536);  // part of the program's image, not allocated
  *pointer = symbol;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t bytes, size_t, cudaMemcpyKind) {
  fake_log("memcpy_sync", nullptr, "HtoD\t%zu\tpageable", bytes);
  return cudaSuccess;
}

// Devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = fake_devices();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = fake_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  int error = fake_set_device(device);
  return error ? fail(error) : cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = fake_attribute((int)attribute);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", 25 + device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  memcpy(&p->uuid, "fake-h100-sxm-00", 16);
  p->uuid.bytes[15] += device;
  p->pciBusID = 25 + device, p->totalGlobalMem = fake_total();
  p->major = 9, p->minor = 0, p->multiProcessorCount = 132, p->warpSize = 32;
  p->sharedMemPerBlock = 49152, p->sharedMemPerMultiprocessor = 233472, p->sharedMemPerBlockOptin = 232448;
  p->reservedSharedMemPerBlock = 1024, p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->memPitch = 2147483647, p->totalConstMem = 65536, p->textureAlignment = 512, p->memoryBusWidth = 5120;
  p->l2CacheSize = 52428800, p->persistingL2CacheMaxSize = 32768 * 1024,
  p->accessPolicyMaxWindowSize = 134213632;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing =
      p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = p->managedMemory = p->concurrentManagedAccess = 1;
  p->computePreemptionSupported = p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch =
      p->memoryPoolsSupported = 1;
  p->asyncEngineCount = 3;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation        ? "out of memory"
         : error == cudaErrorInvalidResourceHandle ? "invalid resource handle"
         : error == cudaErrorInvalidDevice         ? "invalid device ordinal"
         : error                                   ? "a fake error"
                                                   : "no error";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
         : error                            ? "cudaErrorFake"
                                            : "cudaSuccess";
}
cudaError_t cudaDeviceSynchronize() {
  fake_make_context();
  fake_log("device_sync", nullptr, "-");
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = nullptr;
  for (const char* suffix : {"", "_v2", "_v3"})
    if (!*function && driver) *function = dlsym(driver, (std::string(name) + suffix).c_str());
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (*function) return cudaSuccess;
  fake_unimplemented(name);
  return fail(cudaErrorSymbolNotFound);
}

// Memory

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = fake_alloc(bytes);
  if (bytes && !*pointer) return fail(cudaErrorMemoryAllocation);
  fake_log("malloc", nullptr, "%p\t%zu", *pointer, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  fake_log("free", nullptr, "%p", pointer);
  return (cudaError_t)fake_free(pointer);
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return posix_memalign(pointer, 4096, bytes ? bytes : 1) ? fail(cudaErrorMemoryAllocation)
                                                          : pin(*pointer, bytes);
}
cudaError_t cudaFreeHost(void* pointer) {
  unpin(pointer);
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) { return pin(pointer, bytes); }
cudaError_t cudaHostUnregister(void* pointer) { return unpin(pointer); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  fake_make_context();
  *total = fake_total(), *free = *total - std::min(*total, fake_taken());
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->device = fake_device_of(pointer);
  const bool on_device = attributes->device >= 0;
  attributes->type = on_device                 ? cudaMemoryTypeDevice
                     : fake_is_pinned(pointer) ? cudaMemoryTypeHost
                                               : cudaMemoryTypeUnregistered;
  (on_device ? attributes->devicePointer : attributes->hostPointer) = (void*)pointer;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy("memcpy_sync", to, from, bytes, nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy("memcpy", to, from, bytes, stream);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy("memcpy", to, from, bytes, stream);
}
cudaError_t cudaMemset(void*, int, size_t bytes) { return fill(bytes, nullptr); }
cudaError_t cudaMemsetAsync(void*, int, size_t bytes, cudaStream_t stream) { return fill(bytes, stream); }

// Streams and events. Work is complete as soon as it is launched; the log has the order that the program
// requested.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = (cudaStream_t)fake_handle();
  fake_log("stream", *stream, "priority %d", priority);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  fake_log("stream_sync", stream, "-");
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  fake_log("wait", stream, "%lx", (unsigned long)(uintptr_t)event);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t)fake_handle();
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (int error = fake_expect("cudaEventRecord", stream, fake_handle_device(event))) return fail(error);
  fake_log("record", stream, "%lx", (unsigned long)(uintptr_t)event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  fake_log("event_sync", nullptr, "%lx", (unsigned long)(uintptr_t)event);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0f;
  return cudaSuccess;
}
}
