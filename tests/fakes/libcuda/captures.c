/* Captures: what they record, what breaks them. */
#include "graphs.h"

#include <stdlib.h>

static Capture *under_way;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* ---- Frontiers ---------------------------------------------------------------------------------------------------- */

static void frontier_clear(Frontier *frontier) {
    free(frontier->nodes);
    *frontier = (Frontier){NULL, 0};
}

static void frontier_add(Frontier *frontier, Node *node) {
    for (unsigned at = 0; at < frontier->count; at++)
        if (frontier->nodes[at] == node) return;
    frontier->nodes = realloc(frontier->nodes, (frontier->count + 1) * sizeof *frontier->nodes);
    frontier->nodes[frontier->count++] = node;
}

static void frontier_join(Frontier *frontier, const Frontier *other) {
    for (unsigned at = 0; at < other->count; at++) frontier_add(frontier, other->nodes[at]);
}

static bool frontier_has(const Frontier *frontier, const Node *node) {
    for (unsigned at = 0; at < frontier->count; at++)
        if (frontier->nodes[at] == node) return true;
    return false;
}

/* ---- Rules of a capture under way ---------------------------------------------------------------------------------- */

void capture_break(Capture *capture) { capture->broken = true; }

bool capture_forbids(Call *call) {
    bool forbidden = false;
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    for (Capture *capture = under_way; capture; capture = capture->next) {
        const bool own = pthread_equal(capture->thread, pthread_self());
        const bool minds = own ? capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                               : capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                     thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (!minds) continue;
        misuse(call, "stream %u is being captured by %s thread", capture->origin->object.number,
               own ? "this" : "another");
        capture_break(capture);
        forbidden = true;
    }
    return forbidden;
}

bool capture_blocks_default_stream(Call *call) {
    bool blocked = false;
    for (Capture *capture = under_way; capture; capture = capture->next) {
        if (capture->origin->flags & CU_STREAM_NON_BLOCKING) continue;
        misuse(call, "the default stream would wait for stream %u, which is being captured",
               capture->origin->object.number);
        capture_break(capture);
        blocked = true;
    }
    return blocked;
}

CUresult capture_add(Call *call, Stream *stream, Op *op) {
    Capture *capture = stream->capture;
    if (capture->broken) {
        misuse(call, "the capture was invalidated before");
        op_drop(op);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    Node *node = object_new(NODE, sizeof *node);
    node->object.hidden = true;
    node->op = *op;
    node->op.from_graph = true;
    op_drop(op);
    for (unsigned at = 0; at < stream->tails.count; at++) stream->tails.nodes[at]->followers++;
    node->after = stream->tails;
    stream->tails = (Frontier){NULL, 0};
    frontier_add(&stream->tails, node);
    Graph *graph = capture->graph;
    *graph->last = node;
    graph->last = &node->next;
    graph->count++;
    return CUDA_SUCCESS;
}

CUresult capture_record(Call *call, Stream *stream, Event *event, unsigned flags) {
    if (flags & CU_EVENT_RECORD_EXTERNAL) {
        Op *op = op_new(RECORD, stream);
        op->event = event;
        return capture_add(call, stream, op);
    }
    if (stream->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->capture = stream->capture;
    frontier_clear(&event->after);
    frontier_join(&event->after, &stream->tails);
    return CUDA_SUCCESS;
}

CUresult capture_wait(Call *call, Stream *stream, Event *event, unsigned flags) {
    if (flags & CU_EVENT_WAIT_EXTERNAL) {
        Op *op = op_new(WAIT, stream);
        op->event = event;
        return capture_add(call, stream, op);
    }
    if (!event->capture && !event->mark) return CUDA_SUCCESS; /* never recorded: nothing to wait for */
    Capture *of_event = event->capture && !event->capture->object.dead ? event->capture : NULL;
    if (stream->capture && of_event && stream->capture != of_event) {
        misuse(call, "two captures would merge");
        capture_break(stream->capture);
        capture_break(of_event);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (!of_event) {
        misuse(call, "event %u was recorded outside the capture", event->object.number);
        if (stream->capture) capture_break(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    stream->capture = of_event;
    frontier_join(&stream->tails, &event->after);
    return of_event->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

/* ---- Beginning and ending one --------------------------------------------------------------------------------------- */

static bool special(CUstream handle) {
    return !handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD;
}

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
    CALL(cuStreamBeginCapture, ASYNC, N(handle), N(mode));
    REQUIRE(mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!special(handle), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CUresult error;
    Stream *stream = stream_of(&call, handle, &error);
    if (!stream) return error;
    if (stream->capture) misuse(&call, "stream %u is being captured already", stream->object.number);
    REQUIRE(!stream->capture, CUDA_ERROR_ILLEGAL_STATE);
    Capture *capture = object_new(CAPTURE, sizeof *capture);
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = pthread_self();
    capture->graph = object_new(GRAPH, sizeof *capture->graph);
    capture->graph->last = &capture->graph->first;
    capture->graph->object.hidden = true; /* the caller's once the capture has ended */
    capture->next = under_way;
    under_way = capture;
    stream->capture = capture;
    return CUDA_SUCCESS;
}

/* Work of a forked stream that nothing in the origin comes after. */
static bool unjoined(const Capture *capture) {
    for (const Node *node = capture->graph->first; node; node = node->next)
        if (!node->followers && !frontier_has(&capture->origin->tails, node)) return true;
    return false;
}

static void leave(void *object, void *with) {
    Stream *stream = object;
    if (stream->capture != with) return;
    stream->capture = NULL;
    frontier_clear(&stream->tails);
}

static void finish(Capture *capture) {
    for (Capture **at = &under_way; *at; at = &(*at)->next) {
        if (*at != capture) continue;
        *at = capture->next;
        break;
    }
    objects_each_ever(STREAM, leave, capture);
    object_end(capture);
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    CALL(cuStreamEndCapture, ASYNC, N(handle));
    REQUIRE(graph, CUDA_ERROR_INVALID_VALUE);
    *graph = NULL;
    CUresult error;
    Stream *stream = stream_of(&call, handle, &error);
    if (!stream) return error;
    Capture *capture = stream->capture;
    if (!capture) misuse(&call, "stream %u is not being captured", stream->object.number);
    REQUIRE(capture, CUDA_ERROR_ILLEGAL_STATE);
    const bool own = pthread_equal(capture->thread, pthread_self()) || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    if (capture->origin != stream || !own) misuse(&call, "the capture began in another stream or thread");
    REQUIRE(capture->origin == stream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    REQUIRE(own, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    if (!capture->broken && unjoined(capture)) {
        misuse(&call, "a fork of the capture was not joined");
        error = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    } else if (capture->broken) {
        error = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else {
        capture->graph->object.hidden = false;
        *graph = (CUgraph)capture->graph->object.handle;
    }
    finish(capture);
    return error;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    CALL(cuStreamIsCapturing, 0, N(handle));
    REQUIRE(status, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    const Stream *stream = stream_of(&call, handle, &error);
    if (!stream) return error;
    *status = !stream->capture          ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                        : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CALL(cuThreadExchangeStreamCaptureMode, 0, mode ? N(*mode) : 0);
    REQUIRE(mode && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
    const CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static void drop_node(void *object, void *with) {
    (void)with;
    frontier_clear(&((Node *)object)->after);
}

void captures_forget(void) {
    under_way = NULL;
    objects_each_ever(NODE, drop_node, NULL);
}
