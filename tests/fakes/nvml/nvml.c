/* A libnvidia-ml.so.1 that answers NVML's ABI from a description of a machine: the file that FAKE_NVML_MACHINE names,
 * lines of `key=value`, written by machines.py. The structures are those of nvidia-ml-py's ctypes definitions.
 *
 *   driver=580.82.07                     gpu.0.name=NVIDIA GeForce RTX 4090       gpu.0.mig.1.uuid=MIG-…
 *   return.nvmlInitWithFlags=18          a code for every call of a function
 *   gpu.1.return.nvmlDeviceGetName=15    the same for one device
 *   hang.nvmlDeviceGetCount_v2=1         it never returns
 *   crash.nvmlDeviceGetName=1            it ends the process by SIGSEGV
 *
 * What a description does not say is NOT_SUPPORTED. A value holds bytes as \xNN. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE, UNKNOWN = 999 };
enum { CLOCK_SM = 1, CLOCK_MEMORY = 2, WORD = 512, MIG_STRIDE = 100, LINKS = 18 };


typedef intptr_t Device; /* gpu + 1, or (gpu + 1) * MIG_STRIDE + slice + 1 */
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned sms, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices; unsigned long long mib; } Attributes;

_Static_assert(sizeof(Memory) == 24 && sizeof(MemoryV2) == 40 && sizeof(Pci) == 68, "nvidia-ml-py's layouts");
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long time_us; unsigned sm, memory, encoder, decoder; } Ran;

_Static_assert(sizeof(Utilization) == 8 && sizeof(Ran) == 32, "nvidia-ml-py's layouts");
_Static_assert(sizeof(Process) == 24 && sizeof(Attributes) == 40, "nvidia-ml-py's layouts");

static char *machine;

static const char *find(const char *key) {
    size_t length = strlen(key);
    for (const char *line = machine; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        if (!strncmp(line, key, length) && line[length] == '=') return line + length + 1;
    return NULL;
}

static int text(const char *key, char *out, size_t size) {
    const char *value = find(key);
    size_t at = 0;
    if (!value) return NOT_SUPPORTED;
    while (*value && *value != '\n') {
        unsigned byte = (unsigned char)*value;
        int is_escape = value[0] == '\\' && value[1] == 'x' && sscanf(value + 2, "%2x", &byte) == 1;
        if (at + 1 >= size) return INSUFFICIENT_SIZE;
        out[at++] = (char)byte;
        value += is_escape ? 4 : 1;
    }
    out[at] = 0;
    return SUCCESS;
}

static int number(const char *key, unsigned long long *out) {
    const char *value = find(key);
    if (!value) return NOT_SUPPORTED;
    *out = strtoull(value, NULL, 10);
    return SUCCESS;
}

static void key_of(char *out, Device device, const char *name) {
    if (device >= MIG_STRIDE)
        snprintf(out, WORD, "gpu.%d.mig.%d.%s", (int)(device / MIG_STRIDE) - 1, (int)(device % MIG_STRIDE) - 1, name);
    else snprintf(out, WORD, "gpu.%d.%s", (int)device - 1, name);
}

/* What the description does to this call; SUCCESS: answer it. */
static int told(const char *call, Device device) {
    char key[WORD], name[WORD];
    unsigned long long code;
    if (!machine && strcmp(call, "nvmlInitWithFlags")) return UNINITIALIZED;
    snprintf(key, WORD, "hang.%s", call);
    while (find(key)) sleep(1);
    snprintf(key, WORD, "crash.%s", call);
    if (find(key)) raise(SIGSEGV);
    snprintf(name, WORD, "return.%s", call);
    if (!number(name, &code)) return (int)code;
    if (device) key_of(key, device, name);
    return device && !number(key, &code) ? (int)code : SUCCESS;
}

static int device_text(const char *call, Device device, const char *name, char *out, unsigned size) {
    char key[WORD];
    int code = told(call, device);
    key_of(key, device, name);
    return code ? code : text(key, out, size);
}

static int device_number(const char *call, Device device, const char *name, unsigned long long *out) {
    char key[WORD];
    int code = told(call, device);
    key_of(key, device, name);
    return code ? code : number(key, out);
}

static int device_unsigned(const char *call, Device device, const char *name, unsigned *out) {
    unsigned long long value = 0;
    int code = device_number(call, device, name, &value);
    if (!code) *out = (unsigned)value;
    return code;
}

/* One file and one process: a description is read once, unless it has a line reread=1: then at each count of GPUs. */
static int read_machine(void) {
    const char *path = getenv("FAKE_NVML_MACHINE");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return UNKNOWN;
    char *read = calloc(1, 1 << 20);
    if (!fread(read, 1, (1 << 20) - 1, file)) read[0] = 0;
    fclose(file);
    free(machine);
    machine = read;
    return SUCCESS;
}
int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return read_machine() ? UNKNOWN : told("nvmlInitWithFlags", 0);
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return told("nvmlShutdown", 0); }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "an error of the fake"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    int code = told("nvmlSystemGetDriverVersion", 0);
    return code ? code : text("driver", out, size);
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    unsigned long long value = 0;
    int code = told("nvmlSystemGetCudaDriverVersion_v2", 0);
    if (!code) code = number("cuda", &value);
    *out = (int)value;
    return code;
}
int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    char key[WORD];
    int code = told("nvmlSystemGetProcessName", 0);
    snprintf(key, WORD, "process.%u", pid);
    return code ? code : text(key, out, size) ? NOT_FOUND : SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *out) {
    unsigned long long value = 0;
    if (find("reread") && read_machine()) return UNKNOWN;
    int code = told("nvmlDeviceGetCount_v2", 0);
    if (!code) code = number("gpus", &value);
    *out = (unsigned)value;
    return code;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
    unsigned long long gpus = 0;
    int code = told("nvmlDeviceGetHandleByIndex_v2", index + 1);
    if (code) return code;
    if (number("gpus", &gpus) || index >= gpus) return INVALID_ARGUMENT;
    *out = (Device)index + 1;
    return SUCCESS;
}
int nvmlDeviceGetName(Device d, char *out, unsigned size) { return device_text("nvmlDeviceGetName", d, "name", out, size); }
int nvmlDeviceGetUUID(Device d, char *out, unsigned size) { return device_text("nvmlDeviceGetUUID", d, "uuid", out, size); }

int nvmlDeviceGetMemoryInfo(Device d, Memory *out) {
    unsigned long long total = 0, free = 0;
    int code = device_number("nvmlDeviceGetMemoryInfo", d, "memory_total", &total);
    if (!code) code = device_number("nvmlDeviceGetMemoryInfo", d, "memory_free", &free);
    *out = (Memory){total, free, total - free};
    return code;
}
int nvmlDeviceGetMemoryInfo_v2(Device d, MemoryV2 *out) {
    Memory plain;
    unsigned long long reserved = 0;
    int code = told("nvmlDeviceGetMemoryInfo_v2", d);
    if (!code) code = nvmlDeviceGetMemoryInfo(d, &plain);
    device_number("nvmlDeviceGetMemoryInfo", d, "memory_reserved", &reserved);
    if (!code) *out = (MemoryV2){out->version, plain.total, reserved, plain.free, plain.used - reserved};
    return code;
}
int nvmlDeviceGetPciInfo_v3(Device d, Pci *out) {
    *out = (Pci){.domain = 0};
    return device_text("nvmlDeviceGetPciInfo_v3", d, "pci_bus_id", out->bus_id, sizeof out->bus_id);
}
int nvmlDeviceGetCudaComputeCapability(Device d, int *major, int *minor) {
    unsigned long long sm = 0;
    int code = device_number("nvmlDeviceGetCudaComputeCapability", d, "sm", &sm);
    *major = (int)sm / 10, *minor = (int)sm % 10;
    return code;
}
int nvmlDeviceGetMaxClockInfo(Device d, int type, unsigned *out) {
    const char *name = type == CLOCK_MEMORY ? "memory_clock_mhz" : type == CLOCK_SM ? "sm_clock_mhz" : "";
    return device_unsigned("nvmlDeviceGetMaxClockInfo", d, name, out);
}
int nvmlDeviceGetClockInfo(Device d, int type, unsigned *out) {
    const char *name = type == CLOCK_MEMORY ? "memory_clock_now" : type == CLOCK_SM ? "sm_clock_now" : "";
    return device_unsigned("nvmlDeviceGetClockInfo", d, name, out);
}
int nvmlDeviceGetCurrentClocksEventReasons(Device d, unsigned long long *out) {
    return device_number("nvmlDeviceGetCurrentClocksEventReasons", d, "reasons", out);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device d, unsigned long long *out) {
    return device_number("nvmlDeviceGetCurrentClocksThrottleReasons", d, "reasons", out);
}

/* gpu.0.energy_mj=1000,5000: each call is told the next of them, and the last from then on. */
int nvmlDeviceGetTotalEnergyConsumption(Device d, unsigned long long *out) {
    static unsigned calls[MIG_STRIDE * MIG_STRIDE];
    char key[WORD], list[WORD];
    int code = told("nvmlDeviceGetTotalEnergyConsumption", d);
    key_of(key, d, "energy_mj");
    if (!code) code = text(key, list, WORD);
    if (code) return code;
    char *value = list;
    for (unsigned each = calls[d % (MIG_STRIDE * MIG_STRIDE)]++; each && strchr(value, ','); each--) value = strchr(value, ',') + 1;
    *out = strtoull(value, NULL, 10);
    return SUCCESS;
}

/* gpu.0.utilization=90,40,0: each call is told the next of them, and the last from then on. */
int nvmlDeviceGetUtilizationRates(Device d, Utilization *out) {
    static unsigned calls[MIG_STRIDE * MIG_STRIDE];
    char key[WORD], list[WORD];
    int code = told("nvmlDeviceGetUtilizationRates", d);
    key_of(key, d, "utilization");
    if (!code) code = text(key, list, WORD);
    if (code) return code;
    char *value = list;
    for (unsigned each = calls[d % (MIG_STRIDE * MIG_STRIDE)]++; each && strchr(value, ','); each--) value = strchr(value, ',') + 1;
    *out = (Utilization){(unsigned)strtoul(value, NULL, 10), 0};
    return SUCCESS;
}

/* gpu.0.running=1, gpu.0.running.0=4242:37: pid and per cent, a moment ago. Without the first line: not supported. */
int nvmlDeviceGetProcessUtilization(Device d, Ran *out, unsigned *count, unsigned long long since_us) {
    struct timeval now;
    char key[WORD], name[WORD], value[WORD];
    unsigned long long entries = 0;
    int code = device_number("nvmlDeviceGetProcessUtilization", d, "running", &entries);
    gettimeofday(&now, NULL);
    unsigned long long now_us = (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_usec;
    if (code) return code;
    if (!entries || now_us < since_us) return NOT_FOUND;
    for (unsigned each = 0; out && each < entries && each < *count; each++) {
        char *end;
        snprintf(name, WORD, "running.%u", each);
        key_of(key, d, name);
        if (text(key, value, WORD)) return UNKNOWN;
        out[each] = (Ran){.pid = (unsigned)strtoul(value, &end, 10), .time_us = now_us};
        if (*end == ':') out[each].sm = (unsigned)strtoul(end + 1, NULL, 10);
    }
    int is_short = !out || *count < entries;
    *count = (unsigned)entries;
    return is_short ? INSUFFICIENT_SIZE : SUCCESS;
}

#define UNSIGNED(call, name) \
    int call(Device d, unsigned *out) { return device_unsigned(#call, d, name, out); }
UNSIGNED(nvmlDeviceGetMemoryBusWidth, "bus_bits")
UNSIGNED(nvmlDeviceGetNumGpuCores, "cores")
UNSIGNED(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation")
UNSIGNED(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
UNSIGNED(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_generation_max")
UNSIGNED(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max")
UNSIGNED(nvmlDeviceGetDisplayMode, "display_mode")
UNSIGNED(nvmlDeviceGetDisplayActive, "display_active")
UNSIGNED(nvmlDeviceGetPowerManagementLimit, "power_limit_mw")
UNSIGNED(nvmlDeviceGetPowerManagementDefaultLimit, "power_limit_default_mw")
UNSIGNED(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
UNSIGNED(nvmlDeviceGetNumaNodeId, "numa_node")
UNSIGNED(nvmlDeviceGetMaxMigDeviceCount, "mig_max")
UNSIGNED(nvmlDeviceGetGpuInstanceId, "gpu_instance")
UNSIGNED(nvmlDeviceGetComputeInstanceId, "compute_instance")
UNSIGNED(nvmlDeviceGetVirtualizationMode, "virtualization")

int nvmlDeviceGetEccMode(Device d, unsigned *now, unsigned *pending) {
    int code = device_unsigned("nvmlDeviceGetEccMode", d, "ecc", now);
    *pending = *now;
    return code;
}
int nvmlDeviceGetMigMode(Device d, unsigned *now, unsigned *pending) {
    int code = device_unsigned("nvmlDeviceGetMigMode", d, "mig_mode", now);
    *pending = *now;
    return code;
}
int nvmlDeviceGetMigDeviceHandleByIndex(Device d, unsigned index, Device *out) {
    char key[WORD];
    int code = told("nvmlDeviceGetMigDeviceHandleByIndex", d);
    *out = d * MIG_STRIDE + index + 1;
    key_of(key, *out, "uuid");
    return code ? code : find(key) ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceIsMigDeviceHandle(Device d, unsigned *out) {
    *out = d >= MIG_STRIDE;
    return told("nvmlDeviceIsMigDeviceHandle", d);
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device d, Device *out) {
    *out = d / MIG_STRIDE;
    return d >= MIG_STRIDE ? told("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", d) : INVALID_ARGUMENT;
}
int nvmlDeviceGetAttributes_v2(Device d, Attributes *out) {
    unsigned long long sms = 0, slices = 0, mib = 0;
    int code = device_number("nvmlDeviceGetAttributes_v2", d, "slice_mib", &mib);
    device_number("nvmlDeviceGetAttributes_v2", d, "slice_sms", &sms);
    device_number("nvmlDeviceGetAttributes_v2", d, "slice_gpu_slices", &slices);
    *out = (Attributes){.sms = (unsigned)sms, .gpu_slices = (unsigned)slices, .compute_slices = (unsigned)slices, .mib = mib};
    return code;
}

/* gpu.0.nvlink.3=00000000:81:00.0: what link 3 leads to. A GPU without any such line has no NVLink. */
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device d, unsigned link, Pci *out) {
    char name[WORD];
    snprintf(name, WORD, "nvlink.%u", link);
    *out = (Pci){.domain = 0};
    return device_text("nvmlDeviceGetNvLinkRemotePciInfo_v2", d, name, out->bus_id, sizeof out->bus_id);
}
int nvmlDeviceGetNvLinkState(Device d, unsigned link, unsigned *out) {
    char key[WORD], name[WORD];
    int code = told("nvmlDeviceGetNvLinkState", d), has_any = 0;
    for (unsigned each = 0; each < LINKS; each++) {
        snprintf(name, WORD, "nvlink.%u", each);
        key_of(key, d, name);
        has_any |= find(key) != NULL;
        if (each == link) *out = find(key) != NULL;
    }
    return code ? code : !has_any ? NOT_SUPPORTED : link < LINKS ? SUCCESS : INVALID_ARGUMENT;
}

/* gpu.0.compute.0=4242:8100000000: pid and bytes; without bytes the driver does not tell them (WDDM, containers). */
static int processes(const char *call, Device d, const char *kind, unsigned *count, Process *out) {
    char key[WORD], name[WORD], value[WORD];
    unsigned seen = 0, room = *count;
    int code = told(call, d);
    if (code) return code;
    for (;; seen++) {
        char *end;
        snprintf(name, WORD, "%s.%u", kind, seen);
        key_of(key, d, name);
        if (text(key, value, WORD)) break;
        if (!out || seen >= room) continue;
        out[seen] = (Process){(unsigned)strtoul(value, &end, 10), ~0ull, ~0u, ~0u};
        if (*end == ':') out[seen].used = strtoull(end + 1, NULL, 10);
    }
    *count = seen;
    return seen && (!out || seen > room) ? INSUFFICIENT_SIZE : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device d, unsigned *count, Process *out) {
    return processes("nvmlDeviceGetComputeRunningProcesses_v3", d, "compute", count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device d, unsigned *count, Process *out) {
    return processes("nvmlDeviceGetGraphicsRunningProcesses_v3", d, "graphics", count, out);
}
