/* Events. */
#include "fake.h"

CUresult cuEventCreate(CUevent *handle, unsigned int flags) {
    CALL(cuEventCreate, IN_CONTEXT | ASYNC, N(flags));
    const unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    REQUIRE(handle && !(flags & ~known), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!(flags & CU_EVENT_INTERPROCESS) || flags & CU_EVENT_DISABLE_TIMING, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    Context *context = context_of(&call, context_handle(context_current()), &error);
    if (!context) return error;
    Event *event = object_new(EVENT, sizeof *event);
    event->context = context;
    event->flags = flags;
    *handle = (CUevent)event->object.handle;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent handle) {
    CALL(cuEventDestroy, ASYNC | RELEASE, N(handle));
    Event *event = object_of(&call, EVENT, handle);
    REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
    if (event->mark) mark_drop(event->mark);
    event->mark = NULL;
    object_end(event);
    return call_result(&call, CUDA_SUCCESS);
}

/* "hEvent and hStream must be from the same context." */
static bool fits(Call *call, const Event *event, const Stream *stream) {
    const bool same = options.events_per_primary ? event->context->primary == stream->context->primary
                                                 : event->context == stream->context;
    if (!same)
        misuse(call, "event %u and stream %u are of different contexts", event->object.number, stream->object.number);
    return same;
}

static CUresult record(Call *call, CUevent handle, CUstream stream_handle, unsigned flags) {
    Event *event = object_of(call, EVENT, handle);
    REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
    CUresult error;
    Stream *stream = stream_of(call, stream_handle, &error);
    if (!stream) return error;
    REQUIRE(!(flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!flags || stream->capture, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(fits(call, event, stream), CUDA_ERROR_INVALID_HANDLE);
    if (stream->capture) return capture_record(call, stream, event, flags);
    Mark *mark = stream_mark(stream, NULL);
    if (event->mark) mark_drop(event->mark);
    event->mark = mark;
    event->capture = NULL;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    CALL(cuEventRecord, ASYNC, N(event), N(stream));
    return record(&call, event, stream, 0);
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
    CALL(cuEventRecordWithFlags, ASYNC, N(event), N(stream), N(flags));
    return record(&call, event, stream, flags);
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned int flags) {
    CALL(cuStreamWaitEvent, ASYNC, N(stream_handle), N(handle), N(flags));
    Event *event = object_of(&call, EVENT, handle);
    REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
    CUresult error;
    Stream *stream = stream_of(&call, stream_handle, &error);
    if (!stream) return error;
    REQUIRE(!(flags & ~(unsigned)CU_EVENT_WAIT_EXTERNAL), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!flags || stream->capture, CUDA_ERROR_INVALID_VALUE);
    if (stream->capture || event->capture) return capture_wait(&call, stream, event, flags);
    if (event->mark) stream_wait_mark(stream, event->mark);
    return CUDA_SUCCESS;
}

/* What a capture recorded has no completion to ask for. */
static CUresult recorded(Call *call, Event *event) {
    if (!event->capture) return CUDA_SUCCESS;
    misuse(call, "event %u was recorded in a capture", event->object.number);
    capture_break(event->capture);
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult cuEventQuery(CUevent handle) {
    CALL(cuEventQuery, ASYNC | UNSAFE, N(handle));
    Event *event = object_of(&call, EVENT, handle);
    REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
    const CUresult error = recorded(&call, event);
    if (error || !event->mark) return error;
    REQUIRE(mark_done(event->mark), CUDA_ERROR_NOT_READY);
    mark_observe(event->mark);
    return CUDA_SUCCESS;
}

CUresult cuEventSynchronize(CUevent handle) {
    CALL(cuEventSynchronize, ASYNC | UNSAFE, N(handle));
    Event *event = object_of(&call, EVENT, handle);
    REQUIRE(event, CUDA_ERROR_INVALID_HANDLE);
    CUresult error = recorded(&call, event);
    if (error || !event->mark) return error;
    Mark *mark = mark_keep(event->mark); /* the event may be recorded anew while this waits */
    error = mark_wait(mark);
    if (!error) mark_observe(mark);
    mark_drop(mark);
    return error;
}

CUresult cuEventElapsedTime_v2(float *ms, CUevent from_handle, CUevent to_handle) {
    CALL(cuEventElapsedTime, ASYNC, N(from_handle), N(to_handle));
    REQUIRE(ms, CUDA_ERROR_INVALID_VALUE);
    const Event *from = object_of(&call, EVENT, from_handle);
    const Event *to = object_of(&call, EVENT, to_handle);
    REQUIRE(from && to, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(from->context->primary == to->context->primary, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(from->mark && to->mark, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(mark_done(from->mark) && mark_done(to->mark), CUDA_ERROR_NOT_READY);
    *ms = (float)(to->mark->at - from->mark->at);
    return CUDA_SUCCESS;
}
