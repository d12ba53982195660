/* Streams: a queue each, and a thread that works it off in order. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static unsigned workers;
static bool all_paused;
static bool quitting;

double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* ---- Work ----------------------------------------------------------------------------------------------------- */

Op *op_new(Work work, Stream *stream) {
    Op *op = calloc(1, sizeof *op);
    op->work = work;
    op->stream = stream;
    op->context = stream->context;
    return op;
}

void op_drop(Op *op) {
    mark_drop(op->mark);
    free(op);
}

unsigned long long stream_submit(Stream *stream, Op *op) {
    const unsigned long long sequence = ++stream->submitted;
    if (op->work == RECORD) op->mark->sequence = sequence;
    if (op->work == RUN_KERNEL) *code_use(op->run.code) = (Use){stream, sequence};
    memory_note_use(op, stream, sequence);
    *stream->last = op;
    stream->last = &op->next;
    pthread_cond_signal(&stream->work);
    return sequence;
}

Mark *stream_mark(Stream *stream, Mark *joined) {
    Mark *mark = mark_new(stream, joined);
    Op *op = op_new(RECORD, stream);
    op->mark = mark_keep(mark);
    stream_submit(stream, op);
    return mark;
}

void stream_wait_mark(Stream *stream, Mark *marks) {
    for (Mark *mark = marks; mark; mark = mark->joined) {
        if (!mark->stream) continue;
        Op *op = op_new(WAIT, stream);
        op->mark = mark_keep(mark);
        Seen *seen = malloc(sizeof *seen);
        *seen = (Seen){stream->seen, stream_submit(stream, op), mark_keep(mark)};
        stream->seen = seen;
    }
}

CUresult stream_issue(Call *call, Stream *stream, Op *op) {
    if (stream->capture) return capture_add(call, stream, op);
    stream_submit(stream, op);
    return CUDA_SUCCESS;
}

/* A host function and the bytes of a copy run without the lock, as beside a device. */
static void run(Op *op) {
    switch (op->work) {
    case RUN_KERNEL:
        kernel_run(op);
        break;
    case RUN_HOST:
        pthread_mutex_unlock(&lock);
        op->host.function(op->host.data);
        pthread_mutex_lock(&lock);
        break;
    case COPY: case FILL:
        pthread_mutex_unlock(&lock);
        memory_run(op);
        pthread_mutex_lock(&lock);
        break;
    case WAIT:
        while (!op->mark->done && !device_poisoned() && !quitting) wait_for_change();
        break;
    case RECORD:
        break;
    }
}

static bool idle(const Stream *stream) {
    if (quitting) return false;
    return stream->first ? all_paused || stream->paused : !stream->ending;
}

static void *work_off(void *of) {
    Stream *stream = of;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (idle(stream)) pthread_cond_wait(&stream->work, &lock);
        Op *op = stream->first;
        if (!op) break;
        if (!quitting && !device_poisoned()) run(op);
        if (op->work == RECORD) {
            op->mark->at = now_ms();
            op->mark->done = true;
        }
        stream->first = op->next;
        if (!stream->first) stream->last = &stream->first;
        stream->completed++;
        op_drop(op);
        changed();
    }
    workers--;
    changed();
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* ---- Their life ------------------------------------------------------------------------------------------------ */

Stream *stream_new(Context *context, unsigned flags, int priority) {
    Stream *stream = object_new(STREAM, sizeof *stream);
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    stream->last = &stream->first;
    pthread_cond_init(&stream->work, NULL);
    pthread_t worker;
    pthread_create(&worker, NULL, work_off, stream);
    pthread_detach(worker);
    workers++;
    return stream;
}

static void end_worker(void *object, void *with) {
    Stream *stream = object;
    (void)with;
    stream->ending = true;
    pthread_cond_signal(&stream->work);
}

/* The stream of a handle; the special ones are the default stream of the current context. */
Stream *stream_of(Call *call, CUstream handle, CUresult *error) {
    *error = CUDA_SUCCESS;
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        Context *context = context_current();
        *error = CUDA_ERROR_INVALID_CONTEXT;
        if (!context) misuse(call, "the default stream of no context: none is current to this thread");
        if (!context || !context_of(call, context_handle(context), error)) return NULL;
        *error = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        if (capture_blocks_default_stream(call)) return NULL;
        *error = CUDA_SUCCESS;
        if (!context->default_stream) {
            context->default_stream = stream_new(context, CU_STREAM_DEFAULT, 0);
            context->default_stream->object.hidden = true;
        }
        return context->default_stream;
    }
    Stream *stream = object_of(call, STREAM, handle);
    if (!stream) *error = CUDA_ERROR_INVALID_HANDLE;
    if (!stream || !stream->detached) return stream;
    misuse(call, "stream %u outlived its green context", stream->object.number);
    *error = driver_version >= 13010 ? CUDA_ERROR_STREAM_DETACHED : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return NULL;
}

void stream_detach(Stream *stream) {
    stream->detached = true;
    if (stream->capture) capture_break(stream->capture);
    if (!stream->object.hidden) return;
    end_worker(stream, NULL);
    object_end(stream);
}

/* Ends all workers, and drops the work that is left. */
void streams_forget(void) {
    quitting = true;
    all_paused = false;
    objects_each_ever(STREAM, end_worker, NULL);
    changed();
    while (workers) wait_for_change();
    quitting = false;
}

static CUresult create(CUstream *handle, unsigned flags, int priority) {
    REQUIRE(handle && !(flags & ~(unsigned)CU_STREAM_NON_BLOCKING), CUDA_ERROR_INVALID_VALUE);
    *handle = (CUstream)stream_new(context_current(), flags, priority)->object.handle;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *handle, unsigned int flags) {
    CALL(cuStreamCreate, IN_CONTEXT | ASYNC, N(flags));
    return create(handle, flags, 0);
}

CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int priority) {
    CALL(cuStreamCreateWithPriority, IN_CONTEXT | ASYNC, N(flags), N(priority));
    return create(handle, flags, priority);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
    CALL(cuStreamDestroy, ASYNC | RELEASE, N(handle));
    Stream *stream = object_of(&call, STREAM, handle);
    REQUIRE(stream, CUDA_ERROR_INVALID_HANDLE);
    if (stream->detached && driver_version < 13010) {
        misuse(&call, "stream %u outlived its green context, and cannot be destroyed any more", stream->object.number);
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    if (!stream_drained(stream) && !device_poisoned()) misuse(&call, "stream %u not drained", stream->object.number);
    if (stream->capture) {
        misuse(&call, "stream %u is being captured", stream->object.number);
        capture_break(stream->capture);
    }
    end_worker(stream, NULL);
    object_end(stream);
    return call_result(&call, CUDA_SUCCESS);
}

/* ---- Waiting and asking ---------------------------------------------------------------------------------------- */

static CUresult refuse_captured(Call *call, Stream *stream) {
    if (!stream->capture) return CUDA_SUCCESS;
    misuse(call, "stream %u is being captured", stream->object.number);
    capture_break(stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult cuStreamSynchronize(CUstream handle) {
    CALL(cuStreamSynchronize, ASYNC | UNSAFE, N(handle));
    CUresult error;
    Stream *stream = stream_of(&call, handle, &error);
    if (stream) error = refuse_captured(&call, stream);
    if (error) return error;
    const unsigned long long target = stream->submitted;
    while (stream->completed < target) wait_for_change();
    stream_observe(stream, target);
    return device_error();
}

CUresult cuStreamQuery(CUstream handle) {
    CALL(cuStreamQuery, ASYNC | UNSAFE, N(handle));
    CUresult error;
    Stream *stream = stream_of(&call, handle, &error);
    if (stream) error = refuse_captured(&call, stream);
    if (error) return error;
    REQUIRE(stream->completed == stream->submitted, CUDA_ERROR_NOT_READY);
    stream_observe(stream, stream->completed);
    return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    CALL(cuStreamGetPriority, 0, N(handle));
    REQUIRE(priority, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Stream *stream = stream_of(&call, handle, &error);
    if (stream) *priority = stream->priority;
    return error;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    CALL(cuStreamGetFlags, 0, N(handle));
    REQUIRE(flags, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Stream *stream = stream_of(&call, handle, &error);
    if (stream) *flags = stream->flags;
    return error;
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *id) {
    CALL(cuStreamGetId, 0, N(handle));
    REQUIRE(id, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Stream *stream = stream_of(&call, handle, &error);
    if (stream) *id = stream->object.handle;
    return error;
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice *device) {
    CALL(cuStreamGetDevice, 0, N(handle));
    REQUIRE(device, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    if (stream_of(&call, handle, &error)) *device = 0;
    return error;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    CALL(cuStreamGetCtx, 0, N(handle));
    REQUIRE(context, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Stream *stream = stream_of(&call, handle, &error);
    if (stream) *context = context_handle(stream->context);
    return error;
}

CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext *context, CUgreenCtx *green) {
    CALL(cuStreamGetCtx, 0, N(handle));
    REQUIRE(context && green, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Stream *stream = stream_of(&call, handle, &error);
    if (!stream) return error;
    *context = context_handle(stream->context->green ? stream->context->primary : stream->context);
    *green = stream->context->green ? (CUgreenCtx)stream->context->green->object.handle : NULL;
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    CALL(cuLaunchHostFunc, ASYNC, N(handle), N(data));
    REQUIRE(function, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    Stream *stream = stream_of(&call, handle, &error);
    if (!stream) return error;
    Op *op = op_new(RUN_HOST, stream);
    op->host.function = function;
    op->host.data = data;
    return stream_issue(&call, stream, op);
}

/* ---- Control --------------------------------------------------------------------------------------------------- */

static void wake(void *object, void *with) {
    (void)with;
    pthread_cond_signal(&((Stream *)object)->work);
}

/* Lets no stream, or not the one given, start further work: until told otherwise. */
EXPORT bool fake_pause(CUstream handle, bool paused) {
    pthread_mutex_lock(&lock);
    Stream *stream = handle ? object_seek(STREAM, handle) : NULL;
    if (stream) stream->paused = paused;
    if (!handle) all_paused = paused;
    objects_each_ever(STREAM, wake, NULL);
    pthread_mutex_unlock(&lock);
    return stream || !handle;
}
