// libcublasLt.so.13: matrix products with an epilogue or of float8, logged as in cublas.cc.
#include <cstdlib>
#include <cstring>

#include "core.h"

struct Product {
  int compute, scale, trans_a, trans_b, epilogue;
};
struct Layout {
  int type;
  uint64_t rows, columns;
  int batch;
};
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
enum {
  TRANS_A = 3,
  TRANS_B = 4,
  EPILOGUE = 7,
  BATCH = 5
};  // numbers of cublasLtMatmulDescAttributes_t and ...LayoutAttribute_t

extern "C" {
size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulDescCreate(Product** p, int compute, int scale) {
  *p = (Product*)calloc(1, sizeof(Product));
  (*p)->compute = compute, (*p)->scale = scale;
  return 0;
}
int cublasLtMatmulDescDestroy(Product* p) {
  free(p);
  return 0;
}
int cublasLtMatmulDescSetAttribute(Product* p, int attribute, const void* value, size_t) {
  if (attribute == TRANS_A) p->trans_a = *(int*)value;
  if (attribute == TRANS_B) p->trans_b = *(int*)value;
  if (attribute == EPILOGUE) p->epilogue = *(int*)value;
  return 0;
}
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t) {
  *layout = (Layout*)calloc(1, sizeof(Layout));
  **layout = {type, rows, columns, 1};
  return 0;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) {
  free(layout);
  return 0;
}
int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t) {
  if (attribute == BATCH) layout->batch = *(int*)value;
  return 0;
}
int cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = calloc(1, 64);
  return 0;
}
int cublasLtMatmulPreferenceDestroy(void* preference) {
  free(preference);
  return 0;
}
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, Product*, void*, void*, void*, void*, void*, int, Heuristic* result,
                                   int* found) {
  memset(result, 0, sizeof *result);
  *found = 1;
  return 0;
}
int cublasLtMatmul(void*, Product* p, const void*, const void*, Layout* a, const void*, Layout* b,
                   const void*, const void*, Layout*, void*, Layout* out, const void*, void*, size_t,
                   void* stream) {
  if (int error = fake_expect("cublasLtMatmul", stream, fake_device())) return error;
  fake_log("gemm", stream, "%lu,%lu,%lu\tbatch %d\ttypes %d,%d,%d\tcompute %d\ttransposed %d,%d\tepilogue %d",
           out->rows, out->columns, p->trans_a ? a->rows : a->columns, out->batch, a->type, b->type,
           out->type, p->compute, p->trans_a, p->trans_b, p->epilogue);
  return 0;
}
}
