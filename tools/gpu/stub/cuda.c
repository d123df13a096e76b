// A CUDA runtime without a GPU. Device memory is the host's. Streams do their operations in order, each at once unless
// one before it waits: for an event, or for NCCL's peers. A thread of its own does what had to wait.
//
// It launches no kernel: `on_host.cpp` computes torch's operations on the CPU. A kernel that is launched all the same
// is an error that names it, so nothing is quietly left out.
#define _GNU_SOURCE
#include "stub.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default"))) cudaError_t
#define CHECK(device) do { cudaError_t fault = fault_of(device); if (fault) return fail(fault); } while (0)

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;

struct Stream {
  Stream* next;
  int device, priority;
  Op *head, **tail;
  uint64_t pushed, popped;
};

typedef struct Mark {  // what an event has recorded; events and operations share it
  int uses;
  bool is_done;
  int64_t at_us;
} Mark;

typedef struct Range {
  struct Range* next;
  char* start;
  size_t size;
  enum cudaMemoryType type;
  int device;
} Range;

static Stream defaults[MAX_DEVICES];
static Stream* streams;
static Range* ranges;
static size_t used[MAX_DEVICES];
static pid_t owner;  // CUDA cannot be used on both sides of a fork
static bool has_engine;
static __thread int current;
static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

// --- devices

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

static cudaError_t fault_of(int device) {
  if (!owner) owner = getpid();
  if (owner != getpid()) return cudaErrorInitializationError;
  return (cudaError_t)row_of(device)->device_error;
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
static size_t memory_bytes(void) {
  const char* given = getenv("CUDA_STUB_MEMORY_MIB");
  return (given ? strtoull(given, NULL, 10) : 8192) << 20;
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

// --- memory

static cudaError_t take(void** out, size_t size, enum cudaMemoryType type, int device) {
  size = (size + 4095) / 4096 * 4096;
  void* start = mmap(NULL, size ? size : 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  Range* range = malloc(sizeof *range);
  pthread_mutex_lock(&lock);
  *range = (Range){ranges, start, size, type, device};
  ranges = range;
  pthread_mutex_unlock(&lock);
  *out = start;
  return cudaSuccess;
}
static Range** find(const void* at) {
  Range** range = &ranges;
  while (*range && !((*range)->start <= (char*)at && (char*)at < (*range)->start + (*range)->size)) range = &(*range)->next;
  return range;
}
static Range drop(void* start) {
  pthread_mutex_lock(&lock);
  Range** at = find(start);
  Range found = *at ? **at : (Range){0};
  if (*at) {
    Range* range = *at;
    *at = range->next;
    free(range);
  }
  if (found.type == cudaMemoryTypeDevice) used[found.device] -= found.size;
  pthread_mutex_unlock(&lock);
  return found;
}
API cudaMalloc(void** out, size_t size) {
  CHECK(current);
  pthread_mutex_lock(&lock);
  bool fits = used[current] + size <= memory_bytes();
  if (fits) used[current] += (size + 4095) / 4096 * 4096;
  pthread_mutex_unlock(&lock);
  return fits ? take(out, size, cudaMemoryTypeDevice, current) : fail(cudaErrorMemoryAllocation);
}
API cudaFree(void* start) {
  if (!start) return cudaSuccess;
  CHECK(current);
  wait_for_device(current);  // as CUDA does: also for kernels that spin for a peer
  Range range = drop(start);
  if (range.start) munmap(range.start, range.size);
  return range.start ? cudaSuccess : fail(cudaErrorInvalidValue);
}
API cudaHostAlloc(void** out, size_t size, unsigned flags) { (void)flags; CHECK(current); return take(out, size, cudaMemoryTypeHost, current); }
API cudaFreeHost(void* start) {
  Range range = drop(start);
  if (range.start) munmap(range.start, range.size);
  return range.start ? cudaSuccess : fail(cudaErrorInvalidValue);
}
API cudaHostRegister(void* start, size_t size, unsigned flags) {
  (void)flags;
  CHECK(current);
  pthread_mutex_lock(&lock);
  bool is_known = *find(start) != NULL;
  if (!is_known) {
    Range* range = malloc(sizeof *range);
    *range = (Range){ranges, start, size, cudaMemoryTypeHost, current};
    ranges = range;
  }
  pthread_mutex_unlock(&lock);
  return is_known ? fail(cudaErrorHostMemoryAlreadyRegistered) : cudaSuccess;
}
API cudaHostUnregister(void* start) { return drop(start).start ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered); }
API cudaMemGetInfo(size_t* available, size_t* total) {
  CHECK(current);
  *total = memory_bytes();
  *available = *total - used[current];
  return cudaSuccess;
}
API cudaPointerGetAttributes(struct cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  pthread_mutex_lock(&lock);
  Range* range = *find(pointer);
  if (range) {
    out->type = range->type;
    out->device = range->device;
    out->devicePointer = out->hostPointer = (void*)pointer;
  }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

// --- streams

static void* engine(void* unused) {
  (void)unused;
  pthread_mutex_lock(&lock);
  for (;;) {
    bool is_busy = false, has_moved = false;
    for (Stream* stream = streams; stream; stream = stream->next) {
      bool is_broken = stream->head && row_of(stream->device)->device_error;
      while (stream->head && (is_broken || stream->head->run(stream->head))) {
        Op* op = stream->head;
        if (!(stream->head = op->next)) stream->tail = &stream->head;
        stream->popped++;
        op->end(op);
        has_moved = true;
      }
      is_busy |= stream->head != NULL;
    }
    if (has_moved) pthread_cond_broadcast(&moved);
    if (!is_busy) {
      pthread_cond_wait(&work, &lock);
    } else if (!has_moved) {
      pthread_mutex_unlock(&lock);
      usleep(100);
      pthread_mutex_lock(&lock);
    }
  }
  return NULL;
}
void wake_engine(void) {
  if (!has_engine) {
    pthread_t thread;
    has_engine = !pthread_create(&thread, NULL, engine, NULL);
  }
  pthread_cond_signal(&work);
}
static void list(Stream* stream, int device, int priority) {
  *stream = (Stream){.next = streams, .device = device, .priority = priority, .tail = &stream->head};
  stream->tail = &stream->head;
  streams = stream;
}
Stream* stream_of(cudaStream_t handle) {
  if ((uintptr_t)handle > 2) return (Stream*)handle;
  Stream* stream = &defaults[current];
  pthread_mutex_lock(&lock);
  if (!stream->tail) list(stream, current, 0);
  pthread_mutex_unlock(&lock);
  return stream;
}
int device_of(const Stream* stream) { return stream->device; }

void push(Stream* stream, Op* op) {
  pthread_mutex_lock(&lock);
  if (!stream->head && op->run(op)) {
    op->end(op);
    pthread_cond_broadcast(&moved);
  } else {
    op->next = NULL;
    *stream->tail = op;
    stream->tail = &op->next;
    stream->pushed++;
    wake_engine();
  }
  pthread_mutex_unlock(&lock);
}
static void wait_for(Stream* stream) {  // with the lock held, for what it has to do by now
  uint64_t until = stream->pushed;
  while (stream->popped < until) pthread_cond_wait(&moved, &lock);
}
void wait_for_device(int device) {
  pthread_mutex_lock(&lock);
  for (Stream* stream = streams; stream; stream = stream->next)
    if (stream->device == device) wait_for(stream);
  pthread_mutex_unlock(&lock);
}
API cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  (void)flags;
  CHECK(current);
  Stream* stream = malloc(sizeof *stream);
  pthread_mutex_lock(&lock);
  list(stream, current, priority);
  pthread_mutex_unlock(&lock);
  *out = (cudaStream_t)stream;
  return cudaSuccess;
}
API cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaStreamDestroy(cudaStream_t stream) { (void)stream; return cudaSuccess; }  // torch keeps its own for good
API cudaStreamGetPriority(cudaStream_t stream, int* priority) { *priority = stream_of(stream)->priority; return cudaSuccess; }
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) { (void)stream; *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
API cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                             const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* number) {
  (void)stream, (void)graph, (void)dependencies, (void)edges, (void)number;
  if (status) *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
API cudaStreamQuery(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  CHECK(stream->device);
  pthread_mutex_lock(&lock);
  bool is_idle = stream->head == NULL;
  pthread_mutex_unlock(&lock);
  return is_idle ? cudaSuccess : cudaErrorNotReady;
}
API cudaStreamSynchronize(cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  pthread_mutex_lock(&lock);
  wait_for(stream);
  pthread_mutex_unlock(&lock);
  CHECK(stream->device);
  return cudaSuccess;
}
API cudaDeviceSynchronize(void) {
  wait_for_device(current);
  CHECK(current);
  return cudaSuccess;
}

// --- copies

typedef struct {
  Op op;
  char *target;
  const char *source;
  size_t target_pitch, source_pitch, width, height;
  int value;
} Copy;

static void free_op(Op* op) { free(op); }
static bool run_copy(Op* op) {
  Copy* copy = (Copy*)op;
  for (size_t row = 0; row < copy->height; row++) {
    char* target = copy->target + row * copy->target_pitch;
    if (copy->source) memmove(target, copy->source + row * copy->source_pitch, copy->width);
    else memset(target, copy->value, copy->width);
  }
  return true;
}
static cudaError_t copy(Stream* stream, Copy what) {
  CHECK(stream->device);
  pthread_mutex_lock(&lock);
  bool is_out = *find(what.source) && (*find(what.source))->type == cudaMemoryTypeDevice && (!*find(what.target) || (*find(what.target))->type == cudaMemoryTypeHost);
  bool is_in = *find(what.target) && (*find(what.target))->type == cudaMemoryTypeDevice && what.source && (!*find(what.source) || (*find(what.source))->type == cudaMemoryTypeHost);
  bool is_pageable = (is_out && !*find(what.target)) || (is_in && !*find(what.source));
  pthread_mutex_unlock(&lock);
  if (is_out || is_in) reached(is_out ? COPIES_OUT : COPIES_IN, stream->device);
  CHECK(stream->device);
  Copy* op = malloc(sizeof *op);
  *op = what;
  op->op = (Op){.run = run_copy, .end = free_op};
  push(stream, &op->op);
  // Only pinned memory is copied beside the host: CUDA stages the other, and returns when it is done with it.
  return is_pageable ? cudaStreamSynchronize((cudaStream_t)stream) : cudaSuccess;
}
API cudaMemcpyAsync(void* target, const void* source, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind;
  return copy(stream_of(stream), (Copy){.target = target, .source = source, .width = size, .height = 1});
}
API cudaMemcpyPeerAsync(void* target, int to, const void* source, int from, size_t size, cudaStream_t stream) {
  (void)to, (void)from;
  return cudaMemcpyAsync(target, source, size, cudaMemcpyDefault, stream);
}
API cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width, size_t height,
                      enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind;
  return copy(stream_of(stream), (Copy){.target = target, .source = source, .target_pitch = target_pitch,
                                        .source_pitch = source_pitch, .width = width, .height = height});
}
API cudaMemcpy(void* target, const void* source, size_t size, enum cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyAsync(target, source, size, kind, NULL);
  return error ? error : cudaStreamSynchronize(NULL);
}
API cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  return copy(stream_of(stream), (Copy){.target = target, .value = value, .width = size, .height = 1});
}
API cudaMemset(void* target, int value, size_t size) { return cudaMemsetAsync(target, value, size, NULL); }

// --- events

typedef struct {
  Op op;
  Mark* mark;
} MarkOp;

static void release(Mark* mark) {  // with the lock held
  if (mark && !--mark->uses) free(mark);
}
static void end_mark(Op* op) {
  release(((MarkOp*)op)->mark);
  free(op);
}
static bool run_record(Op* op) {
  Mark* mark = ((MarkOp*)op)->mark;
  mark->at_us = now_us();
  return mark->is_done = true;
}
static bool run_wait(Op* op) { return ((MarkOp*)op)->mark->is_done; }

static void push_mark(Stream* stream, Mark* mark, bool (*run)(Op*)) {
  MarkOp* op = malloc(sizeof *op);
  *op = (MarkOp){{.run = run, .end = end_mark}, mark};
  push(stream, &op->op);
}
typedef struct {
  Mark* mark;
} Event;

API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  (void)flags;
  CHECK(current);
  *event = calloc(1, sizeof(Event));
  return cudaSuccess;
}
API cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaEventDestroy(cudaEvent_t event) {
  pthread_mutex_lock(&lock);
  release(((Event*)event)->mark);
  pthread_mutex_unlock(&lock);
  free(event);
  return cudaSuccess;
}
API cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  CHECK(stream->device);
  Mark* mark = calloc(1, sizeof *mark);
  mark->uses = 2;
  pthread_mutex_lock(&lock);
  release(((Event*)event)->mark);
  ((Event*)event)->mark = mark;
  pthread_mutex_unlock(&lock);
  push_mark(stream, mark, run_record);
  return cudaSuccess;
}
API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { (void)flags; return cudaEventRecord(event, stream); }
API cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  (void)flags;
  Stream* stream = stream_of(handle);
  CHECK(stream->device);
  pthread_mutex_lock(&lock);
  Mark* mark = ((Event*)event)->mark;
  if (mark) mark->uses++;
  pthread_mutex_unlock(&lock);
  if (mark) push_mark(stream, mark, run_wait);
  return cudaSuccess;
}
API cudaEventQuery(cudaEvent_t event) {
  CHECK(current);
  pthread_mutex_lock(&lock);
  Mark* mark = ((Event*)event)->mark;
  bool is_done = !mark || mark->is_done;
  pthread_mutex_unlock(&lock);
  return is_done ? cudaSuccess : cudaErrorNotReady;
}
API cudaEventSynchronize(cudaEvent_t event) {
  pthread_mutex_lock(&lock);
  Mark* mark = ((Event*)event)->mark;
  if (mark) {
    mark->uses++;
    while (!mark->is_done) pthread_cond_wait(&moved, &lock);
    release(mark);
  }
  pthread_mutex_unlock(&lock);
  CHECK(current);
  return cudaSuccess;
}
API cudaEventElapsedTime(float* ms, cudaEvent_t began, cudaEvent_t ended) {
  CHECK(current);
  pthread_mutex_lock(&lock);
  Mark *first = ((Event*)began)->mark, *second = ((Event*)ended)->mark;
  bool is_done = first && second && first->is_done && second->is_done;
  if (is_done) *ms = (float)(second->at_us - first->at_us) / 1e3f;
  pthread_mutex_unlock(&lock);
  return is_done ? cudaSuccess : fail(cudaErrorNotReady);
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

// For `on_host.cpp`: counts a computation.
__attribute__((visibility("default"))) int cuda_stub_computes(int device) {
  reached(COMPUTES, device);
  return fault_of(device);
}
