/* Green contexts. */
#include "fake.h"

/* The living green context behind a handle; on failure the error the header gives. */
static Green *green_of(Call *call, CUgreenCtx handle, CUresult *error) {
    Green *green = object_of(call, GREEN, handle);
    const bool was = object_seek(GREEN, handle);
    *error = green ? CUDA_SUCCESS : was ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
    return green;
}

CUresult cuGreenCtxCreate(CUgreenCtx *handle, CUdevResourceDesc desc, CUdevice device, unsigned int flags) {
    CALL(cuGreenCtxCreate, ASYNC, N(desc), N(device), N(flags));
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    /* "Required" in the headers up to 13.1. */
    REQUIRE(flags == CU_GREEN_CTX_DEFAULT_STREAM, CUDA_ERROR_INVALID_VALUE);
    const Descriptor *descriptor = object_of(&call, DESCRIPTOR, desc);
    REQUIRE(descriptor, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(memory_take(options.context_bytes), CUDA_ERROR_OUT_OF_MEMORY);
    primary_retain(true);
    Green *green = object_new(GREEN, sizeof *green);
    Context *context = object_new(GREEN_CONTEXT, sizeof *context);
    context->object.hidden = true;
    context->primary = primary_context();
    context->green = green;
    context->sms = descriptor->sms;
    sms_drop(&context->sms, options.short_context);
    green->context = context;
    green->alignment = descriptor->alignment;
    green->workqueue = descriptor->workqueue;
    *handle = (CUgreenCtx)green->object.handle;
    return CUDA_SUCCESS;
}

static void detach_stream(void *object, void *with) {
    Stream *stream = object;
    if (stream->context == with) stream_detach(stream);
}

CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
    CALL_WITH_GREEN(cuGreenCtxDestroy, ASYNC | RELEASE, handle, N(handle));
    CUresult error;
    Green *green = green_of(&call, handle, &error);
    if (!green) return error;
    context_check_end(&call, green->context);
    objects_each(STREAM, detach_stream, green->context);
    object_end(green->context);
    object_end(green);
    memory_give(options.context_bytes);
    primary_release(&call, true);
    return call_result(&call, CUDA_SUCCESS);
}

CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx handle) {
    CALL_WITH_GREEN(cuCtxFromGreenCtx, 0, handle, N(handle));
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Green *green = green_of(&call, handle, &error);
    if (!green) return error;
    *context = context_handle(green->context);
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx handle, CUdevResource *resource, CUdevResourceType type) {
    CALL_WITH_GREEN(cuGreenCtxGetDevResource, 0, handle, N(handle), N(type));
    CUresult error;
    const Green *green = green_of(&call, handle, &error);
    if (!green) return error;
    return resource_fill(resource, type, &green->context->sms, green->alignment, &green->workqueue);
}

CUresult cuGreenCtxGetId(CUgreenCtx handle, unsigned long long *id) {
    CALL_WITH_GREEN(cuGreenCtxGetId, 0, handle, N(handle));
    REQUIRE(id, CUDA_ERROR_INVALID_VALUE);
    CUresult error = CUDA_SUCCESS;
    const Context *current = context_current();
    const Green *green = handle ? green_of(&call, handle, &error) : current ? current->green : NULL;
    if (!green) return error ? error : CUDA_ERROR_INVALID_CONTEXT;
    *id = green->object.handle;
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream *handle, CUgreenCtx of, unsigned int flags, int priority) {
    CALL_WITH_GREEN(cuGreenCtxStreamCreate, ASYNC, of, N(of), N(flags), N(priority));
    REQUIRE(handle, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Green *green = green_of(&call, of, &error);
    if (!green) return error;
    REQUIRE(flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    *handle = (CUstream)stream_new(green->context, flags, priority)->object.handle;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetGreenCtx(CUstream handle, CUgreenCtx *green) {
    CALL(cuStreamGetGreenCtx, 0, N(handle));
    REQUIRE(green, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Stream *stream = stream_of(&call, handle, &error);
    if (!stream) return error;
    *green = stream->context->green ? (CUgreenCtx)stream->context->green->object.handle : NULL;
    return CUDA_SUCCESS;
}

/* ---- Events of a whole green context -------------------------------------------------------------------------- */

typedef struct Gathering {
    const Context *context;
    Mark *marks;
    bool captured;
} Gathering;

static void look_for_capture(void *object, void *with) {
    Stream *stream = object;
    Gathering *it = with;
    if (stream->context != it->context || !stream->capture) return;
    it->captured = true;
    capture_break(stream->capture);
}

static void gather(void *object, void *with) {
    Stream *stream = object;
    Gathering *it = with;
    if (stream->context != it->context) return;
    it->marks = stream_mark(stream, it->marks);
}

static void submit_wait(void *object, void *with) {
    Stream *stream = object;
    const Gathering *it = with;
    if (stream->context == it->context) stream_wait_mark(stream, it->marks);
}

CUresult cuGreenCtxRecordEvent(CUgreenCtx handle, CUevent event_handle) {
    CALL_WITH_GREEN(cuGreenCtxRecordEvent, ASYNC, handle, N(handle), N(event_handle));
    CUresult error;
    const Green *green = green_of(&call, handle, &error);
    if (!green) return error;
    Event *event = object_of(&call, EVENT, event_handle);
    REQUIRE(event && event->context->primary == green->context->primary, CUDA_ERROR_INVALID_HANDLE);
    Gathering it = {.context = green->context};
    objects_each(STREAM, look_for_capture, &it);
    if (it.captured) misuse(&call, "a stream of the green context is being captured");
    REQUIRE(!it.captured, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    objects_each(STREAM, gather, &it);
    if (event->mark) mark_drop(event->mark);
    event->mark = it.marks ? it.marks : mark_new(NULL, NULL);
    return CUDA_SUCCESS;
}

CUresult cuGreenCtxWaitEvent(CUgreenCtx handle, CUevent event_handle) {
    CALL_WITH_GREEN(cuGreenCtxWaitEvent, ASYNC, handle, N(handle), N(event_handle));
    CUresult error;
    const Green *green = green_of(&call, handle, &error);
    if (!green) return error;
    const Event *event = object_of(&call, EVENT, event_handle);
    REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
    Gathering it = {.context = green->context, .marks = event->mark};
    objects_each(STREAM, look_for_capture, &it);
    if (event->capture) capture_break(event->capture);
    if (it.captured || event->capture) {
        misuse(&call, "a stream of the green context, or the event, is part of a capture");
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (it.marks) objects_each(STREAM, submit_wait, &it);
    return CUDA_SUCCESS;
}
