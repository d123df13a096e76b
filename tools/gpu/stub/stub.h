// What the parts of the stub device share: streams and their operations, and the file through which tests steer it.
#pragma once
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_DEVICES = 16 };

// --- the control file (`device.py` has the same table): one row of 64-bit words for each device of the machine

enum Moment { CONNECTS, SUMS, SENDS, RECEIVES, COPIES_OUT, COPIES_IN, COMPUTES, HAS_SUMMED, ABORTS, NUM_MOMENTS };
enum Act { NOTHING, KILL, FREEZE, BREAK_LINKS, BREAK_DEVICE };

typedef struct {
  _Atomic int64_t pid;           // of the process that used the device last
  _Atomic int64_t act;           // an Act, to be done once
  _Atomic int64_t moment, at;    // when: at the Moment's number `at`, counted from 1
  _Atomic int64_t delay_us;      // and how long after it
  _Atomic int64_t links_broken;  // its communicators report an error of their peers', and carry nothing more
  _Atomic int64_t device_error;  // a cudaError_t that every call returns
  _Atomic int64_t slow_us;       // how much later each sum and message ends
  _Atomic int64_t counts[NUM_MOMENTS];
} Row;

Row* row_of(int device);
void reached(enum Moment moment, int device);
bool is_on(const char* name);    // whether a variable of the stub is set, and not to 0
int machine_device(int device);  // CUDA_VISIBLE_DEVICES maps a process's devices to the machine's

// --- streams: operations in their order, each done when its `run` says so

typedef struct Op Op;
struct Op {
  Op* next;
  bool (*run)(Op*);    // with the lock held, and again until it returns true
  void (*spoil)(Op*);  // in place of `run` once the device has failed
  void (*end)(Op*);    // releases what it holds
};

typedef struct Stream Stream;

Stream* stream_of(cudaStream_t handle);
int device_of(const Stream* stream);
void push(Stream* stream, Op* op);
void wait_for_device(int device);
int current_device(void);
int64_t now_us(void);

extern pthread_mutex_t lock;   // guards streams, marks and communicators
extern pthread_cond_t moved;   // something has been done
void wake_engine(void);        // with the lock held
