// libcudnn.so.9: the backend API with which cuDNN's frontend, compiled into torch, builds attention. Every
// graph gets one plan without workspace; the log has the number of operations of a graph (24 for attention's
// backward).
#include <cstdlib>

#include "core.h"

struct Descriptor {
  int type, operations;
  Descriptor* graph;
};
static thread_local Descriptor* last_graph;
enum { OPERATIONGRAPH_OPS = 801, HEUR_RESULTS = 202 };              // cudnnBackendAttributeName_t
enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, TYPE_BEHAVIOR = 23 };  // cudnnBackendAttributeType_t

extern "C" {
size_t cudnnGetVersion() { return 92000; }
int cudnnGetProperty(int which, int* value) {
  const int version[] = {9, 20, 0};
  *value = version[which];
  return 0;
}
size_t cudnnGetCudartVersion() { return 13000; }
const char* cudnnGetErrorString(int) { return "a fake cuDNN's status"; }
void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) *text = 0;
}
int cudnnCreate(void** handle) {
  *handle = calloc(1, 64);
  return 0;
}
int cudnnSetStream(void** handle, void* stream) {
  *handle = stream;
  return 0;
}
int cudnnGetStream(void** handle, void** stream) {
  *stream = *handle;
  return 0;
}

int cudnnBackendCreateDescriptor(int type, Descriptor** d) {
  *d = (Descriptor*)calloc(1, sizeof(Descriptor));
  (*d)->type = type;
  return 0;
}
int cudnnBackendDestroyDescriptor(Descriptor*) { return 0; }
int cudnnBackendSetAttribute(Descriptor* d, int name, int, int64_t count, const void*) {
  if (name == OPERATIONGRAPH_OPS) d->operations = (int)count, last_graph = d;
  return 0;
}
int cudnnBackendFinalize(Descriptor* d) {
  d->graph = last_graph;
  return 0;
}
int cudnnBackendGetAttribute(Descriptor*, int name, int type, int64_t wanted, int64_t* count, void* to) {
  if (type == TYPE_BEHAVIOR && to && wanted > 0) *(int32_t*)to = 0;
  if (type == TYPE_INT64 && to && wanted > 0) *(int64_t*)to = 0;
  if (count)
    *count = name == HEUR_RESULTS || type == TYPE_DESCRIPTOR || type == TYPE_INT64 || type == TYPE_BEHAVIOR;
  return 0;
}
int cudnnBackendExecute(void** handle, Descriptor* plan, Descriptor*) {
  if (int error = fake_expect("cudnnBackendExecute", *handle, fake_device())) return error;
  fake_log("cudnn", *handle, "%d operations", plan->graph ? plan->graph->operations : 0);
  return 0;
}
}
