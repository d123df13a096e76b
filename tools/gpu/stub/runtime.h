// What the parts of the CUDA runtime share.
#pragma once
#include "stub.h"

#define API __attribute__((visibility("default"))) cudaError_t
#define CHECK(device) do { cudaError_t fault = fault_of(device); if (fault) return fail(fault); } while (0)

extern __thread int current;  // the thread's device

cudaError_t fail(cudaError_t error);   // keeps it as the thread's last error
cudaError_t error_of(int device);      // of the device itself
cudaError_t fault_of(int device);      // or of its use in this process
size_t memory_bytes(void);
