/* Which context is current to which thread; contexts of one's own, with or without an execution affinity. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 32 };

static unsigned generation = 1;
static __thread struct {
    unsigned generation;
    unsigned depth;
    CUcontext contexts[DEEPEST];
} stack;

static void stack_refresh(void) {
    if (stack.generation == generation) return;
    stack.generation = generation;
    stack.depth = 0;
}

static Context *context_seek(CUcontext handle) {
    static const Kind kinds[] = {PRIMARY, CONTEXT, GREEN_CONTEXT};
    for (unsigned at = 0; at < 3; at++) {
        Context *context = object_seek(kinds[at], handle);
        if (context) return context;
    }
    return NULL;
}

static bool gone(const Context *context) {
    return context->object.dead || (context->object.kind == PRIMARY && !primary_active());
}

CUcontext context_handle(const Context *context) { return (CUcontext)context->object.handle; }

Context *context_current(void) {
    stack_refresh();
    return stack.depth ? context_seek(stack.contexts[stack.depth - 1]) : NULL;
}

Context *context_of(Call *call, CUcontext handle, CUresult *error) {
    Context *context = context_seek(handle);
    *error = CUDA_SUCCESS;
    if (context && !gone(context)) return context;
    *error = context ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
    if (context)
        misuse(call, "%s %u used after its end", kind_name(context->object.kind), context->object.number);
    else if (object_seek(GREEN, handle))
        misuse(call, "a green context is no CUcontext: cuCtxFromGreenCtx gives it");
    else
        object_of(call, CONTEXT, handle);
    return NULL;
}

typedef struct Ending {
    Call *call;
    const Context *context;
} Ending;

static void check_stream(void *object, void *with) {
    const Stream *stream = object;
    const Ending *ending = with;
    if (stream->context != ending->context || stream->object.hidden) return;
    misuse(ending->call, "stream %u of it is alive%s", stream->object.number,
           stream_drained(stream) ? "" : " and not drained");
}

static void check_event(void *object, void *with) {
    const Event *event = object;
    const Ending *ending = with;
    if (event->context != ending->context) return;
    misuse(ending->call, "event %u of it is alive%s", event->object.number,
           !event->mark || mark_done(event->mark) ? "" : " and pending");
}

void context_check_end(Call *call, Context *context) {
    Ending ending = {call, context};
    objects_each(STREAM, check_stream, &ending);
    objects_each(EVENT, check_event, &ending);
    graphs_check_end(call, context);
    if (context_current() == context) misuse(call, "it is current to this thread");
}

void contexts_forget(void) { generation++; }

/* ---- The stack of a thread ------------------------------------------------------------------------------------ */

CUresult cuCtxSetCurrent(CUcontext handle) {
    CALL(cuCtxSetCurrent, 0, N(handle));
    stack_refresh();
    if (!handle) {
        if (stack.depth) stack.depth--;
        return CUDA_SUCCESS;
    }
    CUresult error;
    if (!context_of(&call, handle, &error)) return error;
    if (!stack.depth) stack.depth = 1;
    stack.contexts[stack.depth - 1] = handle;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *handle) {
    CALL(cuCtxGetCurrent, 0);
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    stack_refresh();
    *handle = stack.depth ? stack.contexts[stack.depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
    CALL(cuCtxPushCurrent, 0, N(handle));
    stack_refresh();
    CUresult error;
    if (!context_of(&call, handle, &error)) return error;
    REQUIRE(stack.depth < DEEPEST, CUDA_ERROR_INVALID_VALUE);
    stack.contexts[stack.depth++] = handle;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *handle) {
    CALL(cuCtxPopCurrent, IN_CONTEXT);
    stack.depth--;
    if (handle) *handle = stack.contexts[stack.depth];
    return CUDA_SUCCESS;
}

/* The current context, if it has not been destroyed under the thread. */
static Context *usable(Call *call, CUresult *error) {
    return context_of(call, context_handle(context_current()), error);
}

CUresult cuCtxGetDevice(CUdevice *device) {
    CALL(cuCtxGetDevice, IN_CONTEXT);
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext handle) {
    CALL(cuCtxGetDevice, 0, N(handle));
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    if (!handle) {
        REQUIRE(context_current(), CUDA_ERROR_INVALID_CONTEXT);
    } else if (!context_of(&call, handle, &error)) {
        return error;
    }
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long *id) {
    CALL(cuCtxGetId, 0, N(handle));
    REQUIRE(id, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    if (!handle) REQUIRE(context_current(), CUDA_ERROR_INVALID_CONTEXT);
    const Context *context = handle ? context_of(&call, handle, &error) : usable(&call, &error);
    if (!context) return error;
    *id = context->object.handle + context->id;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CALL(cuCtxGetStreamPriorityRange, IN_CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

typedef struct Synchronising {
    Call *call;
    const Context *context;
    bool waits, captured;
} Synchronising;

static bool covers(const Context *context, const Stream *stream) {
    return !stream->detached && (stream->context == context ||
                                 (context->object.kind == PRIMARY && stream->context->primary == context));
}

static void wait_stream(void *object, void *with) {
    Stream *stream = object;
    Synchronising *it = with;
    if (!covers(it->context, stream)) return;
    if (stream->capture) it->captured = true;
    if (stream->completed < stream->submitted) it->waits = true;
}

static void observe_stream(void *object, void *with) {
    Stream *stream = object;
    if (covers(((Synchronising *)with)->context, stream)) stream_observe(stream, stream->completed);
}

CUresult cuCtxSynchronize(void) {
    CALL(cuCtxSynchronize, IN_CONTEXT | ASYNC | UNSAFE);
    CUresult error;
    Synchronising it = {.call = &call, .context = usable(&call, &error)};
    if (!it.context) return error;
    for (;;) {
        it.waits = false;
        objects_each(STREAM, wait_stream, &it);
        if (it.captured) {
            misuse(&call, "a stream of the context is being captured");
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        if (!it.waits) break;
        wait_for_change();
    }
    objects_each(STREAM, observe_stream, &it);
    return device_error();
}

/* ---- Contexts of one's own ------------------------------------------------------------------------------------ */

static CUresult affinity(Call *call, const CUctxCreateParams *params, unsigned *sms) {
    *sms = 0;
    if (!params || (!params->execAffinityParams && !params->cigParams)) return CUDA_SUCCESS;
    REQUIRE(!params->cigParams, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(params->numExecAffinityParams == 1, CUDA_ERROR_INVALID_VALUE);
    const CUexecAffinityParam *wanted = params->execAffinityParams;
    REQUIRE(wanted->type == CU_EXEC_AFFINITY_TYPE_SM_COUNT, CUDA_ERROR_INVALID_VALUE);
    if (!options.mps) {
        misuse(call, "an execution affinity needs MPS: ask cuDeviceGetExecAffinitySupport");
        return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    }
    const unsigned count = wanted->param.smCount.val;
    REQUIRE(count && count <= gpu->sms, CUDA_ERROR_INVALID_VALUE);
    *sms = (count + 1) / 2 * 2; /* "internally rounded up to the next multiple of SMs supported": TPCs of two */
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v4(CUcontext *handle, CUctxCreateParams *params, unsigned int flags, CUdevice device) {
    CALL(cuCtxCreate, ASYNC, params && params->numExecAffinityParams ? params->execAffinityParams->param.smCount.val : 0,
         N(flags), N(device));
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    stack_refresh();
    REQUIRE(stack.depth < DEEPEST, CUDA_ERROR_OUT_OF_MEMORY);
    unsigned sms;
    const CUresult error = affinity(&call, params, &sms);
    if (error) return error;
    Context *context = object_new(CONTEXT, sizeof *context);
    context->primary = context;
    context->sms = sms_first(sms ? sms : gpu->sms);
    context->affinity = sms;
    *handle = stack.contexts[stack.depth++] = context_handle(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
    CALL(cuCtxDestroy, ASYNC | RELEASE, N(handle));
    Context *context = object_seek(CONTEXT, handle);
    if (!context && context_seek(handle)) {
        misuse(&call, "the %s is not its to destroy", kind_name(context_seek(handle)->object.kind));
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    CUresult error;
    context = context_of(&call, handle, &error);
    if (!context) return error;
    if (context_current() == context) stack.depth--;
    context_check_end(&call, context);
    object_end(context);
    return call_result(&call, CUDA_SUCCESS);
}

CUresult cuCtxGetExecAffinity(CUexecAffinityParam *param, CUexecAffinityType type) {
    CALL(cuCtxGetExecAffinity, IN_CONTEXT, N(type));
    REQUIRE(param && type == CU_EXEC_AFFINITY_TYPE_SM_COUNT, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Context *context = usable(&call, &error);
    if (!context) return error;
    param->type = type;
    param->param.smCount.val = context->affinity ? context->affinity : sms_count(&context->sms);
    return CUDA_SUCCESS;
}
