// libnvidia-ml.so.1: GPUs without NVLink's fabric.
#include <cstring>

#include "core.h"

extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlInit() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = (unsigned)fake_installed();
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = (void*)1;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) {
  *device = (void*)1;
  return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void*, void* info) {
  memset((char*)info + 4, 0, 28);
  return 0;
}  // state 0: none
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return 3; }  // NVML_ERROR_NOT_SUPPORTED
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}
}
