/* A strict stand-in for libnvidia-ml.so.1, compiled against NVIDIA's own nvml.h so that every signature and layout is
 * the real one. It serves the GPUs that a test describes, records whatever breaks NVML's rules, and fails on demand. */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include <pthread.h>
#include <stdint.h>

enum { MAX_GPUS = 8, MAX_PROCESSES = 16, PROCESS_LISTS = 3, GPM_METRICS = 16, MAX_SAMPLES = 4096 };
enum { UNSUPPORTED = -1 }; /* in fields that a generation may lack */

typedef struct { /* mirrored by fake_nvml.py */
    char name[96], uuid[80];
    int major, minor;
    unsigned long long total_bytes, used_bytes;
    int mig, compute_mode, persistence, ecc, gpm;
    int sm_mhz, sm_max_mhz, memory_mhz, memory_max_mhz, bus_bits;
    int temperature_c, power_mw, power_limit_mw;
    unsigned long long event_reasons;
    int pcie_generation, pcie_generation_max, pcie_width, pcie_width_max;
} Description;

typedef struct {
    Description is;
    nvmlProcessInfo_t processes[PROCESS_LISTS][MAX_PROCESSES];
    unsigned int process_count[PROCESS_LISTS];
    double busy[GPM_METRICS]; /* percent x seconds since the reset */
} Gpu;

extern pthread_mutex_t fake_lock;
extern double fake_now; /* seconds; moves only when the test says so */

nvmlReturn_t fake_begin(const char *function, int needs_session);
nvmlReturn_t fake_refuse(const char *function, nvmlReturn_t code, const char *format, ...);
nvmlReturn_t fake_injected(const char *what);
Gpu *fake_gpu(const char *function, nvmlDevice_t device);
void fake_forget_samples(void);
int fake_live_samples(void);

static inline void fake_unlock(pthread_mutex_t **lock) { pthread_mutex_unlock(*lock); }

/* Every function begins with one of these: one at a time, logged, refused outside a session, failed if so asked. */
#define ENTER_(needs_session)                                                                  \
    pthread_mutex_t *held __attribute__((cleanup(fake_unlock), unused)) = &fake_lock;          \
    pthread_mutex_lock(held);                                                                  \
    nvmlReturn_t begun = fake_begin(__func__, needs_session);                                  \
    if (begun != NVML_SUCCESS) return begun
#define ENTER ENTER_(1)
#define ENTER_ANYTIME ENTER_(0)
#define REFUSE(code, ...) return fake_refuse(__func__, code, __VA_ARGS__)
#define REQUIRE(pointer) \
    if (!(pointer)) REFUSE(NVML_ERROR_INVALID_ARGUMENT, #pointer " is NULL")
#define GPU(device)                           \
    Gpu *gpu = fake_gpu(__func__, device);    \
    if (!gpu) return NVML_ERROR_INVALID_ARGUMENT

#endif
