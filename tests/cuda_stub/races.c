// Two ranks in one process, each with streams, events that another thread asks for, sums, messages and an abort: built
// with the stub's sources under a thread sanitizer. Ends with 0 if all numbers were right.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

enum { COUNT = 200000, STEPS = 40 };

static ncclUniqueId id;
static cudaEvent_t summed[2];
static atomic_bool is_over;

static void require(int condition) { if (!condition) abort(); }

static void* ask(void* given) {
  int rank = (int)(intptr_t)given;
  cudaSetDevice(rank);
  while (!is_over) {
    cudaEventQuery(summed[rank]);
    usleep(50);
  }
  return NULL;
}

static void* take_part(void* given) {
  int rank = (int)(intptr_t)given;
  size_t size = COUNT * sizeof(float);
  ncclComm_t comm;
  cudaStream_t sums, copies;
  float *values, *copied, *host;
  cudaSetDevice(rank);
  require(ncclCommInitRank(&comm, 2, id, rank) == ncclSuccess);
  cudaStreamCreate(&sums);
  cudaStreamCreate(&copies);
  cudaMalloc((void**)&values, size);
  cudaMalloc((void**)&copied, size);
  cudaHostAlloc((void**)&host, size, 0);
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++) host[i] = (float)(rank + step);
    cudaMemcpyAsync(values, host, size, cudaMemcpyHostToDevice, sums);
    ncclAllReduce(values, values, COUNT, ncclFloat32, ncclSum, comm, sums);
    cudaEventRecord(summed[rank], sums);
    cudaStreamWaitEvent(copies, summed[rank], 0);
    cudaMemcpyAsync(copied, values, size, cudaMemcpyDeviceToDevice, copies);
    cudaMemcpyAsync(host, copied, size, cudaMemcpyDeviceToHost, copies);
    if (rank == 0) ncclSend(copied, COUNT, ncclFloat32, 1, comm, copies);
    else ncclRecv(values, COUNT, ncclFloat32, 0, comm, copies);
    cudaEventSynchronize(summed[rank]);
    cudaStreamSynchronize(copies);
    require(host[COUNT - 1] == (float)(2 * step + 1));
  }
  if (rank == 0) ncclAllReduce(values, values, COUNT, ncclFloat32, ncclSum, comm, sums);  // the other never comes
  ncclCommAbort(comm);
  cudaDeviceSynchronize();
  require(rank || values[0] != values[0]);
  return NULL;
}

int main(void) {
  pthread_t ranks[2], asking[2];
  ncclGetUniqueId(&id);
  for (intptr_t rank = 0; rank < 2; rank++) {
    cudaSetDevice((int)rank);
    cudaEventCreate(&summed[rank]);
  }
  for (intptr_t rank = 0; rank < 2; rank++) {
    pthread_create(&ranks[rank], NULL, take_part, (void*)rank);
    pthread_create(&asking[rank], NULL, ask, (void*)rank);
  }
  for (int rank = 0; rank < 2; rank++) pthread_join(ranks[rank], NULL);
  is_over = 1;
  for (int rank = 0; rank < 2; rank++) pthread_join(asking[rank], NULL);
  return 0;
}
