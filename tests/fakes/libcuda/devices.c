/* The GPU on stage, and its primary context. There is one device. */
#include "fake.h"

#include <stdio.h>
#include <string.h>

/* SM counts, memory and L2 of NVIDIA's data sheets. */
static const Gpu GPUS[] = {
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 80ul << 30, 40 << 20, 5120, 1593000, 1410000},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 80ul << 30, 50 << 20, 5120, 2619000, 1980000},
    {"h100-pcie", "NVIDIA H100 PCIe", 9, 0, 114, 80ul << 30, 50 << 20, 5120, 1593000, 1755000},
    {"h200", "NVIDIA H200", 9, 0, 132, 141000000000ul, 50 << 20, 6144, 3201000, 1980000},
    {"b200", "NVIDIA B200", 10, 0, 148, 180ul << 30, 126 << 20, 8192, 3996000, 1965000},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 24ul << 30, 72 << 20, 384, 10501000, 2520000},
    {"l40s", "NVIDIA L40S", 8, 9, 142, 48ul << 30, 96 << 20, 384, 9001000, 2520000},
    {"rtx5090", "NVIDIA GeForce RTX 5090", 12, 0, 170, 32ul << 30, 96 << 20, 512, 14001000, 2407000},
};

int driver_version = 13000;
const Gpu *gpu;
Options options;
bool process_initialised;
static Context *primary;

bool gpu_choose(const char *key) {
    gpu = NULL;
    if (!strcmp(key, "none")) return true;
    for (size_t at = 0; at < sizeof GPUS / sizeof *GPUS; at++)
        if (!strcmp(GPUS[at].key, key)) gpu = &GPUS[at];
    return gpu != NULL;
}

/* ---- The primary context: one object for the life of the process, as its handle is on a device --------------- */

Context *primary_context(void) { return primary; }

bool primary_active(void) { return primary && primary->retained + primary->inherited + primary->greens; }

void primary_retain(bool by_green) {
    if (!primary) primary = object_new(PRIMARY, sizeof *primary);
    if (!primary_active()) {
        primary->primary = primary;
        primary->id++;
        primary->sms = sms_first(gpu->sms);
    }
    (*(by_green ? &primary->greens : &primary->retained))++;
}

CUresult primary_release(Call *call, bool by_green) {
    if (!by_green && (!primary || !(primary->retained + primary->inherited))) {
        misuse(call, "the primary context was not retained");
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    (*(by_green ? &primary->greens : primary->retained ? &primary->retained : &primary->inherited))--;
    if (!primary_active()) {
        context_check_end(call, primary);
        primary->default_stream = NULL;
    }
    return CUDA_SUCCESS;
}

void devices_forget(void) {
    if (!primary) return;
    primary->inherited += primary->retained;
    primary->retained = primary->greens = 0;
    primary->default_stream = NULL;
    if (gpu) primary->sms = sms_first(gpu->sms);
}

EXPORT unsigned fake_primary_retained(void) {
    pthread_mutex_lock(&lock);
    const unsigned count = primary ? primary->retained : 0;
    pthread_mutex_unlock(&lock);
    return count;
}

/* ---- Queries -------------------------------------------------------------------------------------------------- */

CUresult cuInit(unsigned int flags) {
    CALL(cuInit, BEFORE_INIT, N(flags));
    REQUIRE(!flags, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(gpu, CUDA_ERROR_NO_DEVICE);
    options.initialised = process_initialised = true;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    CALL(cuDriverGetVersion, BEFORE_INIT);
    REQUIRE(version, CUDA_ERROR_INVALID_VALUE);
    *version = driver_version;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    CALL(cuDeviceGetCount, 0);
    REQUIRE(count, CUDA_ERROR_INVALID_VALUE);
    *count = gpu != NULL;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CALL(cuDeviceGet, 0, N(ordinal));
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(gpu && ordinal == 0, CUDA_ERROR_INVALID_DEVICE);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    CALL(cuDeviceGetName, 0, N(device));
    REQUIRE(name && length > 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "%s", gpu->name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    CALL(cuDeviceGetUuid, 0, N(device));
    REQUIRE(uuid, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    memset(uuid, 0, sizeof *uuid);
    for (size_t at = 0; gpu->key[at] && at < sizeof uuid->bytes; at++) uuid->bytes[at] = gpu->key[at];
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CALL(cuDeviceTotalMem, 0, N(device));
    REQUIRE(bytes, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    *bytes = gpu->memory;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    CALL(cuDeviceGetPCIBusId, 0, N(device));
    REQUIRE(text && length >= 13, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:3b:00.0");
    return CUDA_SUCCESS;
}

int attribute(CUdevice_attribute name) {
    const bool hopper = gpu->major >= 9;
    const bool consumer = gpu->major == 12 || (gpu->major == 8 && gpu->minor);
    switch (name) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return (int)(options.mps_sms ? options.mps_sms : gpu->sms);
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return gpu->major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return gpu->minor;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return gpu->l2_bytes;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return gpu->memory_bus;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return gpu->memory_khz;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return gpu->clock_khz;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return consumer ? 1536 : 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return consumer ? 24 : 32;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return (consumer ? 100 : hopper ? 228 : 164) << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return (consumer ? 99 : hopper ? 227 : 163) << 10;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 0x3b;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return hopper;
    case CU_DEVICE_ATTRIBUTE_MPS_ENABLED: return options.mps;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED: case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED: case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
        return 1;
    default:
        return 0;
    }
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device) {
    CALL(cuDeviceGetAttribute, 0, N(name), N(device));
    REQUIRE(value && name > 0 && name < CU_DEVICE_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    *value = attribute(name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetExecAffinitySupport(int *supported, CUexecAffinityType type, CUdevice device) {
    CALL(cuDeviceGetExecAffinitySupport, 0, N(type), N(device));
    REQUIRE(supported && type == CU_EXEC_AFFINITY_TYPE_SM_COUNT, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    *supported = options.mps;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL(cuDevicePrimaryCtxRetain, ASYNC, N(device));
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    primary_retain(false);
    *context = context_handle(primary);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CALL(cuDevicePrimaryCtxRelease, 0, N(device));
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    return primary_release(&call, false);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    CALL(cuDevicePrimaryCtxGetState, 0, N(device));
    REQUIRE(flags && active, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    *flags = 0;
    *active = primary_active();
    return CUDA_SUCCESS;
}
