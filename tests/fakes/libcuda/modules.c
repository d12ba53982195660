/* Modules, libraries, kernels and their launches.
 *
 * No code is run, but for a kernel called `probe` (each block writes which SM it ran on, and when, as csrc/smid_probe.cu
 * does). Every launch is written down with the SMs that its context has. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

typedef struct Loaded { /* a module or a library */
    Object object;
    char *image;
    size_t size;
    Context *context; /* of a module */
    Use last;
} Loaded;

typedef struct Launch {
    const char *name;
    uintptr_t stream, context, stream_context;
    unsigned grid[3], block[3];
    bool from_graph;
    SmSet sms;
} Launch;

static Launch *launches;
static size_t launched, room;

/* ---- Images: an ELF file or text (PTX), in which a kernel's name occurs ------------------------------------------ */

static size_t image_size(const unsigned char *image) {
    uint64_t sections;
    uint16_t each, count;
    if (memcmp(image, "\177ELF\2", 5)) return strlen((const char *)image) + 1;
    memcpy(&sections, image + 40, sizeof sections);
    memcpy(&each, image + 58, sizeof each);
    memcpy(&count, image + 60, sizeof count);
    return sections + (size_t)each * count;
}

static bool word(unsigned char byte) {
    return byte == '_' || byte == '$' || (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') ||
           (byte >= 'a' && byte <= 'z');
}

static bool image_has(const Loaded *loaded, const char *name) {
    const size_t length = strlen(name);
    for (size_t at = 0; length && at + length < loaded->size; at++) {
        const char *here = loaded->image + at;
        if (!memcmp(here, name, length) && !word((unsigned char)here[length]) &&
            (!at || !word((unsigned char)here[-1])))
            return true;
    }
    return false;
}

static CUresult load(Kind kind, const void *image, Loaded **loaded) {
    REQUIRE(image, CUDA_ERROR_INVALID_VALUE);
    const size_t size = image_size(image);
    REQUIRE(size > 1, CUDA_ERROR_INVALID_IMAGE);
    *loaded = object_new(kind, sizeof **loaded);
    (*loaded)->image = malloc(size);
    memcpy((*loaded)->image, image, size);
    (*loaded)->size = size;
    return CUDA_SUCCESS;
}

static CUresult unload(Call *call, Loaded *loaded) {
    if (use_pending(&loaded->last))
        misuse(call, "%s %u has kernels in stream %u, which was not drained", kind_name(loaded->object.kind),
               loaded->object.number, loaded->last.stream->object.number);
    object_end(loaded);
    return call_result(call, CUDA_SUCCESS);
}

CUresult cuModuleLoadData(CUmodule *handle, const void *image) {
    CALL(cuModuleLoadData, IN_CONTEXT | ASYNC | UNSAFE);
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    Loaded *module;
    const CUresult error = load(MODULE, image, &module);
    if (error) return error;
    module->context = context_current()->primary;
    *handle = (CUmodule)module->object.handle;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule handle) {
    CALL(cuModuleUnload, IN_CONTEXT | ASYNC | UNSAFE | RELEASE, N(handle));
    Loaded *module = object_of(&call, MODULE, handle);
    REQUIRE(module, CUDA_ERROR_INVALID_HANDLE);
    return unload(&call, module);
}

CUresult cuLibraryLoadData(CUlibrary *handle, const void *image, CUjit_option *jit_options, void **jit_values,
                           unsigned int jit_count, CUlibraryOption *library_options, void **values,
                           unsigned int count) {
    CALL(cuLibraryLoadData, ASYNC | UNSAFE);
    (void)jit_options, (void)jit_values, (void)jit_count, (void)library_options, (void)values, (void)count;
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    Loaded *library;
    const CUresult error = load(LIBRARY, image, &library);
    if (!error) *handle = (CUlibrary)library->object.handle;
    return error;
}

CUresult cuLibraryUnload(CUlibrary handle) {
    CALL(cuLibraryUnload, ASYNC | UNSAFE | RELEASE, N(handle));
    Loaded *library = object_of(&call, LIBRARY, handle);
    REQUIRE(library, CUDA_ERROR_INVALID_HANDLE);
    return unload(&call, library);
}

static CUresult find(Kind kind, Loaded *in, const char *name, Code **code) {
    REQUIRE(name, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(image_has(in, name), CUDA_ERROR_NOT_FOUND);
    *code = object_new(kind, sizeof **code);
    (*code)->object.hidden = true; /* goes with its module or library */
    (*code)->name = strdup(name);
    (*code)->from = in;
    (*code)->shared_limit = 48 << 10;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *handle, CUmodule of, const char *name) {
    CALL(cuModuleGetFunction, IN_CONTEXT, N(of));
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    Loaded *module = object_of(&call, MODULE, of);
    REQUIRE(module, CUDA_ERROR_INVALID_HANDLE);
    Code *code;
    const CUresult error = find(FUNCTION, module, name, &code);
    if (!error) *handle = (CUfunction)code->object.handle;
    return error;
}

CUresult cuLibraryGetKernel(CUkernel *handle, CUlibrary of, const char *name) {
    CALL(cuLibraryGetKernel, 0, N(of));
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    Loaded *library = object_of(&call, LIBRARY, of);
    REQUIRE(library, CUDA_ERROR_INVALID_HANDLE);
    Code *code;
    const CUresult error = find(KERNEL, library, name, &code);
    if (!error) *handle = (CUkernel)code->object.handle;
    return error;
}

/* The code behind a CUfunction, or a CUkernel given for one. */
static Code *code_of(Call *call, const void *handle) {
    Code *code = object_seek(KERNEL, handle);
    if (!code) code = object_of(call, FUNCTION, handle);
    if (!code || !code->from->object.dead) return code;
    misuse(call, "kernel %s of a %s that was unloaded", code->name, kind_name(code->from->object.kind));
    return NULL;
}

CUresult cuKernelGetFunction(CUfunction *handle, CUkernel of) {
    CALL(cuKernelGetFunction, IN_CONTEXT, N(of));
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    Code *kernel = object_of(&call, KERNEL, of);
    REQUIRE(kernel && code_of(&call, of), CUDA_ERROR_INVALID_HANDLE);
    Code *code;
    const CUresult error = find(FUNCTION, kernel->from, kernel->name, &code);
    if (!error) *handle = (CUfunction)code->object.handle;
    return error;
}

static CUresult set_attribute(Code *code, CUfunction_attribute name, int value) {
    if (name == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
        REQUIRE(value >= 0 && value <= attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
                CUDA_ERROR_INVALID_VALUE);
        code->shared_limit = value;
    }
    return CUDA_SUCCESS;
}

static int get_attribute(const Code *code, CUfunction_attribute name) {
    switch (name) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: return 32;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return code->shared_limit;
    default: return 0;
    }
}

CUresult cuFuncSetAttribute(CUfunction of, CUfunction_attribute name, int value) {
    CALL(cuFuncSetAttribute, 0, N(of), N(name), N(value));
    Code *code = code_of(&call, of);
    REQUIRE(code, CUDA_ERROR_INVALID_HANDLE);
    return set_attribute(code, name, value);
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction of) {
    CALL(cuFuncGetAttribute, 0, N(name), N(of));
    const Code *code = code_of(&call, of);
    REQUIRE(code, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(value, CUDA_ERROR_INVALID_VALUE);
    *value = get_attribute(code, name);
    return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute name, int value, CUkernel of, CUdevice device) {
    CALL(cuKernelSetAttribute, 0, N(name), N(value), N(of), N(device));
    Code *code = code_of(&call, of);
    REQUIRE(code, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    return set_attribute(code, name, value);
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute name, CUkernel of, CUdevice device) {
    CALL(cuKernelGetAttribute, 0, N(name), N(of), N(device));
    const Code *code = code_of(&call, of);
    REQUIRE(code, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(value, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    *value = get_attribute(code, name);
    return CUDA_SUCCESS;
}

/* ---- Launches ---------------------------------------------------------------------------------------------------- */

bool code_unloaded(const Code *code) { return code->from->object.dead; }

Use *code_use(Code *code) { return &code->from->last; }

static bool played(const Code *code) { return !strcmp(code->name, "probe"); }

static bool dimensions(const unsigned grid[3], const unsigned block[3]) {
    return grid[0] && grid[1] && grid[2] && block[0] && block[1] && block[2] &&
           (uint64_t)block[0] * block[1] * block[2] <= 1024;
}

static CUresult launch(Call *call, CUfunction of, const unsigned grid[3], const unsigned block[3], unsigned shared,
                       CUstream handle, void **params) {
    Code *code = code_of(call, of);
    REQUIRE(code, CUDA_ERROR_INVALID_HANDLE);
    CUresult error;
    Stream *stream = stream_of(call, handle, &error);
    if (!stream) return error;
    const Context *primary = stream->context->primary;
    const bool one = primary == context_current()->primary && (!code->from->context || code->from->context == primary);
    if (!one) misuse(call, "the kernel, stream %u and the current context do not belong together", stream->object.number);
    REQUIRE(one, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(dimensions(grid, block) && shared <= (unsigned)code->shared_limit, CUDA_ERROR_INVALID_VALUE);
    Op *op = op_new(RUN_KERNEL, stream);
    op->run.code = code;
    memcpy(op->run.grid, grid, sizeof op->run.grid);
    memcpy(op->run.block, block, sizeof op->run.block);
    op->run.shared = shared;
    for (unsigned at = 0; played(code) && params && at < 3; at++) memcpy(&op->run.args[at], params[at], 8);
    return stream_issue(call, stream, op);
}

CUresult cuLaunchKernel(CUfunction of, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                        CUstream stream, void **params, void **extra) {
    CALL(cuLaunchKernel, IN_CONTEXT | ASYNC, N(of), N(grid_x), N(grid_y), N(grid_z), N(block_x), N(stream));
    (void)extra;
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    return launch(&call, of, grid, block, shared, stream, params);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction of, void **params, void **extra) {
    CALL(cuLaunchKernelEx, IN_CONTEXT | ASYNC, N(of), config ? N(config->hStream) : 0);
    (void)extra;
    REQUIRE(config, CUDA_ERROR_INVALID_VALUE);
    const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    const unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
    return launch(&call, of, grid, block, config->sharedMemBytes, config->hStream, params);
}

/* The nth SM of a set, going round. */
static int32_t sm_of(const SmSet *sms, uint64_t nth) {
    nth %= sms_count(sms);
    for (int32_t sm = 0; sm < MAX_SMS; sm++)
        if (sms->bits[sm / 64] >> (sm % 64) & 1 && !nth--) return sm;
    return -1;
}

static void probe(const Op *op) {
    int32_t *sm = (int32_t *)(uintptr_t)op->run.args[0];
    uint64_t *span = (uint64_t *)(uintptr_t)op->run.args[1];
    const uint64_t now = (uint64_t)(now_ms() * 1e6);
    if (!sm || !span) return;
    for (uint64_t block = 0; block < op->run.grid[0]; block++) {
        sm[block] = sm_of(&op->context->sms, block);
        span[2 * block] = now;
        span[2 * block + 1] = now + op->run.args[2];
    }
}

void kernel_run(const Op *op) {
    if (launched == room) {
        room = room ? 2 * room : 256;
        launches = realloc(launches, room * sizeof *launches);
    }
    Launch *it = &launches[launched++];
    *it = (Launch){.name = op->run.code->name, .stream = op->stream->object.handle,
                   .context = op->context->object.handle, .stream_context = op->stream->context->object.handle,
                   .from_graph = op->from_graph, .sms = op->context->sms};
    memcpy(it->grid, op->run.grid, sizeof it->grid);
    memcpy(it->block, op->run.block, sizeof it->block);
    if (played(op->run.code)) probe(op);
}

static void drop_loaded(void *object, void *with) {
    (void)with;
    free(((Loaded *)object)->image);
}

static void drop_code(void *object, void *with) {
    (void)with;
    free(((Code *)object)->name);
}

void modules_forget(void) {
    launched = 0;
    objects_each_ever(MODULE, drop_loaded, NULL);
    objects_each_ever(LIBRARY, drop_loaded, NULL);
    objects_each_ever(FUNCTION, drop_code, NULL);
    objects_each_ever(KERNEL, drop_code, NULL);
}

/* ---- Control ------------------------------------------------------------------------------------------------------ */

EXPORT size_t fake_launch_count(void) {
    pthread_mutex_lock(&lock);
    const size_t count = launched;
    pthread_mutex_unlock(&lock);
    return count;
}

/* numbers: stream, context, context of the stream, grid, block, whether out of a graph. */
EXPORT const char *fake_launch(size_t at, uint64_t numbers[10], uint64_t sms[MAX_SMS / 64]) {
    pthread_mutex_lock(&lock);
    const Launch *it = &launches[at];
    const uint64_t values[] = {it->stream, it->context, it->stream_context, it->grid[0], it->grid[1],
                               it->grid[2], it->block[0], it->block[1], it->block[2], it->from_graph};
    memcpy(numbers, values, sizeof values);
    memcpy(sms, it->sms.bits, sizeof it->sms.bits);
    const char *name = it->name;
    pthread_mutex_unlock(&lock);
    return name;
}
