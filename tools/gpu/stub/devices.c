// The devices that a process sees, whose operations `on_host.cpp` computes on the CPU. No kernel is launched: one that is
// given all the same is an error that names it, so nothing is quietly left out.
#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Atomic bool has_asserted;  // which ends the use of devices in this process alone
static pid_t owner;  // CUDA cannot be used on both sides of a fork
__thread int current;
static __thread cudaError_t last_error;

cudaError_t fail(cudaError_t error) { return last_error = error; }

static int num_devices(void) {
  const char* given = getenv("CUDA_STUB_DEVICES");
  int number = given ? atoi(given) : 1;
  return number > MAX_DEVICES ? MAX_DEVICES : number;
}

static int visible(int devices[MAX_DEVICES]) {
  int all = num_devices(), number = 0;
  char* text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (; number < all; number++) devices[number] = number;
    return number;
  }
  // Numbers, or "GPU-" and a UUID, whose first byte is the number plus 1. An unknown one ends the list, as CUDA does.
  while (*text && number < MAX_DEVICES) {
    char* end;
    long device = strncmp(text, "GPU-", 4) ? strtol(text, &end, 10) : strtol((char[3]){text[4], text[5]}, &end, 16) - 1;
    if (device < 0 || device >= all || end == text) break;
    devices[number++] = (int)device;
    if (!(text = strchr(text, ','))) break;
    text++;
  }
  return number;
}

int machine_device(int device) {
  int devices[MAX_DEVICES];
  return device < visible(devices) ? devices[device] : 0;
}

int current_device(void) { return current; }

// Whoever asks for devices has loaded torch, and is given its operations (`on_host.cpp`) before it uses any.
static void load_operations(void) {
  Dl_info own;
  char path[4096];
  if (!dlsym(RTLD_DEFAULT, "THPVariable_Wrap") && !dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD)) return;
  dladdr((void*)load_operations, &own);
  snprintf(path, sizeof path, "%.*s/libonhost.so", (int)(strrchr(own.dli_fname, '/') - own.dli_fname), own.dli_fname);
  if (!dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    fprintf(stderr, "the stub device: %s\n", dlerror());
    abort();
  }
}

cudaError_t error_of(int device) { return has_asserted ? cudaErrorAssert : (cudaError_t)row_of(device)->device_error; }
cudaError_t fault_of(int device) {
  if (!owner) owner = getpid();
  if (owner != getpid()) return cudaErrorInitializationError;
  return error_of(device);
}

API cudaGetDeviceCount(int* count) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (!owner) owner = getpid();
  pthread_once(&once, load_operations);
  int devices[MAX_DEVICES];
  *count = visible(devices);
  if (owner != getpid()) return fail(cudaErrorInitializationError);
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
API cudaSetDevice(int device) {
  int devices[MAX_DEVICES];
  if (device < 0 || device >= visible(devices)) return fail(cudaErrorInvalidDevice);
  CHECK(device);
  current = device;
  return cudaSuccess;
}
API cudaGetDeviceProperties(struct cudaDeviceProp* out, int device) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, "Stub");
  out->uuid.bytes[0] = (char)(machine_device(device) + 1);
  out->major = 9;
  out->totalGlobalMem = memory_bytes();
  out->multiProcessorCount = 132;
  out->warpSize = 32;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxThreadsPerBlock = 1024;
  out->regsPerMultiprocessor = 65536;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerMultiprocessor = 233472;
  return cudaSuccess;
}
API cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  (void)device;
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0;
  return cudaSuccess;
}
API cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", machine_device(device) + 1);
  return cudaSuccess;
}
API cudaDeviceCanAccessPeer(int* can, int device, int peer) { (void)device, (void)peer; *can = 0; return cudaSuccess; }
API cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
API cudaPeekAtLastError(void) { return last_error; }
API cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) { (void)mode; return cudaSuccess; }
static int no_driver(void) { return 0; }
API cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long flags,
                                     enum cudaDriverEntryPointQueryResult* result) {
  (void)version, (void)flags;
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  *function = driver ? dlsym(driver, name) : NULL;
  if (!*function) *(int (**)(void))function = no_driver;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- kernels

static cudaError_t refuse(const void* kernel) {
  Dl_info where = {0};
  dladdr(kernel, &where);
  fprintf(stderr, "the stub device launches no kernel, and was given %s (%s+%#tx)\n", where.dli_sname ? where.dli_sname : "one",
          where.dli_fname ? where.dli_fname : "?", (char*)kernel - (char*)where.dli_fbase);
  return fail(cudaErrorNotSupported);
}
API cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
  return refuse(kernel);
}
API cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  (void)config, (void)arguments;
  return refuse(kernel);
}
// What nvcc's code calls in place of cudaLaunchKernel.
API __cudaGetKernel(cudaKernel_t* out, const void* kernel) { *out = (cudaKernel_t)kernel; return cudaSuccess; }
API __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
API cudaFuncGetAttributes(struct cudaFuncAttributes* out, const void* kernel) {
  (void)kernel;
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
API cudaFuncSetAttribute(const void* kernel, enum cudaFuncAttribute attribute, int value) {
  (void)kernel, (void)attribute, (void)value;
  return cudaSuccess;
}

// For `on_host.cpp`: counts a computation, and keeps that one has failed.
__attribute__((visibility("default"))) int cuda_stub_computes(int device) {
  reached(COMPUTES, device);
  return fault_of(device);
}
__attribute__((visibility("default"))) void cuda_stub_asserts(void) { has_asserted = true; }
