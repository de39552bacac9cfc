/* A stand-in for libnvidia-ml.so.1. NVML_GPUS has a character for each GPU:
   'a' answers every query, 'p' has neither power nor temperature, 'l' is lost, 'h' hangs, 'c' crashes. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>
#include <signal.h>

typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN = 999 };

static const char *gpus(void) { const char *set = getenv("NVML_GPUS"); return set ? set : ""; }
static char kind(void *device) { return *(const char *)device; }

int nvmlInit_v2(void) { return strcmp(gpus(), "no driver") ? SUCCESS : DRIVER_NOT_LOADED; }
int nvmlDeviceGetCount_v2(unsigned int *count) {
    if (!strcmp(gpus(), "?")) return UNKNOWN;
    *count = (unsigned int)strlen(gpus());
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if (index >= strlen(gpus())) return INVALID_ARGUMENT;
    *device = (void *)(gpus() + index);
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void *device, Utilization *use) {
    switch (kind(device)) {
        case 'l': return GPU_IS_LOST;
        case 'h': for (;;) pause();
        case 'c': kill(getpid(), SIGSEGV);
    }
    use->gpu = 37; use->memory = 5;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    memory->total = 80ull << 30; memory->free = 60ull << 30; memory->used = 20ull << 30;
    return kind(device) == 'l' ? GPU_IS_LOST : SUCCESS;
}
#ifndef OLD
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
    *milliwatts = 251500;
    return kind(device) == 'p' ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetTemperature(void *device, unsigned int sensor, unsigned int *celsius) {
    *celsius = sensor == 0 ? 64 : 0;
    return kind(device) == 'p' ? NOT_SUPPORTED : SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-%02d-uuid", (int)((const char *)device - gpus()));
    return SUCCESS;
}
#endif
