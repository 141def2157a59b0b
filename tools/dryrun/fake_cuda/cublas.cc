// libcublas.so.13: matrix products, logged with their sizes (m, n, k), types and transpositions.
#include <cstdlib>

#include "core.h"

struct Handle {
  void* stream;
  int math, pointer;
};
struct Sizes {
  int m, n, k, batch;
};
struct Types {
  int a, b, c, compute;
};
static const Types FLOAT32 = {0, 0, 0, 68};  // CUDA_R_32F, CUBLAS_COMPUTE_32F

static int log_product(const Handle* h, Sizes s, Types t, int trans_a, int trans_b) {
  if (int error = fake_expect("cublasGemm", h->stream, fake_device())) return error;
  fake_log("gemm", h->stream, "%d,%d,%d\tbatch %d\ttypes %d,%d,%d\tcompute %d\ttransposed %d,%d", s.m, s.n,
           s.k, s.batch, t.a, t.b, t.c, t.compute, trans_a, trans_b);
  return 0;
}

extern "C" {
int cublasCreate_v2(Handle** h) {
  *h = (Handle*)calloc(1, sizeof(Handle));
  return 0;
}
int cublasDestroy_v2(Handle*) { return 0; }
int cublasSetStream_v2(Handle* h, void* stream) {
  h->stream = stream;
  return 0;
}
int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
int cublasSetMathMode(Handle* h, int mode) {
  h->math = mode;
  return 0;
}
int cublasGetMathMode(Handle* h, int* mode) {
  *mode = h->math;
  return 0;
}
int cublasSetPointerMode_v2(Handle* h, int mode) {
  h->pointer = mode;
  return 0;
}
int cublasGetPointerMode_v2(Handle* h, int* mode) {
  *mode = h->pointer;
  return 0;
}
int cublasSetSmCountTarget(Handle*, int) { return 0; }

int cublasGemmEx(Handle* h, int ta, int tb, int m, int n, int k, const void*, const void*, int a, int,
                 const void*, int b, int, const void*, void*, int c, int, int compute, int) {
  return log_product(h, {m, n, k, 1}, {a, b, c, compute}, ta, tb);
}
int cublasGemmStridedBatchedEx(Handle* h, int ta, int tb, int m, int n, int k, const void*, const void*,
                               int a, int, long long, const void*, int b, int, long long, const void*, void*,
                               int c, int, long long, int batch, int compute, int) {
  return log_product(h, {m, n, k, batch}, {a, b, c, compute}, ta, tb);
}
int cublasSgemm_v2(Handle* h, int ta, int tb, int m, int n, int k, const void*, const void*, int, const void*,
                   int, const void*, void*, int) {
  return log_product(h, {m, n, k, 1}, FLOAT32, ta, tb);
}
int cublasSgemmStridedBatched(Handle* h, int ta, int tb, int m, int n, int k, const void*, const void*, int,
                              long long, const void*, int, long long, const void*, void*, int, long long,
                              int batch) {
  return log_product(h, {m, n, k, batch}, FLOAT32, ta, tb);
}
int cublasSgemv_v2(Handle* h, int trans, int m, int n, const void*, const void*, int, const void*, int,
                   const void*, void*, int) {
  return log_product(h, {m, 1, n, 1}, FLOAT32, trans, 0);
}
}
