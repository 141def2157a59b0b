// The common part of the fake libraries: devices, memory, handles, and the log of all calls.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>

extern "C" {
// The log has a line for each call: number, kind, stream (hexadecimal), then the fields of the kind, separated
// by tabs.
void fake_log(const char* kind, const void* stream, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
void fake_mark(const char* text);          // writes a line of the program
int fake_unimplemented(const char* name);  // logs and prints the name, once; cudaErrorNotSupported
void fake_observe(void (*observer)(const char* kind, const void* stream, const char* text));  // gets each line too

// Devices. As in CUDA, a thread's device is 0 until it sets another; a device that it uses gets a context.
int fake_installed();  // in the machine
int fake_devices();    // visible to the process: none with CUDA_VISIBLE_DEVICES=""
int fake_device();
int fake_set_device(int device);  // 0, or cudaErrorInvalidDevice
void fake_make_context();         // for the calling thread's device, unless it has one
void fake_retain_context(int device);
int fake_has_context(int device);

// Handles of streams and events. Each belongs to the device of the thread that created it.
void* fake_handle();
int fake_handle_device(const void* handle);  // the current device for the default stream
// 0 if the stream belongs to that device; else cudaErrorInvalidResourceHandle, and a line "wrong_device" in
// the log.
int fake_expect(const char* call, const void* stream, int device);
// The same check for a launch on the thread's device; cudaErrorInvalidValue and "bad_launch" beyond an H100's
// limits.
int fake_launch(const char* call, const void* stream, const unsigned grid[3], const unsigned block[3],
                size_t shared);

// Device memory: addresses whose pages are never accessed, and the number of allocated bytes.
void* fake_alloc(size_t bytes);  // null: out of memory
int fake_free(void* pointer);
void* fake_reserve(size_t bytes);  // addresses only
int fake_take(long long bytes);    // allocates (+) or frees (-) bytes; non-zero: out of memory
size_t fake_total();
size_t fake_taken();
int fake_device_of(const void* pointer);        // -1: not device memory
void fake_pin(const void* host, size_t bytes);  // 0 bytes: unpin
int fake_is_pinned(const void* host);
void fake_copy(void* to, const void* from, size_t bytes);

int fake_attribute(int number);  // of an H100 SXM, with the numbers of cudaDeviceAttr and CUdevice_attribute
void fake_name_kernel(const void* host, const char* name);
const char* fake_kernel_name(const void* host);
}
