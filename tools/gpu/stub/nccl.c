// An NCCL whose links lie in a file that the members map, so that members can be processes that end, freeze or crawl.
//
// A sum or a message is an operation of its stream, and ends once all bytes have come, or once its communicator is
// aborted or its device has failed: then what it wrote is filled with 0xff, which is NaN, so that nobody uses it
// unnoticed. A peer that has ended is an asynchronous error to those who have an operation under way
// (CUDA_STUB_SILENT=1: to nobody, as within a node). An abort takes CUDA_STUB_ABORT_MS, and then waits for its device as
// cudaFree does (CUDA_STUB_ABORT_WAITS=0: it does not).
#define _GNU_SOURCE
// No use is made of their types, and not all of them are C.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include "stub.h"

#include <fcntl.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default"))) ncclResult_t

enum { MAX_RANKS = 16, CHUNK = 1 << 18, NUM_CHUNKS = 2, DEATH_CHECK_US = 20000 };

typedef struct {  // counters only grow
  _Atomic int64_t pid, started, has_joined, has_left;
  _Atomic int64_t gpu;                     // the device and its host, of which no two may be the same
  _Atomic uint64_t put, taken;             // chunks of collectives
  _Atomic uint64_t sent[MAX_RANKS];        // bytes, to each
  _Atomic uint64_t received[MAX_RANKS];    // bytes, from each
} Member;

typedef struct {
  Member members[MAX_RANKS];
  char sums[MAX_RANKS][NUM_CHUNKS][CHUNK];
  char rings[MAX_RANKS][MAX_RANKS][CHUNK];
} World;

struct ncclComm {
  World* world;
  int rank, size, device, num_open;
  bool is_aborted, is_over;
  ncclResult_t error;
  int64_t checked_us;
};

typedef struct NcclOp {
  Op op;
  struct NcclOp* sibling;  // of the same group call: they go on side by side
  ncclComm_t comm;
  enum Moment moment;
  enum Kind { SUM, GATHER, SCATTER } kind;
  const char* source;
  char* target;
  size_t size, at;   // of what this member gives, or takes in a message
  size_t target_size;
  ncclDataType_t type;
  int peer;
  bool has_put, is_whole;
  int64_t ends_us;
} NcclOp;

static __thread int group_depth;
static __thread struct { NcclOp* op; Stream* stream; } grouped[64];
static __thread int num_grouped;

static int64_t started_at(int64_t pid) {  // in the kernel's ticks; 0 of a process that does not live
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return 0;
  text[length] = 0;
  char* at = strrchr(text, ')');
  char state;
  unsigned long long started;
  if (!at || sscanf(at + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state, &started) != 2) return 0;
  return state == 'Z' || state == 'X' ? 0 : (int64_t)started;
}
static bool is_lost(Member* member) {
  return member->has_joined && (member->has_left || started_at(member->pid) != member->started);
}

// With the lock held, while an operation waits: NCCL watches the connections that it uses.
static void look_for_losses(ncclComm_t comm) {
  if (row_of(comm->device)->links_broken) comm->error = ncclRemoteError;
  if (comm->error || now_us() < comm->checked_us + DEATH_CHECK_US || is_on("CUDA_STUB_SILENT")) return;
  comm->checked_us = now_us();
  for (int rank = 0; rank < comm->size; rank++)
    if (rank != comm->rank && is_lost(&comm->world->members[rank])) comm->error = ncclRemoteError;
}

// --- operations

static size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}
static float of_bfloat16(uint16_t bits) { uint32_t wide = (uint32_t)bits << 16; float out; memcpy(&out, &wide, 4); return out; }
static uint16_t to_bfloat16(float value) {
  uint32_t wide;
  memcpy(&wide, &value, 4);
  if (value != value) return 0x7fc0;
  return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

#define FOLD(type) do { type sum = 0; for (int r = 0; r < comm->size; r++) sum += ((type*)parts[r])[i]; ((type*)target)[i] = sum; } while (0)
static void add(ncclComm_t comm, char* target, char* parts[], size_t size, ncclDataType_t type) {
  size_t count = size / size_of(type);
  for (size_t i = 0; i < count; i++) switch (type) {
    case ncclFloat32: FOLD(float); break;
    case ncclFloat64: FOLD(double); break;
    case ncclFloat16: FOLD(_Float16); break;
    case ncclInt32: FOLD(int32_t); break;
    case ncclInt64: FOLD(int64_t); break;
    case ncclUint64: FOLD(uint64_t); break;
    case ncclUint32: FOLD(uint32_t); break;
    case ncclInt8: FOLD(int8_t); break;
    case ncclBfloat16: {
      float sum = 0;
      for (int r = 0; r < comm->size; r++) sum += of_bfloat16(((uint16_t*)parts[r])[i]);
      ((uint16_t*)target)[i] = to_bfloat16(sum);
      break;
    }
    default: FOLD(uint8_t);
  }
}
// Takes from all members' parts, of `size` bytes each at the place that the operation has come to.
static void take(NcclOp* op, char* parts[], size_t size) {
  ncclComm_t comm = op->comm;
  if (op->kind == GATHER)
    for (int rank = 0; rank < comm->size; rank++) memcpy(op->target + rank * op->size + op->at, parts[rank], size);
  if (op->kind == SUM) add(comm, op->target + op->at, parts, size, op->type);
  if (op->kind != SCATTER) return;
  size_t first = comm->rank * op->target_size, stop = first + op->target_size, end = op->at + size;
  if (first < op->at) first = op->at;
  if (stop > end) stop = end;
  if (first >= stop) return;
  for (int rank = 0; rank < comm->size; rank++) parts[rank] += first - op->at;
  add(comm, op->target + first - comm->rank * op->target_size, parts, stop - first, op->type);
}
// Each chunk is put into the member's own slot; once all have put theirs, each takes from all, in the order of ranks.
static bool move_collective(NcclOp* op) {
  ncclComm_t comm = op->comm;
  Member *members = comm->world->members, *own = &members[comm->rank];
  while (op->at < op->size) {
    size_t size = op->size - op->at < CHUNK ? op->size - op->at : CHUNK;
    uint64_t chunk = own->taken;
    if (!op->has_put) {
      for (int rank = 0; rank < comm->size; rank++)
        if (members[rank].taken + NUM_CHUNKS <= chunk) return false;
      memcpy(comm->world->sums[comm->rank][chunk % NUM_CHUNKS], op->source + op->at, size);
      own->put = chunk + 1;
      op->has_put = true;
    }
    char* parts[MAX_RANKS];
    for (int rank = 0; rank < comm->size; rank++) {
      if (members[rank].put <= chunk) return false;
      parts[rank] = comm->world->sums[rank][chunk % NUM_CHUNKS];
    }
    take(op, parts, size);
    own->taken = chunk + 1;
    op->has_put = false;
    op->at += size;
  }
  return true;
}
static bool move_message(NcclOp* op) {
  bool sends = op->source != NULL;
  int rank = op->comm->rank, from = sends ? rank : op->peer, to = sends ? op->peer : rank;
  World* world = op->comm->world;
  _Atomic uint64_t *sent = &world->members[from].sent[to], *received = &world->members[to].received[from];
  while (op->at < op->size) {
    uint64_t begin = sends ? *sent : *received;
    size_t room = sends ? CHUNK - (size_t)(begin - *received) : (size_t)(*sent - begin), place = begin % CHUNK;
    size_t size = op->size - op->at;
    if (size > room) size = room;
    if (size > CHUNK - place) size = CHUNK - place;
    if (!size) return false;
    char* ring = world->rings[from][to] + place;
    if (sends) memcpy(ring, op->source + op->at, size);
    else memcpy(op->target + op->at, ring, size);
    *(sends ? sent : received) = begin + size;
    op->at += size;
  }
  return true;
}
static void spoil(NcclOp* op) {
  if (op->target && !op->is_whole) memset(op->target, 0xff, op->target_size);
}
static bool run_one(NcclOp* op) {
  ncclComm_t comm = op->comm;
  if (op->is_whole) return true;
  if (comm->is_aborted) {
    spoil(op);
    return true;
  }
  // A communicator with an error goes on to spin until it is aborted.
  if (!comm->error && (op->moment == SUMS ? move_collective(op) : move_message(op))) {
    if (!op->ends_us) op->ends_us = now_us() + row_of(comm->device)->slow_us;
    if (now_us() < op->ends_us) return false;
    if (op->target && is_on("CUDA_STUB_WRONG")) op->target[op->target_size / 2] ^= 1;
    if (op->moment == SUMS) reached(HAS_SUMMED, comm->device);
    return op->is_whole = true;
  }
  look_for_losses(comm);
  return false;
}
static bool run_group(Op* given) {
  bool is_done = true;
  for (NcclOp* op = (NcclOp*)given; op; op = op->sibling) is_done &= run_one(op);
  return is_done;
}
static void spoil_group(Op* given) {
  for (NcclOp* op = (NcclOp*)given; op; op = op->sibling) spoil(op);
}
static void release(ncclComm_t comm) {  // with the lock held
  if (comm->num_open || !comm->is_over) return;
  munmap(comm->world, sizeof(World));
  free(comm);
}
static void end_group(Op* given) {
  for (NcclOp *op = (NcclOp*)given, *next; op; op = next) {
    next = op->sibling;
    op->comm->num_open--;
    release(op->comm);
    free(op);
  }
}

static ncclResult_t post(NcclOp what, cudaStream_t handle) {
  ncclComm_t comm = what.comm;
  reached(what.moment, comm->device);
  if (row_of(comm->device)->device_error) return ncclUnhandledCudaError;
  if (comm->is_aborted) return ncclInvalidUsage;
  NcclOp* op = malloc(sizeof *op);
  *op = what;
  op->op = (Op){.run = run_group, .spoil = spoil_group, .end = end_group};
  pthread_mutex_lock(&lock);
  comm->num_open++;
  pthread_mutex_unlock(&lock);
  if (!group_depth) {
    push(stream_of(handle), &op->op);
    return ncclSuccess;
  }
  if (num_grouped == 64) return ncclInvalidUsage;
  grouped[num_grouped].op = op;
  grouped[num_grouped++].stream = stream_of(handle);
  return ncclSuccess;
}
API ncclGroupStart(void) { group_depth++; return ncclSuccess; }
API ncclGroupEnd(void) {
  if (--group_depth) return ncclSuccess;
  for (int i = 0; i < num_grouped; i++) {
    NcclOp* first = grouped[i].op;
    if (!first) continue;
    for (int j = i + 1; j < num_grouped; j++)
      if (grouped[j].op && grouped[j].stream == grouped[i].stream) {
        grouped[j].op->sibling = first->sibling;
        first->sibling = grouped[j].op;
        grouped[j].op = NULL;
      }
    push(grouped[i].stream, &first->op);
  }
  num_grouped = 0;
  return ncclSuccess;
}
API ncclAllReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  if (reduction != ncclSum) return ncclInvalidArgument;  // the only one that it has
  size_t size = count * size_of(type);
  return post((NcclOp){.comm = comm, .moment = SUMS, .kind = SUM, .source = source, .target = target, .size = size, .target_size = size, .type = type}, stream);
}
API ncclAllGather(const void* source, void* target, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  size_t size = count * size_of(type);
  return post((NcclOp){.comm = comm, .moment = SUMS, .kind = GATHER, .source = source, .target = target, .size = size, .target_size = comm->size * size, .type = type}, stream);
}
API ncclReduceScatter(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  if (reduction != ncclSum) return ncclInvalidArgument;
  size_t size = count * size_of(type);
  return post((NcclOp){.comm = comm, .moment = SUMS, .kind = SCATTER, .source = source, .target = target, .size = comm->size * size, .target_size = size, .type = type}, stream);
}
API ncclSend(const void* source, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return post((NcclOp){.comm = comm, .moment = SENDS, .source = source, .size = count * size_of(type), .peer = peer}, stream);
}
API ncclRecv(void* target, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return post((NcclOp){.comm = comm, .moment = RECEIVES, .target = target, .size = count * size_of(type), .target_size = count * size_of(type), .peer = peer}, stream);
}

// --- communicators

API ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
API ncclGetUniqueId(ncclUniqueId* id) {
  static _Atomic int number;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "world-%d-%lld-%d", getpid(), (long long)now_us(), number++);
  return ncclSuccess;
}
static World* open_world(const char* name) {
  const char* directory = getenv("CUDA_STUB_DIR");
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", directory ? directory : "/tmp", name);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return NULL;
  World* world = ftruncate(file, sizeof(World)) ? MAP_FAILED : mmap(NULL, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return world == MAP_FAILED ? NULL : world;
}
static int64_t gpu_of(int device) {  // a host is what NCCL_HOSTID says, as for NCCL
  const char* host = getenv("NCCL_HOSTID");
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (; host && *host; host++) hash = (hash ^ (unsigned char)*host) * 1099511628211u;
  return (int64_t)(hash * MAX_DEVICES) + machine_device(device);
}
// Returns ncclInProgress until all have joined, and an error once one of those that have joined is lost.
static ncclResult_t state_of(ncclComm_t comm) {
  int joined = 0;
  Member* members = comm->world->members;
  for (int rank = 0; rank < comm->size; rank++) {
    joined += members[rank].has_joined != 0;
    if (comm->error == ncclInProgress && is_lost(&members[rank])) return ncclRemoteError;
    for (int other = 0; other < rank; other++)
      if (members[rank].has_joined && members[other].has_joined && members[rank].gpu == members[other].gpu) return ncclInvalidUsage;
  }
  return joined == comm->size ? ncclSuccess : ncclInProgress;
}
API ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm) return ncclInvalidArgument;
  pthread_mutex_lock(&lock);
  if (comm->error == ncclInProgress) comm->error = state_of(comm);
  if (row_of(comm->device)->links_broken) comm->error = ncclRemoteError;
  *error = comm->error;
  pthread_mutex_unlock(&lock);
  return ncclSuccess;
}
API ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (size > MAX_RANKS) return ncclInvalidArgument;
  reached(CONNECTS, current_device());
  ncclComm_t comm = calloc(1, sizeof *comm);
  *comm = (struct ncclComm){.rank = rank, .size = size, .device = current_device(), .error = ncclInProgress};
  if (!(comm->world = open_world(id.internal))) return ncclSystemError;
  Member* own = &comm->world->members[rank];
  own->pid = getpid();
  own->started = started_at(getpid());
  own->gpu = gpu_of(comm->device);
  own->has_joined = 1;
  *out = comm;
  if (config && !config->blocking) return ncclInProgress;
  ncclResult_t error;
  while (ncclCommGetAsyncError(comm, &error), error == ncclInProgress) usleep(500);
  return error;
}
API ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) { return ncclCommInitRankConfig(comm, size, id, rank, NULL); }
static void leave(ncclComm_t comm) {
  comm->world->members[comm->rank].has_left = 1;
  pthread_mutex_lock(&lock);
  comm->is_over = true;
  release(comm);
  pthread_mutex_unlock(&lock);
}
API ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  const char *ms = getenv("CUDA_STUB_ABORT_MS"), *waits = getenv("CUDA_STUB_ABORT_WAITS");
  reached(ABORTS, comm->device);
  pthread_mutex_lock(&lock);
  comm->is_aborted = true;
  wake_engine();
  pthread_mutex_unlock(&lock);
  usleep((ms ? atoi(ms) : 5) * 1000);
  if (!waits || atoi(waits)) wait_for_device(comm->device);
  leave(comm);
  return ncclSuccess;
}
API ncclCommFinalize(ncclComm_t comm) { if (comm) wait_for_device(comm->device); return ncclSuccess; }
API ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  wait_for_device(comm->device);
  leave(comm);
  return ncclSuccess;
}
API ncclCommCount(const ncclComm_t comm, int* size) { *size = comm->size; return ncclSuccess; }
API ncclCommUserRank(const ncclComm_t comm, int* rank) { *rank = comm->rank; return ncclSuccess; }
API ncclCommCuDevice(const ncclComm_t comm, int* device) { *device = comm->device; return ncclSuccess; }
__attribute__((visibility("default"))) const char* ncclGetErrorString(ncclResult_t result) {
  if (result == ncclInvalidUsage) return "invalid usage";
  return result == ncclRemoteError ? "remote process exited or there was a network error" : "an error of the stub NCCL";
}
__attribute__((visibility("default"))) const char* ncclGetLastError(ncclComm_t comm) {
  return comm && comm->error == ncclInvalidUsage ? "Duplicate GPU detected" : "";
}
