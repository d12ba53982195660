/* Graphs, and what they run as. A kernel node keeps the context of the stream it was captured in. */
#include "graphs.h"

#include <stdlib.h>
#include <string.h>

typedef struct Executable {
    Object object;
    Op *ops; /* in an order that respects the edges: that of the capture */
    unsigned count;
    Mark *last; /* of its last launch: a launch waits for the one before */
} Executable;

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

void graphs_forget(void) { objects_each_ever(EXECUTABLE, drop_executable, NULL); }
