/* What the library remembers, the test's side of it, and the calls that name no device. */
#include "fake.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FAULTS = 32 };
typedef struct { char what[64]; int nth; nvmlReturn_t code; int forever; } Fault;
typedef struct { char *text; size_t used, size; } Text;

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
double fake_now;

static Gpu gpus[MAX_GPUS];
static unsigned int gpu_count;
static int sessions;
static uintptr_t generation; /* of handles: those of an ended session are void */
static char driver_version[80];
static int cuda_version;
static Fault faults[MAX_FAULTS];
static int fault_count;
static Text calls, misuse;

static void append(Text *text, const char *line)
{
    size_t length = strlen(line);
    if (text->used + length + 2 > text->size) {
        text->size = 2 * (text->size + length + 2);
        text->text = realloc(text->text, text->size);
        if (!text->text) abort();
    }
    memcpy(text->text + text->used, line, length);
    text->used += length;
    memcpy(text->text + text->used++, "\n", 2);
}

nvmlReturn_t fake_refuse(const char *function, nvmlReturn_t code, const char *format, ...)
{
    char what[200], line[300];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    snprintf(line, sizeof line, "%s: %s", function, what);
    append(&misuse, line);
    return code;
}

nvmlReturn_t fake_injected(const char *what)
{
    for (Fault *fault = faults; fault < faults + fault_count; fault++) {
        if (strcmp(fault->what, what) != 0 || fault->nth <= 0) continue;
        if (--fault->nth > 0) continue;
        if (fault->forever) fault->nth = 1;
        return fault->code;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t fake_begin(const char *function, int needs_session)
{
    append(&calls, function);
    if (needs_session && sessions == 0) return fake_refuse(function, NVML_ERROR_UNINITIALIZED, "outside a session");
    return fake_injected(function);
}

static nvmlDevice_t handle(unsigned int index) { return (nvmlDevice_t)(0x10000 + generation * 64 + index + 1); }

Gpu *fake_gpu(const char *function, nvmlDevice_t device)
{
    for (unsigned int i = 0; i < gpu_count; i++)
        if (handle(i) == device) return &gpus[i];
    fake_refuse(function, NVML_ERROR_INVALID_ARGUMENT, "device %p is no handle of this session", (void *)device);
    return NULL;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    ENTER_ANYTIME;
    if (flags != 0) REFUSE(NVML_ERROR_INVALID_ARGUMENT, "flags %#x", flags);
    sessions++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void)
{
    ENTER;
    if (--sessions == 0) {
        if (fake_live_samples()) fake_refuse(__func__, NVML_SUCCESS, "%d samples not freed", fake_live_samples());
        generation++;
    }
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static _Thread_local char text[32];
    snprintf(text, sizeof text, "fake error %d", (int)result);
    return text;
}

static nvmlReturn_t copy(const char *function, const char *text, char *out, unsigned int length)
{
    if (!out) return fake_refuse(function, NVML_ERROR_INVALID_ARGUMENT, "result is NULL");
    if (strlen(text) + 1 > length) return fake_refuse(function, NVML_ERROR_INSUFFICIENT_SIZE, "%u bytes for text", length);
    strcpy(out, text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER;
    return copy(__func__, driver_version, version, length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER;
    REQUIRE(version);
    *version = cuda_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    ENTER;
    REQUIRE(count);
    *count = gpu_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    ENTER;
    REQUIRE(device);
    if (index >= gpu_count) return NVML_ERROR_INVALID_ARGUMENT;
    *device = handle(index);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    ENTER;
    REQUIRE(uuid);
    REQUIRE(device);
    for (unsigned int i = 0; i < gpu_count; i++)
        if (strcmp(gpus[i].is.uuid, uuid) == 0) {
            *device = handle(i);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    ENTER;
    GPU(device);
    return copy(__func__, gpu->is.name, name, length);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ENTER;
    GPU(device);
    return copy(__func__, gpu->is.uuid, uuid, length);
}

/* The test's side. */

void fake_reset(const char *driver, int cuda, const Description *given, unsigned int count)
{
    if (count > MAX_GPUS) abort();
    memset(gpus, 0, sizeof gpus);
    for (unsigned int i = 0; i < count; i++) gpus[i].is = given[i];
    gpu_count = count;
    sessions = fault_count = 0;
    generation++;
    fake_now = 0;
    snprintf(driver_version, sizeof driver_version, "%s", driver);
    cuda_version = cuda;
    calls.used = misuse.used = 0;
    fake_forget_samples();
}

void fake_fail(const char *what, int nth, int code, int forever)
{
    if (fault_count == MAX_FAULTS) abort();
    Fault *fault = &faults[fault_count++];
    snprintf(fault->what, sizeof fault->what, "%s", what);
    fault->nth = nth, fault->code = code, fault->forever = forever;
}

void fake_process(unsigned int index, int list, unsigned int pid, unsigned long long bytes)
{
    Gpu *gpu = &gpus[index];
    if (index >= gpu_count || list >= PROCESS_LISTS || gpu->process_count[list] == MAX_PROCESSES) abort();
    nvmlProcessInfo_t *process = &gpu->processes[list][gpu->process_count[list]++];
    process->pid = pid;
    process->usedGpuMemory = bytes;
    process->gpuInstanceId = process->computeInstanceId = 0xFFFFFFFF;
}

void fake_run(unsigned int index, double seconds, const int *metrics, const double *percent, int count)
{
    for (int i = 0; i < count; i++) gpus[index].busy[metrics[i]] += percent[i] * seconds;
    fake_now += seconds;
}

double fake_clock(void) { return fake_now; }
int fake_sessions(void) { return sessions; }
int fake_samples(void) { return fake_live_samples(); }
const char *fake_calls(void) { return calls.used ? calls.text : ""; }
const char *fake_misuse(void) { return misuse.used ? misuse.text : ""; }
