// libnvrtc.so.13: kernels that torch generates at run time (its jiterator). They get names but are not
// compiled. Triton's kernels do not use this compiler.
#include <cstddef>
#include <cstring>
#include <string>

struct Program {
  std::string lowered;
};

extern "C" {
int nvrtcVersion(int* major, int* minor) {
  *major = 13, *minor = 0;
  return 0;
}
const char* nvrtcGetErrorString(int) { return "a fake NVRTC's result"; }
int nvrtcCreateProgram(Program** program, const char*, const char*, int, const char* const*,
                       const char* const*) {
  *program = new Program;
  return 0;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return 0;
}
int nvrtcCompileProgram(Program*, int, const char* const*) { return 0; }
int nvrtcAddNameExpression(Program*, const char*) { return 0; }
int nvrtcGetLoweredName(Program* program, const char* name, const char** lowered) {
  program->lowered = name;
  *lowered = program->lowered.c_str();
  return 0;
}
int nvrtcGetProgramLogSize(Program*, size_t* size) {
  *size = 1;
  return 0;
}
int nvrtcGetProgramLog(Program*, char* text) {
  *text = 0;
  return 0;
}
int nvrtcGetCUBINSize(Program*, size_t* size) {
  *size = 8;
  return 0;
}
int nvrtcGetCUBIN(Program*, char* image) {
  memset(image, 0, 8);
  return 0;
}
int nvrtcGetPTXSize(Program*, size_t* size) {
  *size = 8;
  return 0;
}
int nvrtcGetPTX(Program*, char* image) {
  memset(image, 0, 8);
  return 0;
}
}
