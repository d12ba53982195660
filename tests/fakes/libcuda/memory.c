/* Device and pinned host memory. Device memory is host memory at the same address, in a file of its own that
 * other processes can map (mapping.c, ipc.c); pages come into being when touched, so any size may be asked for. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t taken;

size_t memory_free_bytes(void) { return gpu->memory - taken; }

bool memory_take(size_t bytes) {
    if (bytes > memory_free_bytes()) return false;
    taken += bytes;
    return true;
}

void memory_give(size_t bytes) { taken -= bytes; }

int bytes_new(size_t size) {
    const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)size)) {
        close(fd);
        return -1;
    }
    return fd;
}

typedef struct Search {
    const char *at;
    bool whole; /* `at` is where it starts */
    Memory *found;
} Search;

static void look(void *object, void *with) {
    Memory *memory = object;
    Search *it = with;
    const bool in = it->at >= memory->base && it->at < memory->base + memory->size;
    if (it->whole ? it->at == memory->base : in) it->found = memory;
}

Memory *memory_find(Kind kind, const void *base) {
    Search it = {.at = base, .whole = true};
    objects_each(kind, look, &it);
    return it.found;
}

/* The memory that the address lies in: of the device, or pinned. */
static Memory *around(const char *address) {
    static const Kind kinds[] = {MEMORY, IPC_MEMORY, MAPPING, HOST_MEMORY};
    Search it = {.at = address};
    for (unsigned at = 0; at < 4; at++) objects_each(kinds[at], look, &it);
    return it.found;
}

/* Whether all of it is memory that the device may touch. */
static bool reachable(Call *call, const char *address, size_t size, bool host_too) {
    while (size) {
        const Memory *memory = around(address);
        const bool right = memory && (host_too || memory->object.kind != HOST_MEMORY) &&
                           (memory->object.kind != MAPPING || memory->open);
        if (!right) {
            misuse(call, "%p is no accessible device memory", (const void *)address);
            return false;
        }
        const size_t here = (size_t)(memory->base + memory->size - address);
        if (size <= here) return true;
        address += here;
        size -= here;
    }
    return true;
}

/* ---- Allocation ------------------------------------------------------------------------------------------------ */

CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
    CALL(cuMemGetInfo, IN_CONTEXT | ASYNC);
    REQUIRE(available && total, CUDA_ERROR_INVALID_VALUE);
    *available = memory_free_bytes();
    *total = gpu->memory;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    CALL(cuMemAlloc, IN_CONTEXT | ASYNC | UNSAFE, N(size));
    REQUIRE(address && size, CUDA_ERROR_INVALID_VALUE);
    const size_t rounded = (size + 511) / 512 * 512;
    REQUIRE(memory_take(rounded), CUDA_ERROR_OUT_OF_MEMORY);
    const int fd = bytes_new(rounded);
    void *base = fd < 0 ? MAP_FAILED : mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) {
        memory_give(rounded);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Memory *memory = object_new(MEMORY, sizeof *memory);
    memory->base = base;
    memory->size = rounded;
    memory->fd = fd;
    memory->owner = context_current()->primary;
    *address = (CUdeviceptr)base;
    return CUDA_SUCCESS;
}

/* The bytes go when nothing can still touch them; else at the next reset. */
static void free_bytes(Call *call, Memory *memory) {
    const bool pending = use_pending(&memory->last);
    if (pending)
        misuse(call, "%s %u is in use by stream %u, which was not drained", kind_name(memory->object.kind),
               memory->object.number, memory->last.stream->object.number);
    object_end(memory);
    if (pending || device_poisoned()) return;
    munmap(memory->base, memory->size);
    if (memory->fd >= 0) close(memory->fd);
    memory->base = NULL;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    CALL(cuMemFree, IN_CONTEXT | ASYNC | UNSAFE | RELEASE, N(address));
    Memory *memory = memory_find(MEMORY, (void *)address);
    if (!memory) misuse(&call, "%p is no allocation of cuMemAlloc, or was freed before", (void *)address);
    REQUIRE(memory, CUDA_ERROR_INVALID_VALUE);
    memory_give(memory->size);
    free_bytes(&call, memory);
    return call_result(&call, CUDA_SUCCESS);
}

CUresult cuMemHostAlloc(void **address, size_t size, unsigned int flags) {
    CALL(cuMemHostAlloc, IN_CONTEXT | ASYNC | UNSAFE, N(size), N(flags));
    REQUIRE(address && size && flags <= 7, CUDA_ERROR_INVALID_VALUE);
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(base != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    Memory *memory = object_new(HOST_MEMORY, sizeof *memory);
    memory->base = base;
    memory->size = size;
    memory->fd = -1;
    *address = base;
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *address) {
    CALL(cuMemFreeHost, ASYNC | UNSAFE | RELEASE, N(address));
    Memory *memory = memory_find(HOST_MEMORY, address);
    if (!memory) misuse(&call, "%p is no allocation of cuMemHostAlloc, or was freed before", address);
    REQUIRE(memory, CUDA_ERROR_INVALID_VALUE);
    free_bytes(&call, memory);
    return call_result(&call, CUDA_SUCCESS);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    CALL(cuMemGetAddressRange, IN_CONTEXT, N(address));
    const Memory *memory = around((char *)address);
    REQUIRE(memory && memory->object.kind != HOST_MEMORY, CUDA_ERROR_NOT_FOUND);
    if (base) *base = (CUdeviceptr)memory->base;
    if (size) *size = memory->size;
    return CUDA_SUCCESS;
}

static void give_back(void *object, void *with) {
    Memory *memory = object;
    (void)with;
    if (memory->base) munmap(memory->base, memory->size);
    if (memory->base && memory->fd >= 0) close(memory->fd);
}

static void close_bytes(void *object, void *with) {
    (void)with;
    const int fd = ((Memory *)object)->fd;
    if (fd >= 0) close(fd);
}

void memory_forget(void) {
    static const Kind kinds[] = {MEMORY, HOST_MEMORY, IPC_MEMORY, ADDRESSES};
    for (unsigned at = 0; at < 4; at++) objects_each_ever(kinds[at], give_back, NULL);
    objects_each_ever(ALLOCATION, close_bytes, NULL);
    taken = 0;
}

/* ---- Copies and fills ------------------------------------------------------------------------------------------- */

void memory_run(const Op *op) {
    if (op->work == COPY) {
        memmove(op->move.to, op->move.from, op->move.count);
        return;
    }
    for (size_t at = 0; at < op->move.count; at++)
        memcpy(op->move.to + at * op->move.width, &op->move.value, op->move.width);
}

/* A kernel that is played touches what its arguments point to; those of all others are not known. */
void memory_note_use(const Op *op, Stream *stream, unsigned long long sequence) {
    const void *touched[2] = {NULL};
    if (op->work == COPY || op->work == FILL) touched[0] = op->move.to;
    if (op->work == COPY) touched[1] = op->move.from;
    for (unsigned at = 0; op->work == RUN_KERNEL && at < 2; at++) touched[at] = (void *)(uintptr_t)op->run.args[at];
    for (unsigned at = 0; at < 2; at++) {
        Memory *memory = touched[at] ? around(touched[at]) : NULL;
        if (memory) memory->last = (Use){stream, sequence};
    }
}

typedef enum Direction { TO_DEVICE, FROM_DEVICE, ON_DEVICE, ANY } Direction;

/* The stream's context must be one with the caller's: green contexts share their primary's. */
static Stream *stream_for(Call *call, CUstream handle, CUresult *error) {
    Stream *stream = stream_of(call, handle, error);
    if (!stream || stream->context->primary == context_current()->primary) return stream;
    misuse(call, "stream %u is of another context than the current one", stream->object.number);
    *error = CUDA_ERROR_INVALID_HANDLE;
    return NULL;
}

/* A copy from or to memory that is not pinned keeps its caller waiting, as it does on a device. */
static CUresult copy(Call *call, Direction direction, void *to, const void *from, size_t size, CUstream handle,
                     bool waits) {
    REQUIRE(to && from, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    Stream *stream = stream_for(call, handle, &error);
    if (!stream) return error;
    const bool to_device = direction == TO_DEVICE || direction == ON_DEVICE;
    const bool from_device = direction == FROM_DEVICE || direction == ON_DEVICE;
    REQUIRE(!to_device || reachable(call, to, size, false), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!from_device || reachable(call, from, size, true), CUDA_ERROR_INVALID_VALUE);
    waits = waits || !around(to) || !around(from);
    Op *op = op_new(COPY, stream);
    op->move.to = to;
    op->move.from = from;
    op->move.count = size;
    error = stream_issue(call, stream, op);
    if (error || !waits || stream->capture) return error;
    const unsigned long long target = stream->submitted;
    while (stream->completed < target) wait_for_change();
    stream_observe(stream, target);
    return device_error();
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    CALL(cuMemcpyHtoDAsync, IN_CONTEXT | ASYNC, N(to), N(from), N(size), N(stream));
    return copy(&call, TO_DEVICE, (void *)to, from, size, stream, false);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    CALL(cuMemcpyDtoHAsync, IN_CONTEXT | ASYNC, N(to), N(from), N(size), N(stream));
    return copy(&call, FROM_DEVICE, to, (void *)from, size, stream, false);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    CALL(cuMemcpyDtoDAsync, IN_CONTEXT | ASYNC, N(to), N(from), N(size), N(stream));
    return copy(&call, ON_DEVICE, (void *)to, (void *)from, size, stream, false);
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    CALL(cuMemcpyAsync, IN_CONTEXT | ASYNC, N(to), N(from), N(size), N(stream));
    return copy(&call, ANY, (void *)to, (void *)from, size, stream, false);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    CALL(cuMemcpyHtoD, IN_CONTEXT | ASYNC | UNSAFE, N(to), N(from), N(size));
    return copy(&call, TO_DEVICE, (void *)to, from, size, NULL, true);
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    CALL(cuMemcpyDtoH, IN_CONTEXT | ASYNC | UNSAFE, N(to), N(from), N(size));
    return copy(&call, FROM_DEVICE, to, (void *)from, size, NULL, true);
}

static CUresult fill(Call *call, CUdeviceptr to, unsigned value, unsigned width, size_t count, CUstream handle) {
    CUresult error;
    Stream *stream = stream_for(call, handle, &error);
    if (!stream) return error;
    REQUIRE(to % width == 0 && reachable(call, (char *)to, count * width, true), CUDA_ERROR_INVALID_VALUE);
    Op *op = op_new(FILL, stream);
    op->move.to = (char *)to;
    op->move.count = count;
    op->move.value = value;
    op->move.width = width;
    return stream_issue(call, stream, op);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    CALL(cuMemsetD8Async, IN_CONTEXT | ASYNC, N(to), N(value), N(count), N(stream));
    return fill(&call, to, value, 1, count, stream);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
    CALL(cuMemsetD32Async, IN_CONTEXT | ASYNC, N(to), N(value), N(count), N(stream));
    return fill(&call, to, value, 4, count, stream);
}
