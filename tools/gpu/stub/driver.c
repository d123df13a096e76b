// The driver's name, libcuda.so.1, and the few of its functions that torch looks up.
#include <stddef.h>

#pragma GCC visibility push(default)

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) { (void)device; *flags = 0; *is_active = 1; return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuCtxSetCurrent(void* context) { (void)context; return 0; }
int cuGetErrorString(int error, const char** text) { (void)error; *text = "an error of the stub driver"; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { (void)attribute, (void)device; *value = 0; return 0; }
