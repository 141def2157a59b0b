#include "core.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

typedef std::lock_guard<std::recursive_mutex> Guard;
static const size_t MIB = 1ul << 20, GIB = 1ul << 30;
static const size_t H100_BYTES = 85029158912ul;  // as cudaMemGetInfo reports for an H100 SXM: 79.19 GiB
static const size_t CONTEXT_BYTES =
    512 * MIB;  // an estimate: the memory of a context before any allocation
static const size_t LARGE_BYTES = 64 * MIB;

// Never destroyed, because torch's threads still make calls while the process exits.
struct State {
  std::recursive_mutex lock;
  FILE* log = nullptr;
  pid_t opened = 0;  // the process that opened the log
  long lines = 0;
  void (*observer)(const char*, const void*, const char*) = nullptr;
  std::set<std::string> unimplemented;
  std::set<int> contexts;
  std::unordered_map<const void*, int> handles;        // stream or event -> its device
  std::map<uintptr_t, std::pair<size_t, int>> ranges;  // device addresses: size, device
  std::map<uintptr_t, size_t> allocated, pinned;
  size_t taken = CONTEXT_BYTES;
  std::unordered_map<const void*, std::string> kernels;
};
static State& state() {
  static State* s = new State;
  return *s;
}
static thread_local int device;

static double number_of(const char* variable, double otherwise) {
  const char* text = getenv(variable);
  return text ? atof(text) : otherwise;
}

extern "C" {
// The log

void fake_log(const char* kind, const void* stream, const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  Guard guard(state().lock);
  State& s = state();
  if (s.opened != getpid()) {
    s.opened = getpid(), s.log = nullptr;
    if (const char* path = getenv("FAKE_CUDA_LOG")) {  // one file per process: FAKE_CUDA_LOG.PID
      s.log = fopen((std::string(path) + "." + std::to_string(getpid())).c_str(), "w");
      if (s.log) setvbuf(s.log, nullptr, _IOLBF, BUFSIZ);  // line-buffered: a process may end at any line
    }
  }
  if (s.log) fprintf(s.log, "%ld\t%s\t%lx\t%s\n", s.lines++, kind, (unsigned long)(uintptr_t)stream, text);
  if (s.observer) s.observer(kind, stream, text);
}

void fake_mark(const char* text) { fake_log("mark", nullptr, "%s", text); }

int fake_unimplemented(const char* name) {
  Guard guard(state().lock);
  if (state().unimplemented.insert(name).second) {
    fprintf(stderr, "fake CUDA: %s is not implemented\n", name);
    fake_log("unimplemented", nullptr, "%s", name);
  }
  return 801;  // cudaErrorNotSupported
}

void fake_observe(void (*observer)(const char*, const void*, const char*)) { state().observer = observer; }

// Devices

int fake_installed() { return (int)number_of("FAKE_CUDA_DEVICES", 1); }
int fake_devices() {  // read once, as in CUDA
  static const int count = [] {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return fake_installed();
    return *visible ? std::min(fake_installed(), 1 + (int)std::count(visible, visible + strlen(visible), ','))
                    : 0;
  }();
  return count;
}
int fake_device() { return device; }

int fake_set_device(int wanted) {
  if (wanted < 0 || wanted >= fake_devices()) return 101;  // cudaErrorInvalidDevice
  device = wanted;
  fake_make_context();  // since CUDA 12 cudaSetDevice creates the primary context
  return 0;
}

void fake_make_context() { fake_retain_context(device); }

void fake_retain_context(int which) {
  Guard guard(state().lock);
  if (!state().contexts.insert(which).second) return;
  fake_log("context", nullptr, "%d	thread %ld", which, (long)syscall(SYS_gettid));
}

int fake_has_context(int which) {
  Guard guard(state().lock);
  return (int)state().contexts.count(which);
}

// Handles

void* fake_handle() {
  static uintptr_t next = 0x1000;
  Guard guard(state().lock);
  fake_make_context();
  void* handle = (void*)(next += 16);
  state().handles[handle] = device;
  return handle;
}

int fake_handle_device(const void* handle) {
  Guard guard(state().lock);
  auto it = state().handles.find(handle);
  return it == state().handles.end() ? device : it->second;
}

int fake_expect(const char* call, const void* stream, int wanted) {
  fake_make_context();
  const int has = fake_handle_device(stream);
  if (has == wanted) return 0;
  fake_log("wrong_device", stream, "%s\tstream of device %d\twanted %d", call, has, wanted);
  return 400;  // cudaErrorInvalidResourceHandle
}

int fake_launch(const char* call, const void* stream, const unsigned grid[3], const unsigned block[3],
                size_t shared) {
  if (int error = fake_expect(call, stream, fake_device())) return error;
  const unsigned threads = block[0] * block[1] * block[2];
  if (grid[0] <= 2147483647u && grid[1] <= 65535 && grid[2] <= 65535 && threads && threads <= 1024 &&
      shared <= 232448)
    return 0;
  fake_log("bad_launch", stream, "%s\t%u,%u,%u\t%u,%u,%u\t%zu", call, grid[0], grid[1], grid[2], block[0],
           block[1], block[2], shared);
  return 1;  // cudaErrorInvalidValue
}

// Memory

// FAKE_CUDA_GIB: the reported memory of the device. FAKE_CUDA_REFUSES_GIB: allocations beyond this fail,
// independent of the reported memory.
size_t fake_total() {
  static size_t total = (size_t)(number_of("FAKE_CUDA_GIB", (double)H100_BYTES / GIB) * GIB);
  return total;
}
size_t fake_taken() {
  Guard guard(state().lock);
  return state().taken;
}

int fake_take(long long bytes) {
  static const size_t most = (size_t)(number_of("FAKE_CUDA_REFUSES_GIB", (double)fake_total() / GIB) * GIB);
  Guard guard(state().lock);
  if (bytes > 0 && state().taken + bytes > most) {
    fake_log("out_of_memory", nullptr, "%lld", bytes);
    return 2;
  }
  state().taken += bytes;
  return 0;
}

void* fake_reserve(size_t bytes) {
  const size_t align = 2 * MIB, size = (bytes + align - 1) / align * align;
  const int access = PROT_READ | PROT_WRITE, how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* start = (char*)mmap(nullptr, size + align, access, how, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  madvise(start, size + align, MADV_NOHUGEPAGE);
  start = (char*)(((uintptr_t)start + align - 1) / align * align);
  Guard guard(state().lock);
  state().ranges[(uintptr_t)start] = {size, device};
  return start;
}

void* fake_alloc(size_t bytes) {
  Guard guard(state().lock);
  fake_make_context();
  if (!bytes || fake_take((long long)bytes)) return nullptr;
  void* pointer = fake_reserve(bytes);
  state().allocated[(uintptr_t)pointer] = bytes;
  return pointer;
}

int fake_free(void* pointer) {
  Guard guard(state().lock);
  State& s = state();
  auto it = s.allocated.find((uintptr_t)pointer);
  if (it == s.allocated.end()) return 1;  // cudaErrorInvalidValue
  fake_take(-(long long)it->second);
  munmap(pointer, s.ranges[(uintptr_t)pointer].first);
  s.ranges.erase((uintptr_t)pointer);
  s.allocated.erase(it);
  return 0;
}

int fake_device_of(const void* pointer) {
  Guard guard(state().lock);
  auto it = state().ranges.upper_bound((uintptr_t)pointer);
  if (it == state().ranges.begin()) return -1;
  --it;
  return (uintptr_t)pointer < it->first + it->second.first ? it->second.second : -1;
}

void fake_pin(const void* host, size_t bytes) {
  Guard guard(state().lock);
  if (bytes)
    state().pinned[(uintptr_t)host] = bytes;
  else
    state().pinned.erase((uintptr_t)host);
}

int fake_is_pinned(const void* host) {
  Guard guard(state().lock);
  auto it = state().pinned.upper_bound((uintptr_t)host);
  if (it == state().pinned.begin()) return 0;
  --it;
  return (uintptr_t)host < it->first + it->second;
}

// Device memory reads as 0, because no kernel computes values. A copy of more than 64 MiB to the host changes
// nothing there: nothing reads it, and its pages need not exist.
void fake_copy(void* to, const void* from, size_t bytes) {
  const bool to_device = fake_device_of(to) >= 0, from_device = fake_device_of(from) >= 0;
  if (to_device || bytes > LARGE_BYTES) return;
  if (from_device)
    memset(to, 0, bytes);
  else
    memcpy(to, from, bytes);
}

// The attributes of an H100 SXM as cudaDeviceGetAttribute returns them (names of the numbers: driver_types.h,
// enum cudaDeviceAttr).
int fake_attribute(int number) {
  static const std::map<int, int> h100 = {
      {1, 1024},        {2, 1024},    {3, 1024},     {4, 64},    {5, 2147483647},  {6, 65535},
      {7, 65535},       {8, 49152},   {9, 65536},    {10, 32},   {11, 2147483647}, {12, 65536},
      {13, 1980000},    {14, 512},    {15, 1},       {16, 132},  {19, 1},          {31, 1},
      {32, 1},          {33, 25},     {36, 2619000}, {37, 5120}, {38, 52428800},   {39, 2048},
      {40, 3},          {41, 1},      {75, 9},       {78, 1},    {79, 1},          {80, 1},
      {81, 233472},     {82, 65536},  {83, 1},       {89, 1},    {90, 1},          {95, 1},
      {97, 232448},     {98, 1},      {99, 1},       {102, 1},   {103, 1},         {106, 32},
      {108, 134217728}, {109, 32768}, {111, 1024},   {115, 1},   {116, 1},         {119, 1},
      {120, 1},         {121, 1}};
  auto it = h100.find(number);
  return it == h100.end() ? 0 : it->second;
}

void fake_name_kernel(const void* host, const char* name) {
  Guard guard(state().lock);
  state().kernels[host] = name;
}

const char* fake_kernel_name(const void* host) {
  Guard guard(state().lock);
  auto it = state().kernels.find(host);
  return it == state().kernels.end() ? "?" : it->second.c_str();
}
}
