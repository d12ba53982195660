/* Calls about one device. */
#include "fake.h"

#include <string.h>

/* A call that returns one number; UNSUPPORTED in the description makes it NVML_ERROR_NOT_SUPPORTED. */
#define GETTER(function, type, field)                                \
    nvmlReturn_t function(nvmlDevice_t device, type *result)         \
    {                                                                \
        ENTER;                                                       \
        GPU(device);                                                 \
        REQUIRE(result);                                             \
        if (gpu->is.field == UNSUPPORTED) return NVML_ERROR_NOT_SUPPORTED; \
        *result = (type)gpu->is.field;                               \
        return NVML_SUCCESS;                                         \
    }

GETTER(nvmlDeviceGetComputeMode, nvmlComputeMode_t, compute_mode)
GETTER(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, persistence)
GETTER(nvmlDeviceGetPowerUsage, unsigned int, power_mw)
GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, power_limit_mw)
GETTER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, pcie_generation)
GETTER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, pcie_generation_max)
GETTER(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, pcie_width)
GETTER(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, pcie_width_max)
GETTER(nvmlDeviceGetMemoryBusWidth, unsigned int, bus_bits)

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER;
    GPU(device);
    REQUIRE(reasons);
    *reasons = gpu->is.event_reasons;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    ENTER;
    GPU(device);
    REQUIRE(major && minor);
    *major = gpu->is.major;
    *minor = gpu->is.minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ENTER;
    GPU(device);
    REQUIRE(memory);
    memory->total = gpu->is.total_bytes;
    memory->used = gpu->is.used_bytes;
    memory->free = gpu->is.total_bytes - gpu->is.used_bytes;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    ENTER;
    GPU(device);
    REQUIRE(current && pending);
    if (gpu->is.mig == UNSUPPORTED) return NVML_ERROR_NOT_SUPPORTED;
    *current = (unsigned int)gpu->is.mig;
    *pending = !*current; /* so that one taken for the other shows */
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    ENTER;
    GPU(device);
    REQUIRE(current && pending);
    if (gpu->is.ecc == UNSUPPORTED) return NVML_ERROR_NOT_SUPPORTED;
    *current = (nvmlEnableState_t)gpu->is.ecc;
    *pending = (nvmlEnableState_t)!*current;
    return NVML_SUCCESS;
}

static nvmlReturn_t clock_of(const char *function, nvmlClockType_t type, int sm, int memory, unsigned int *mhz)
{
    if (!mhz || (type != NVML_CLOCK_SM && type != NVML_CLOCK_MEM))
        return fake_refuse(function, NVML_ERROR_INVALID_ARGUMENT, "clock type %d", (int)type);
    *mhz = (unsigned int)(type == NVML_CLOCK_SM ? sm : memory);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER;
    GPU(device);
    return clock_of(__func__, type, gpu->is.sm_mhz, gpu->is.memory_mhz, mhz);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz)
{
    ENTER;
    GPU(device);
    return clock_of(__func__, type, gpu->is.sm_max_mhz, gpu->is.memory_max_mhz, mhz);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius)
{
    ENTER;
    GPU(device);
    REQUIRE(celsius);
    if (sensor != NVML_TEMPERATURE_GPU) REFUSE(NVML_ERROR_INVALID_ARGUMENT, "sensor %d", (int)sensor);
    *celsius = (unsigned int)gpu->is.temperature_c;
    return NVML_SUCCESS;
}

/* Processes: the first call asks for the size with a count of 0, the second for the list. */
static nvmlReturn_t listed(const char *function, const Gpu *gpu, int list, unsigned int *count, nvmlProcessInfo_t *infos)
{
    unsigned int room, found = gpu->process_count[list];
    if (!count) return fake_refuse(function, NVML_ERROR_INVALID_ARGUMENT, "infoCount is NULL");
    room = *count;
    *count = found;
    if (room < found) return NVML_ERROR_INSUFFICIENT_SIZE;
    if (found && !infos) return fake_refuse(function, NVML_ERROR_INVALID_ARGUMENT, "infos is NULL");
    if (found) memcpy(infos, gpu->processes[list], found * sizeof *infos);
    return NVML_SUCCESS;
}

#define PROCESSES(function, list)                                                              \
    nvmlReturn_t function(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)  \
    {                                                                                          \
        ENTER;                                                                                 \
        GPU(device);                                                                           \
        return listed(__func__, gpu, list, count, infos);                                      \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 0)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, 1)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, 2)
