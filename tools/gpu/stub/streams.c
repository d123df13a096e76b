// Streams do their operations in order, each at once unless one before it waits: for an event, or for NCCL's peers. A
// thread of its own does what had to wait. An operation of a device that fails ends as well, and spoils what it was to
// write: nobody uses it unnoticed.
#include "runtime.h"

#include <stdlib.h>
#include <unistd.h>

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
  int uses, device;
  bool is_done;
  int64_t at_us;
} Mark;

enum { LONG_US = 500000 };
static Stream defaults[MAX_DEVICES];
static Stream* streams;
static bool has_engine;

static bool has_ended(Stream* stream, Op* op) {  // with the lock held
  if (!error_of(stream->device)) return op->run(op);
  op->spoil(op);
  return true;
}
static void* engine(void* unused) {
  (void)unused;
  int64_t moved_us = 0;
  pthread_mutex_lock(&lock);
  for (;;) {
    bool is_busy = false, has_moved = false;
    for (Stream* stream = streams; stream; stream = stream->next) {
      while (stream->head && has_ended(stream, stream->head)) {
        Op* op = stream->head;
        if (!(stream->head = op->next)) stream->tail = &stream->head;
        stream->popped++;
        op->end(op);
        has_moved = true;
      }
      is_busy |= stream->head != NULL;
    }
    if (has_moved) pthread_cond_broadcast(&moved);
    if (!is_busy || has_moved) moved_us = now_us();
    if (!is_busy) {
      pthread_cond_wait(&work, &lock);
    } else if (!has_moved) {
      // What waits long takes no processor, as on a GPU: a process that does is taken for one that computes.
      bool is_long = now_us() > moved_us + LONG_US;
      pthread_mutex_unlock(&lock);
      usleep(is_long ? 5000 : 100);
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
  if (!stream->head && has_ended(stream, op)) {
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

static void keep_mark(Op* op) { ((MarkOp*)op)->mark->is_done = true; }  // who waits for it is told of the failure
static void skip_wait(Op* op) { (void)op; }

static void push_mark(Stream* stream, Mark* mark, bool (*run)(Op*), void (*spoil)(Op*)) {
  MarkOp* op = malloc(sizeof *op);
  *op = (MarkOp){{.run = run, .spoil = spoil, .end = end_mark}, mark};
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
  *mark = (Mark){.uses = 2, .device = stream->device};
  pthread_mutex_lock(&lock);
  release(((Event*)event)->mark);
  ((Event*)event)->mark = mark;
  pthread_mutex_unlock(&lock);
  push_mark(stream, mark, run_record, keep_mark);
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
  if (mark) push_mark(stream, mark, run_wait, skip_wait);
  return cudaSuccess;
}
API cudaEventQuery(cudaEvent_t event) {
  pthread_mutex_lock(&lock);
  Mark* mark = ((Event*)event)->mark;
  bool is_done = !mark || mark->is_done;
  int device = mark ? mark->device : current;
  pthread_mutex_unlock(&lock);
  CHECK(device);
  return is_done ? cudaSuccess : cudaErrorNotReady;
}
API cudaEventSynchronize(cudaEvent_t event) {
  pthread_mutex_lock(&lock);
  Mark* mark = ((Event*)event)->mark;
  int device = mark ? mark->device : current;
  if (mark) {
    mark->uses++;
    while (!mark->is_done) pthread_cond_wait(&moved, &lock);
    release(mark);
  }
  pthread_mutex_unlock(&lock);
  CHECK(device);
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
