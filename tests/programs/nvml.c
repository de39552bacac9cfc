/* A stand-in for libnvidia-ml.so.1. NVML_GPUS has a character for each GPU:
   'a' answers every query, 'p' has neither power nor temperature, 'l' is lost, 'h' hangs, 'c' crashes.
   NVML_USERS names a file with a line for each GPU: the pids that compute on it. NVML_SUFFIX ends each UUID. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>
#include <signal.h>

typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN = 999 };

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
    const char *suffix = getenv("NVML_SUFFIX");
    snprintf(uuid, length, "GPU-%02d-%s", (int)((const char *)device - gpus()), suffix ? suffix : "uuid");
    return SUCCESS;
}
#endif

typedef struct { unsigned int pid; unsigned long long memory; } FirstProcess;
typedef struct { unsigned int pid; unsigned long long memory; unsigned int gpu_instance, compute_instance; } Process;

static int list_processes(void *device, unsigned int *count, void *processes, size_t size) {
    if (kind(device) == 'p') return NOT_SUPPORTED;
    if (kind(device) == 'h') for (;;) pause();
    unsigned int room = *count, gpu = (unsigned int)((const char *)device - gpus());
    char line[1 << 14] = "", *at = line;
    const char *name = getenv("NVML_USERS");
    FILE *users = name ? fopen(name, "r") : NULL;
    if (!users) { *count = 0; return SUCCESS; }
    for (unsigned int number = 0; number <= gpu; number++) {
        line[0] = 0;
        if (!fgets(line, sizeof line, users)) line[0] = 0;
    }
    fclose(users);
    *count = 0;
    for (unsigned long pid; (pid = strtoul(at, &at, 10)) != 0;) {
        if (*count < room) *(unsigned int *)((char *)processes + *count * size) = (unsigned int)pid;
        ++*count;
    }
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}
#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, void *processes) {
    return list_processes(device, count, processes, sizeof(Process));
}
#else
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, void *processes) {
    return list_processes(device, count, processes, sizeof(FirstProcess));
}
#endif
