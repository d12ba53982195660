/* Virtual memory management: physical allocations, address ranges, and mappings of the former into the latter. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static Memory *allocation_of(Call *call, CUmemGenericAllocationHandle handle) {
    return object_of(call, ALLOCATION, (void *)(uintptr_t)handle);
}

static bool proper(const CUmemAllocationProp *prop) {
    return prop && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           prop->location.id == 0;
}

CUresult cuMemGetAllocationGranularity(size_t *grain, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags flags) {
    CALL(cuMemGetAllocationGranularity, 0, N(flags));
    REQUIRE(grain && proper(prop), CUDA_ERROR_INVALID_VALUE);
    *grain = MAPPING_GRAIN;
    return CUDA_SUCCESS;
}

static CUmemGenericAllocationHandle allocation_new(int fd, size_t size, CUmemAllocationHandleType shareable) {
    Memory *memory = object_new(ALLOCATION, sizeof *memory);
    memory->fd = fd;
    memory->size = size;
    memory->shareable = shareable;
    memory->opened = 1;
    return memory->object.handle;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    CALL(cuMemCreate, ASYNC, N(size), N(flags));
    REQUIRE(handle && size && size % MAPPING_GRAIN == 0 && proper(prop) && !flags, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(memory_take(size), CUDA_ERROR_OUT_OF_MEMORY);
    const int fd = bytes_new(size);
    REQUIRE(fd >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    *handle = allocation_new(fd, size, prop->requestedHandleTypes);
    return CUDA_SUCCESS;
}

typedef struct Mapped {
    const Memory *allocation;
    unsigned count;
} Mapped;

static void count_mappings(void *object, void *with) {
    Mapped *it = with;
    it->count += ((Memory *)object)->backing == it->allocation;
}

/* The memory goes with the last handle and the last mapping. */
static void free_unused(Memory *allocation) {
    Mapped it = {.allocation = allocation};
    objects_each(MAPPING, count_mappings, &it);
    if (it.count || allocation->opened) return;
    if (!allocation->origin_pid) memory_give(allocation->size);
    close(allocation->fd);
    allocation->fd = -1;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    CALL(cuMemRelease, ASYNC | RELEASE, N(handle));
    Memory *allocation = allocation_of(&call, handle);
    REQUIRE(allocation, CUDA_ERROR_INVALID_VALUE);
    if (!--allocation->opened) {
        object_end(allocation);
        free_unused(allocation);
    }
    return call_result(&call, CUDA_SUCCESS);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CALL(cuMemRetainAllocationHandle, 0, N(address));
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    const Memory *mapping = memory_find(MAPPING, address);
    REQUIRE(mapping, CUDA_ERROR_INVALID_VALUE);
    Memory *allocation = mapping->backing;
    REQUIRE(!allocation->object.dead, CUDA_ERROR_INVALID_VALUE);
    allocation->opened++;
    *handle = allocation->object.handle;
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    CALL(cuMemExportToShareableHandle, 0, N(handle), N(type), N(flags));
    Memory *allocation = allocation_of(&call, handle);
    REQUIRE(shared && allocation && !flags, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(allocation->shareable & type, CUDA_ERROR_INVALID_VALUE);
    *(int *)shared = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                        CUmemAllocationHandleType type) {
    CALL(cuMemImportFromShareableHandle, ASYNC, N(shared), N(type));
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
    char path[64], name[64] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)shared);
    struct stat file;
    const bool ours = readlink(path, name, sizeof name - 1) > 0 && !strncmp(name, "/memfd:fake-cuda", 16);
    if (!ours) misuse(&call, "file descriptor %d is no exported allocation", (int)(intptr_t)shared);
    REQUIRE(ours && !fstat((int)(intptr_t)shared, &file), CUDA_ERROR_INVALID_VALUE);
    *handle = allocation_new(fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 0), (size_t)file.st_size, type);
    allocation_of(&call, *handle)->origin_pid = 1; /* counted where it was made */
    return CUDA_SUCCESS;
}

/* ---- Address ranges --------------------------------------------------------------------------------------------- */

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    CALL(cuMemAddressReserve, 0, N(size), N(alignment), N(hint), N(flags));
    REQUIRE(address && size && size % MAPPING_GRAIN == 0 && !flags, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!(alignment & (alignment - 1)), CUDA_ERROR_INVALID_VALUE);
    if (alignment < MAPPING_GRAIN) alignment = MAPPING_GRAIN;
    char *wide = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(wide != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    char *base = (char *)(((uintptr_t)wide + alignment - 1) / alignment * alignment);
    if (base > wide) munmap(wide, (size_t)(base - wide));
    munmap(base + size, (size_t)(wide + alignment - base));
    Memory *range = object_new(ADDRESSES, sizeof *range);
    range->base = base;
    range->size = size;
    range->fd = -1;
    *address = (CUdeviceptr)base;
    return CUDA_SUCCESS;
}

typedef struct Overlap {
    const char *from, *to;
    Memory *first;    /* that overlaps */
    size_t covered;
} Overlap;

static void overlaps(void *object, void *with) {
    Memory *memory = object;
    Overlap *it = with;
    const char *from = memory->base > it->from ? memory->base : it->from;
    const char *to = memory->base + memory->size < it->to ? memory->base + memory->size : it->to;
    if (from >= to) return;
    it->covered += (size_t)(to - from);
    if (!it->first) it->first = memory;
}

static Overlap overlap(Kind kind, CUdeviceptr address, size_t size) {
    Overlap it = {.from = (char *)address, .to = (char *)address + size};
    objects_each(kind, overlaps, &it);
    return it;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    CALL(cuMemAddressFree, ASYNC | RELEASE, N(address), N(size));
    Memory *range = memory_find(ADDRESSES, (void *)address);
    if (!range || range->size != size) misuse(&call, "%p is no such address range", (void *)address);
    REQUIRE(range && range->size == size, CUDA_ERROR_INVALID_VALUE);
    const bool mapped = overlap(MAPPING, address, size).covered;
    if (mapped) misuse(&call, "something is still mapped into the range");
    REQUIRE(!mapped, CUDA_ERROR_INVALID_VALUE);
    munmap(range->base, range->size);
    range->base = NULL;
    object_end(range);
    return call_result(&call, CUDA_SUCCESS);
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    CALL(cuMemMap, ASYNC, N(address), N(size), N(offset), N(handle), N(flags));
    Memory *allocation = allocation_of(&call, handle);
    REQUIRE(allocation && !flags && !offset, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(size && size % MAPPING_GRAIN == 0 && address % MAPPING_GRAIN == 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(size <= allocation->size, CUDA_ERROR_INVALID_VALUE);
    const bool reserved = overlap(ADDRESSES, address, size).covered == size;
    if (!reserved) misuse(&call, "the range was not reserved");
    const bool mapped = overlap(MAPPING, address, size).covered;
    if (mapped) misuse(&call, "the range is mapped already");
    REQUIRE(reserved && !mapped, CUDA_ERROR_INVALID_VALUE);
    void *base = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, allocation->fd, 0);
    REQUIRE(base != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    Memory *mapping = object_new(MAPPING, sizeof *mapping);
    mapping->base = base;
    mapping->size = size;
    mapping->backing = allocation;
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    CALL(cuMemSetAccess, ASYNC, N(address), N(size), N(count));
    REQUIRE(access && count == 1 && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(access->location.id == 0, CUDA_ERROR_INVALID_DEVICE);
    const bool mapped = overlap(MAPPING, address, size).covered == size;
    if (!mapped) misuse(&call, "not all of the range is mapped");
    REQUIRE(size && mapped, CUDA_ERROR_INVALID_VALUE);
    const bool open = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (size_t done = 0; done < size;) {
        Memory *mapping = overlap(MAPPING, address + done, MAPPING_GRAIN).first;
        mapping->open = open;
        done += mapping->size;
    }
    mprotect((void *)address, size, open ? PROT_READ | PROT_WRITE : PROT_READ);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CALL(cuMemUnmap, ASYNC | RELEASE, N(address), N(size));
    Memory *mapping = memory_find(MAPPING, (void *)address);
    if (!mapping || mapping->size != size) misuse(&call, "%p is no such mapping", (void *)address);
    REQUIRE(mapping && mapping->size == size, CUDA_ERROR_INVALID_VALUE);
    if (use_pending(&mapping->last))
        misuse(&call, "stream %u, which uses the memory, was not drained", mapping->last.stream->object.number);
    else
        mmap(mapping->base, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    object_end(mapping);
    free_unused(mapping->backing);
    return call_result(&call, CUDA_SUCCESS);
}
