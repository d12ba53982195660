/* Captures, and the graphs they make. A kernel node keeps the context of the stream it was captured in. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

typedef struct Node {
    Object object;
    Op op;
    Frontier after;
    unsigned followers;
    struct Node *next;
} Node;

typedef struct Graph {
    Object object;
    Node *first, **last;
    unsigned count;
} Graph;

typedef struct Capture {
    Object object;
    Stream *origin;
    CUstreamCaptureMode mode;
    pthread_t thread;
    bool broken;
    Graph *graph;
    struct Capture *next; /* under way too */
} Capture;

typedef struct Executable {
    Object object;
    Op *ops; /* in an order that respects the edges: that of the capture */
    unsigned count;
    Mark *last; /* of its last launch: a launch waits for the one before */
} Executable;

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

/* ---- Graphs ---------------------------------------------------------------------------------------------------------- */

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    CALL(cuGraphGetNodes, 0, N(handle));
    const Graph *graph = object_of(&call, GRAPH, handle);
    REQUIRE(graph && count, CUDA_ERROR_INVALID_VALUE);
    size_t at = 0;
    for (const Node *node = graph->first; nodes && node && at < *count; node = node->next)
        nodes[at++] = (CUgraphNode)node->object.handle;
    if (nodes)
        while (at < *count) nodes[at++] = NULL;
    *count = graph->count;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType *type) {
    CALL(cuGraphNodeGetType, 0, N(handle));
    const Node *node = object_of(&call, NODE, handle);
    REQUIRE(node && type, CUDA_ERROR_INVALID_VALUE);
    static const CUgraphNodeType types[] = {
        [RUN_KERNEL] = CU_GRAPH_NODE_TYPE_KERNEL, [RUN_HOST] = CU_GRAPH_NODE_TYPE_HOST,
        [RECORD] = CU_GRAPH_NODE_TYPE_EVENT_RECORD, [WAIT] = CU_GRAPH_NODE_TYPE_WAIT_EVENT,
        [COPY] = CU_GRAPH_NODE_TYPE_MEMCPY, [FILL] = CU_GRAPH_NODE_TYPE_MEMSET,
    };
    *type = types[node->op.work];
    return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeGetParams_v2(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS *params) {
    CALL(cuGraphKernelNodeGetParams, 0, N(handle));
    const Node *node = object_of(&call, NODE, handle);
    REQUIRE(node && params && node->op.work == RUN_KERNEL, CUDA_ERROR_INVALID_VALUE);
    const Op *op = &node->op;
    memset(params, 0, sizeof *params);
    const void *code = (void *)op->run.code->object.handle;
    if (op->run.code->object.kind == KERNEL)
        params->kern = (CUkernel)code;
    else
        params->func = (CUfunction)code;
    params->gridDimX = op->run.grid[0], params->gridDimY = op->run.grid[1], params->gridDimZ = op->run.grid[2];
    params->blockDimX = op->run.block[0], params->blockDimY = op->run.block[1], params->blockDimZ = op->run.block[2];
    params->sharedMemBytes = op->run.shared;
    params->ctx = context_handle(op->context);
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph handle) {
    CALL(cuGraphDestroy, RELEASE, N(handle));
    Graph *graph = object_of(&call, GRAPH, handle);
    REQUIRE(graph, CUDA_ERROR_INVALID_VALUE);
    for (Node *node = graph->first; node; node = node->next) object_end(node);
    object_end(graph);
    return call_result(&call, CUDA_SUCCESS);
}

/* ---- Executable graphs ------------------------------------------------------------------------------------------------ */

static CUresult instantiate(Call *call, CUgraphExec *handle, CUgraph of) {
    const Graph *graph = object_of(call, GRAPH, of);
    REQUIRE(handle && graph, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(memory_take(options.graph_bytes), CUDA_ERROR_OUT_OF_MEMORY);
    Executable *executable = object_new(EXECUTABLE, sizeof *executable);
    executable->ops = calloc(graph->count ? graph->count : 1, sizeof *executable->ops);
    for (const Node *node = graph->first; node; node = node->next) executable->ops[executable->count++] = node->op;
    *handle = (CUgraphExec)executable->object.handle;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *handle, CUgraph of, unsigned long long flags) {
    CALL(cuGraphInstantiateWithFlags, ASYNC | UNSAFE, N(of), N(flags));
    return instantiate(&call, handle, of);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *handle, CUgraph of, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    CALL(cuGraphInstantiateWithParams, ASYNC | UNSAFE, N(of));
    REQUIRE(params, CUDA_ERROR_INVALID_VALUE);
    const CUresult error = instantiate(&call, handle, of);
    params->hErrNode_out = NULL;
    params->result_out = error ? CUDA_GRAPH_INSTANTIATE_ERROR : CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return error;
}

/* An op of the graph as work for a stream. Events get a new mark a launch. */
static Op *launched(const Op *of, Stream *stream) {
    Op *op = malloc(sizeof *op);
    *op = *of;
    op->next = NULL;
    op->stream = stream;
    op->mark = NULL;
    if (op->work == RECORD) {
        Mark *mark = mark_new(stream, NULL);
        if (op->event->mark) mark_drop(op->event->mark);
        op->event->mark = mark;
        op->event->capture = NULL;
        op->mark = mark_keep(mark);
    }
    return op;
}

/* A node can run only where its context, its code and its event still are. */
static bool intact(Call *call, const Op *op) {
    const char *lost = op->context->object.dead                                        ? "context"
                       : op->work == RUN_KERNEL && code_unloaded(op->run.code)             ? "module"
                       : (op->work == RECORD || op->work == WAIT) && op->event->object.dead ? "event"
                                                                                       : NULL;
    if (lost) misuse(call, "the graph has a node whose %s is gone", lost);
    return !lost;
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    CALL(cuGraphLaunch, ASYNC, N(handle), N(stream_handle));
    Executable *executable = object_of(&call, EXECUTABLE, handle);
    REQUIRE(executable, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    Stream *stream = stream_of(&call, stream_handle, &error);
    if (!stream) return error;
    if (stream->capture) misuse(&call, "the fake captures no graph into a graph");
    REQUIRE(!stream->capture, CUDA_ERROR_NOT_SUPPORTED);
    for (unsigned at = 0; at < executable->count; at++)
        REQUIRE(intact(&call, &executable->ops[at]), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    if (executable->last) stream_wait_mark(stream, executable->last);
    for (unsigned at = 0; at < executable->count; at++) {
        const Op *op = &executable->ops[at];
        if (op->work != WAIT)
            stream_submit(stream, launched(op, stream));
        else if (op->event->mark)
            stream_wait_mark(stream, op->event->mark);
    }
    if (executable->last) mark_drop(executable->last);
    executable->last = stream_mark(stream, NULL);
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle) {
    CALL(cuGraphUpload, ASYNC, N(handle), N(stream_handle));
    REQUIRE(object_of(&call, EXECUTABLE, handle), CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    stream_of(&call, stream_handle, &error);
    return error;
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
    CALL(cuGraphExecDestroy, ASYNC | RELEASE, N(handle));
    Executable *executable = object_of(&call, EXECUTABLE, handle);
    REQUIRE(executable, CUDA_ERROR_INVALID_VALUE);
    object_end(executable); /* what is in flight ends by itself */
    memory_give(options.graph_bytes);
    return call_result(&call, CUDA_SUCCESS);
}

typedef struct Ending {
    Call *call;
    const Context *context;
} Ending;

static void check_executable(void *object, void *with) {
    const Executable *executable = object;
    const Ending *ending = with;
    for (unsigned at = 0; at < executable->count; at++) {
        if (executable->ops[at].context != ending->context) continue;
        misuse(ending->call, "executable graph %u runs in it", executable->object.number);
        return;
    }
}

void graphs_check_end(Call *call, const Context *context) {
    Ending ending = {call, context};
    objects_each(EXECUTABLE, check_executable, &ending);
}

static void drop_executable(void *object, void *with) {
    (void)with;
    free(((Executable *)object)->ops);
}

static void drop_node(void *object, void *with) {
    (void)with;
    frontier_clear(&((Node *)object)->after);
}

void graphs_forget(void) {
    under_way = NULL;
    objects_each_ever(EXECUTABLE, drop_executable, NULL);
    objects_each_ever(NODE, drop_node, NULL);
}
