// Steers a device from outside: a file that all processes of a test map, with a row for each device of the machine.
#define _GNU_SOURCE
#include "stub.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static Row unshared[MAX_DEVICES];
static Row* rows;
static pthread_once_t once = PTHREAD_ONCE_INIT;

int64_t now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000ll + t.tv_nsec / 1000;
}

bool is_on(const char* name) {
  const char* given = getenv(name);
  return given && atoi(given);
}

static void open_control(void) {
  const char* directory = getenv("CUDA_STUB_DIR");
  rows = unshared;
  if (!directory) return;
  char path[4096];
  snprintf(path, sizeof path, "%s/control", directory);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof unshared)) {
    perror(path);
    abort();
  }
  rows = mmap(NULL, sizeof unshared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (rows == MAP_FAILED) abort();
}

Row* row_of(int device) {
  pthread_once(&once, open_control);
  return &rows[machine_device(device)];
}

static void do_act(int64_t act, Row* row) {
  switch (act) {
    case KILL: kill(getpid(), SIGKILL); break;
    case FREEZE: kill(getpid(), SIGSTOP); break;
    case BREAK_LINKS: row->links_broken = 1; break;
    case BREAK_DEVICE: row->device_error = cudaErrorLaunchFailure; break;
  }
}

typedef struct {
  Row* row;
  int64_t act, delay_us;
} Later;

static void* act_later(void* given) {
  Later later = *(Later*)given;
  free(given);
  usleep(later.delay_us);
  do_act(later.act, later.row);
  return NULL;
}

void reached(enum Moment moment, int device) {
  Row* row = row_of(device);
  row->pid = getpid();
  int64_t count = ++row->counts[moment];
  if (!row->act || row->moment != moment || count < row->at) return;
  int64_t act = atomic_exchange(&row->act, NOTHING);
  if (!act) return;
  if (!row->delay_us) {
    do_act(act, row);
    return;
  }
  Later* later = malloc(sizeof *later);
  *later = (Later){row, act, row->delay_us};
  pthread_t thread;
  pthread_create(&thread, NULL, act_later, later);
  pthread_detach(thread);
}
