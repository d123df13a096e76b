// Device memory is the host's: it is allocated, known by its address, and copied as the operations of a stream.
#define _GNU_SOURCE
#include "runtime.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct Range {
  struct Range* next;
  char* start;
  size_t size;
  enum cudaMemoryType type;
  int device;
} Range;

static Range* ranges;
static size_t used[MAX_DEVICES];

size_t memory_bytes(void) {
  const char* given = getenv("CUDA_STUB_MEMORY_MIB");
  return (given ? strtoull(given, NULL, 10) : 8192) << 20;
}
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
  if (copy->source && copy->width > 64 && is_on("CUDA_STUB_WRONG")) copy->target[copy->width / 2] ^= 2;
  return true;
}
static void spoil_copy(Op* op) {
  Copy* copy = (Copy*)op;
  for (size_t row = 0; row < copy->height; row++) memset(copy->target + row * copy->target_pitch, 0xff, copy->width);
}
static cudaError_t copy(Stream* stream, Copy what) {
  CHECK(device_of(stream));
  pthread_mutex_lock(&lock);
  bool is_out = *find(what.source) && (*find(what.source))->type == cudaMemoryTypeDevice && (!*find(what.target) || (*find(what.target))->type == cudaMemoryTypeHost);
  bool is_in = *find(what.target) && (*find(what.target))->type == cudaMemoryTypeDevice && what.source && (!*find(what.source) || (*find(what.source))->type == cudaMemoryTypeHost);
  bool is_pageable = (is_out && !*find(what.target)) || (is_in && !*find(what.source));
  pthread_mutex_unlock(&lock);
  if (is_out || is_in) reached(is_out ? COPIES_OUT : COPIES_IN, device_of(stream));
  CHECK(device_of(stream));
  Copy* op = malloc(sizeof *op);
  *op = what;
  op->op = (Op){.run = run_copy, .spoil = spoil_copy, .end = free_op};
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
