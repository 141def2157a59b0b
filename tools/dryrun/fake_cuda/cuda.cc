// libcuda.so.1, the driver: contexts, modules (cubins of Triton and inductor), launches, and memory that is
// mapped by pages.
#include <cuda.h>
#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>

#include "core.h"

struct Module {
  int registers, stack;
};
struct Function {
  std::string name;
  int registers, stack;
};
static std::mutex lock;
static std::map<CUmemGenericAllocationHandle, size_t> pages;
static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(0x77 + device); }
static thread_local CUcontext current;

// Registers and stack frame of a cubin's kernel: attributes 0x2f and 0x11 of its ELF section .nv.info.
// Inductor reads them to choose among configurations, as on a GPU.
static Module* read_cubin(const char* image) {
  Module* module = new Module{0, 0};
  if (memcmp(image, ELFMAG, 4)) return module;
  const Elf64_Ehdr* header = (const Elf64_Ehdr*)image;
  const Elf64_Shdr* sections = (const Elf64_Shdr*)(image + header->e_shoff);
  const char* names = image + sections[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, ".nv.info")) continue;
    const unsigned char* at = (const unsigned char*)image + sections[i].sh_offset;
    const unsigned char* end = at + sections[i].sh_size;
    while (at + 4 <= end) {
      const unsigned format = at[0], attribute = at[1], length = at[2] | at[3] << 8;
      if (format == 4) {
        const int value = length >= 8 ? *(const int*)(at + 8) : 0;
        if (attribute == 0x2f && value > module->registers) module->registers = value;
        if (attribute == 0x11 && value > module->stack) module->stack = value;
        at += length;
      }
      at += 4;
    }
  }
  return module;
}

extern "C" {
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error ? "a fake driver's error" : "no error";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error ? "CUDA_ERROR_FAKE" : "CUDA_SUCCESS";
  return CUDA_SUCCESS;
}

// Devices and contexts

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = fake_devices();
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = fake_attribute((int)attribute);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current ? current : fake_has_context(fake_device()) ? context_of(fake_device()) : nullptr;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = fake_device();
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext* context) { return context ? cuCtxGetCurrent(context) : CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  fake_retain_context(device);
  *context = context_of(device);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = fake_has_context(device);
  return CUDA_SUCCESS;
}

// Kernels

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = (CUmodule)read_cubin((const char*)image);
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule* module, const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return image.empty() ? CUDA_ERROR_FILE_NOT_FOUND : cuModuleLoadData(module, image.data());
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  const Module* loaded = (Module*)module;
  *function = (CUfunction) new Function{name, loaded->registers, loaded->stack};
  fake_log("cubin", nullptr, "%s\t%d\t%d", name, loaded->registers, loaded->stack);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? ((Function*)function)->registers
           : attribute == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES    ? ((Function*)function)->stack
                                                                : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 66;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void**, void**) {
  const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
  if (int error = fake_launch("cuLaunchKernel", stream, grid, block, shared)) return (CUresult)error;
  const Function* f = (Function*)function;
  fake_log("triton", stream, "%s\t%d\t%d\t%u,%u,%u\t%u,%u,%u\t%u", f->name.c_str(), f->registers, f->stack,
           gx, gy, gz, bx, by, bz, shared);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** arguments, void** extra) {
  return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
                        c->blockDimZ, c->sharedMemBytes, c->hStream, arguments, extra);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                   void** arguments) {
  return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, nullptr);
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

// Memory

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  const int device = fake_device_of((void*)pointer);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *(CUdeviceptr*)value = pointer;
      return device >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)value = device >= 0 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *(int*)value = device;
      break;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *(CUcontext*)value = context_of(device);
      break;
    default:
      memset(value, 0, 4);
  }
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *pointer = (CUdeviceptr)fake_reserve(bytes);
  fake_log("reserve", nullptr, "%llx\t%zu", *pointer, bytes);
  return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                     unsigned long long) {
  fake_make_context();
  if (fake_take((long long)bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemGenericAllocationHandle)(uintptr_t)fake_handle();
  fake_log("create", nullptr, "%zu", bytes);
  std::lock_guard<std::mutex> guard(lock);
  pages[*handle] = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(lock);
  fake_log("release", nullptr, "%zu", pages[handle]);
  fake_take(-(long long)pages[handle]);
  pages.erase(handle);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  fake_log("map", nullptr, "%zu", bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr, size_t bytes) {
  fake_log("unmap", nullptr, "%zu", bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = 2u << 20;
  return CUDA_SUCCESS;
}
}
