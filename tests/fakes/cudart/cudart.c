/* A libcudart whose GPU is this machine's memory: copies really are copies. Knobs, each a list such as
 * "cudaMallocHost,cudaMemcpy" in the environment:
 *   FAKE_CUDART_FAIL   these calls return FAKE_CUDART_CODE (2, out of memory)
 *   FAKE_CUDART_HANG   these calls never return
 *   FAKE_CUDART_CRASH  these calls end the process as a driver's fault does
 *   FAKE_CUDART_LOG    a file: CUDA_VISIBLE_DEVICES and the name of every call but copies, a line each */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FREE_MIB = 256 };

static int is_in(const char *knob, const char *call) {
    const char *list = getenv(knob);
    size_t length = strlen(call);
    for (const char *at = list; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, call, length) && (at[length] == ',' || !at[length])) return 1;
    return 0;
}

static int answer(const char *call) {
    const char *path = getenv("FAKE_CUDART_LOG"), *code = getenv("FAKE_CUDART_CODE");
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    FILE *log = path && strcmp(call, "cudaMemcpy") ? fopen(path, "a") : NULL;
    if (log) fprintf(log, "%s %s\n", visible ? visible : "-", call), fclose(log);
    while (is_in("FAKE_CUDART_HANG", call)) sleep(1);
    if (is_in("FAKE_CUDART_CRASH", call)) abort();
    return is_in("FAKE_CUDART_FAIL", call) ? (code ? atoi(code) : 2) : 0;
}

static int take(const char *call, void **pointer, size_t size) {
    int code = answer(call);
    *pointer = code ? NULL : malloc(size);
    return code ? code : *pointer ? 0 : 2;
}

static int give(const char *call, void *pointer) {
    free(pointer);
    return answer(call);
}

const char *cudaGetErrorString(int code) {
    if (code == 35) return "CUDA driver version is insufficient for CUDA runtime version";
    return code == 2 ? "out of memory" : "unknown error";
}
int cudaSetDevice(int device) { return device ? 101 : answer("cudaSetDevice"); }
int cudaDeviceSynchronize(void) { return answer("cudaDeviceSynchronize"); }
int cudaMalloc(void **pointer, size_t size) { return take("cudaMalloc", pointer, size); }
int cudaMallocHost(void **pointer, size_t size) { return take("cudaMallocHost", pointer, size); }
int cudaFree(void *pointer) { return give("cudaFree", pointer); }
int cudaFreeHost(void *pointer) { return give("cudaFreeHost", pointer); }
int cudaMemset(void *pointer, int value, size_t size) { memset(pointer, value, size); return answer("cudaMemset"); }
int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    int code = kind == 1 || kind == 3 ? answer("cudaMemcpy") : 21; /* invalid direction for memcpy */
    if (!code) memcpy(target, source, size);
    return code;
}
int cudaMemGetInfo(size_t *free, size_t *total) {
    *free = (size_t)FREE_MIB << 20, *total = *free * 2;
    return answer("cudaMemGetInfo");
}
