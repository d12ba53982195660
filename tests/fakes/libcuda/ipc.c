/* CUDA IPC: the handle names the process and the file that the memory's bytes are in. */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct Token { /* in a CUipcMemHandle */
    uint64_t magic;
    int pid, fd;
    size_t size;
    ino_t inode; /* the number may be another file's by now */
} Token;

static const uint64_t MAGIC = 0x6970632d66616b65;

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    CALL(cuIpcGetMemHandle, IN_CONTEXT, N(address));
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    const Memory *memory = memory_find(MEMORY, (void *)address); /* memory of cuMemCreate has no such handle */
    REQUIRE(memory, CUDA_ERROR_INVALID_VALUE);
    struct stat file;
    REQUIRE(!fstat(memory->fd, &file), CUDA_ERROR_UNKNOWN);
    const Token token = {MAGIC, getpid(), memory->fd, memory->size, file.st_ino};
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, &token, sizeof token);
    return CUDA_SUCCESS;
}

typedef struct Search {
    Token token;
    Memory *found;
} Search;

static void look(void *object, void *with) {
    Memory *memory = object;
    Search *it = with;
    if (memory->origin_pid == it->token.pid && memory->origin_fd == it->token.fd) it->found = memory;
}

static void *map(const Token *token, int *fd) {
    char path[64];
    struct stat file;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", token->pid, token->fd);
    *fd = open(path, O_RDWR | O_CLOEXEC);
    if (*fd < 0) return MAP_FAILED;
    void *base = MAP_FAILED;
    if (!fstat(*fd, &file) && file.st_ino == token->inode)
        base = mmap(NULL, token->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *fd, 0);
    if (base == MAP_FAILED) close(*fd);
    return base;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    CALL(cuIpcOpenMemHandle, IN_CONTEXT | ASYNC | UNSAFE, N(flags));
    REQUIRE(address && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CUDA_ERROR_INVALID_VALUE);
    Search it = {.found = NULL};
    memcpy(&it.token, handle.reserved, sizeof it.token);
    if (it.token.magic != MAGIC) misuse(&call, "that is no handle of cuIpcGetMemHandle");
    REQUIRE(it.token.magic == MAGIC, CUDA_ERROR_INVALID_HANDLE);
    if (it.token.pid == getpid()) misuse(&call, "the process that made the handle cannot open it");
    REQUIRE(it.token.pid != getpid(), CUDA_ERROR_INVALID_CONTEXT);
    objects_each(IPC_MEMORY, look, &it);
    if (!it.found) {
        int fd;
        void *base = map(&it.token, &fd);
        REQUIRE(base != MAP_FAILED, CUDA_ERROR_MAP_FAILED); /* freed there, or the process is gone */
        it.found = object_new(IPC_MEMORY, sizeof *it.found);
        it.found->base = base;
        it.found->size = it.token.size;
        it.found->fd = fd;
        it.found->origin_pid = it.token.pid;
        it.found->origin_fd = it.token.fd;
    }
    it.found->opened++;
    *address = (CUdeviceptr)it.found->base;
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    CALL(cuIpcCloseMemHandle, IN_CONTEXT | ASYNC | UNSAFE | RELEASE, N(address));
    Memory *memory = memory_find(IPC_MEMORY, (void *)address);
    if (!memory) misuse(&call, "%p was not opened by cuIpcOpenMemHandle, or was closed before", (void *)address);
    REQUIRE(memory, CUDA_ERROR_INVALID_VALUE);
    if (--memory->opened) return call_result(&call, CUDA_SUCCESS);
    if (use_pending(&memory->last))
        misuse(&call, "stream %u, which uses the memory, was not drained", memory->last.stream->object.number);
    object_end(memory); /* the bytes stay mapped until the next reset, for work that was not drained */
    return call_result(&call, CUDA_SUCCESS);
}
