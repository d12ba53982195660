/* A strict stand-in for libcuda.so.1: what its files share.
 *
 * One lock guards everything. A driver call takes it on entry (CALL), says what it was called with, is refused where
 * a rule, an injected fault or a poisoned device says so, and gives the lock back on return. Streams run their work
 * on a thread each (streams.c), so completion is as asynchronous as on a device.
 *
 * Two kinds of answer to a broken rule: the error the header documents, and a record of the misuse. Where the header
 * calls a thing undefined, or allows what loses work (destroying an undrained stream), there is a record only.
 */
#ifndef FAKE_LIBCUDA_H
#define FAKE_LIBCUDA_H

#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
/* What programs look up by name to see whether there is a driver; all else they get from cuGetProcAddress. */
EXPORT CUresult cuInit(unsigned int flags);
EXPORT CUresult cuDriverGetVersion(int *version);

#define MAX_SMS 256
#define MAX_ARGS 8

/* ---- SM sets ------------------------------------------------------------------------------------------------ */

typedef struct SmSet {
    uint64_t bits[MAX_SMS / 64];
} SmSet;

unsigned sms_count(const SmSet *set);
SmSet sms_first(unsigned count);
/* Moves the `count` lowest SMs of `from` into the result. */
SmSet sms_take(SmSet *from, unsigned count);
/* Drops the `count` highest SMs. */
void sms_drop(SmSet *set, unsigned count);

/* ---- Objects and handles (handles.c) ------------------------------------------------------------------------- */

typedef enum Kind {
    PRIMARY, CONTEXT, GREEN, GREEN_CONTEXT, DESCRIPTOR, STREAM, EVENT, MODULE, LIBRARY, KERNEL, FUNCTION, MEMORY,
    HOST_MEMORY, IPC_MEMORY, ALLOCATION, ADDRESSES, MAPPING, CAPTURE, GRAPH, NODE, EXECUTABLE, KINDS
} Kind;

typedef struct Object {
    Kind kind;
    unsigned number; /* the how-manieth of its kind since the last reset */
    bool dead;
    bool hidden; /* not the caller's to destroy, so no leak */
    uintptr_t handle;
} Object;

typedef struct Call Call;

void *object_new(Kind kind, size_t size);
void object_end(void *object);
/* The living object behind a handle; else NULL and a misuse record. */
void *object_of(Call *call, Kind kind, const void *handle);
/* The object behind a handle, dead or alive; NULL if there never was one of that kind. No record. */
void *object_seek(Kind kind, const void *handle);
/* Calls `visit` for every living object of the kind. */
void objects_each(Kind kind, void (*visit)(void *object, void *with), void *with);
/* The same for the dead too. */
void objects_each_ever(Kind kind, void (*visit)(void *object, void *with), void *with);
const char *kind_name(Kind kind);
unsigned objects_live(Kind kind);
void objects_forget(void);

/* ---- Calls: the log, faults, misuse (calls.c) ---------------------------------------------------------------- */

enum {
    BEFORE_INIT = 1, /* allowed before cuInit */
    IN_CONTEXT = 2,  /* needs a current context */
    ASYNC = 4,       /* may report an earlier asynchronous error; refused once a sticky one poisoned the device */
    UNSAFE = 16,     /* forbidden, and fatal to the capture, while a capture that minds is under way */
    RELEASE = 8,     /* frees something: on a poisoned device it still frees, and reports the sticky error */
};

typedef struct Function {
    const char *name;
    unsigned flags;
} Function;

struct Call {
    const char *name;
    CUresult refused;
    CUresult poison;
    struct Green *green;
};

Call call_enter(const Function *function, CUgreenCtx green, unsigned count, const long long *args);
void call_leave(Call *call);
/* The result of a RELEASE call: the sticky error where there is one. */
CUresult call_result(const Call *call, CUresult result);
void misuse(const Call *call, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Waits until something changed; the lock is held before and after. */
void wait_for_change(void);
void changed(void);
bool device_poisoned(void);
CUresult device_error(void);
void calls_forget(void);

#define N(value) ((long long)(intptr_t)(value))
/* The name is made a string before cuda.h can turn cuStreamDestroy into cuStreamDestroy_v2. */
#define CALL(function, flags, ...) CALL_NAMED(#function, flags, NULL, ##__VA_ARGS__)
#define CALL_WITH_GREEN(function, flags, green, ...) CALL_NAMED(#function, flags, green, ##__VA_ARGS__)
#define CALL_NAMED(name, flags, green, ...)                                                                          \
    static const Function self_ = {name, (flags)};                                                                   \
    const long long args_[] = {0, ##__VA_ARGS__};                                                                    \
    Call call __attribute__((cleanup(call_leave))) =                                                                 \
        call_enter(&self_, (green), sizeof args_ / sizeof *args_ - 1, args_ + 1);                                    \
    if (call.refused) return call.refused
#define REQUIRE(condition, error)                                                                                    \
    do {                                                                                                             \
        if (!(condition)) return (error);                                                                            \
    } while (0)

extern pthread_mutex_t lock;

/* ---- Devices (devices.c) ------------------------------------------------------------------------------------- */

typedef struct Gpu {
    const char *key;
    const char *name;
    int major, minor;
    unsigned sms;
    size_t memory;
    int l2_bytes, memory_bus, memory_khz, clock_khz;
} Gpu;

typedef struct Options {
    bool initialised;
    bool refuses_aligned;   /* a topology in which odd multiples of the alignment fit no cluster */
    unsigned short_rest;    /* SMs missing from every remainder */
    unsigned short_context; /* SMs missing from every green context */
    bool events_per_primary;/* an event may be recorded in any stream of its primary context */
    bool mps;               /* the process is a client of an MPS daemon */
    unsigned mps_sms;       /* SMs that MPS leaves it; 0: all */
    size_t context_bytes;   /* device memory that a green context takes */
    size_t graph_bytes;     /* ...and an executable graph */
} Options;

typedef struct Context {
    Object object;
    struct Context *primary; /* itself, unless it stands for a green context */
    struct Green *green;
    unsigned retained;  /* of a primary: the caller's references since the last reset; */
    unsigned inherited; /* ...those from before (cuda.core keeps one a thread for its life); */
    unsigned greens;    /* ...and those of its green contexts */
    SmSet sms;
    unsigned affinity;
    unsigned id;
    struct Stream *default_stream;
} Context;

extern int driver_version;
extern const Gpu *gpu;
extern Options options;
extern bool process_initialised; /* cuInit has ever been called */

unsigned fake_primary_retained(void);
int attribute(CUdevice_attribute name);
bool gpu_choose(const char *key);
Context *primary_context(void);
bool primary_active(void);
void primary_retain(bool by_green);
CUresult primary_release(Call *call, bool by_green);
void devices_forget(void);

/* ---- Contexts (contexts.c) ----------------------------------------------------------------------------------- */

Context *context_current(void);
/* The context behind a handle, of whichever kind; NULL and a record otherwise. */
Context *context_of(Call *call, CUcontext handle, CUresult *error);
CUcontext context_handle(const Context *context);
/* What must not be alive or pending when a context goes: one record each. */
void context_check_end(Call *call, Context *context);
void contexts_forget(void);

/* ---- Resources (resources.c) --------------------------------------------------------------------------------- */

typedef struct Workqueue {
    bool given;
    unsigned limit;
    CUdevWorkqueueConfigScope scope;
} Workqueue;

typedef struct Descriptor {
    Object object;
    SmSet sms;
    unsigned alignment;
    Workqueue workqueue;
} Descriptor;

CUresult resource_fill(CUdevResource *resource, CUdevResourceType type, const SmSet *sms, unsigned alignment,
                       const Workqueue *workqueue);
unsigned sm_alignment(void);
unsigned sm_minimum(void);
void resources_forget(void);

/* ---- Green contexts (green.c) -------------------------------------------------------------------------------- */

typedef struct Green {
    Object object;
    Context *context; /* the CUcontext that stands for it */
    unsigned alignment;
    Workqueue workqueue;
    unsigned users; /* calls that are using the handle now */
} Green;

/* ---- Streams and events (streams.c, events.c) ----------------------------------------------------------------- */

/* The last use of something in a stream: freeing it is safe once the host knows that this is done. */
typedef struct Use {
    struct Stream *stream;
    unsigned long long sequence;
} Use;

/* One recording of an event: done when its stream gets there. Shared by whoever waits for it. */
typedef struct Mark {
    unsigned references;
    bool done;
    double at; /* ms */
    struct Stream *stream;
    unsigned long long sequence; /* of the stream's work: done implies all work up to it is done */
    struct Mark *joined;         /* of a green context's event: the marks of its other streams */
} Mark;

Mark *mark_new(struct Stream *stream, Mark *joined);
Mark *mark_keep(Mark *mark);
void mark_drop(Mark *mark);
bool mark_done(const Mark *mark);

typedef enum Work { RUN_KERNEL, RUN_HOST, RECORD, WAIT, COPY, FILL } Work;

typedef struct Op {
    struct Op *next;
    Work work;
    struct Stream *stream; /* where it was issued */
    Context *context;      /* whose SMs it runs on */
    Mark *mark;
    bool from_graph;
    union {
        struct {
            struct Code *code;
            unsigned grid[3], block[3], shared;
            uint64_t args[3]; /* of a kernel that the fake plays */
        } run;
        struct {
            CUhostFn function;
            void *data;
        } host;
        struct {
            char *to;
            const char *from; /* COPY */
            size_t count;     /* elements */
            unsigned value, width;
        } move;
        struct Event *event; /* RECORD and WAIT in a graph: external ones */
    };
} Op;

/* Nodes of a capture that what comes next depends on. */
typedef struct Frontier {
    struct Node **nodes;
    unsigned count;
} Frontier;

typedef struct Seen { /* once `after` of this stream is known to be done, so is all up to the mark */
    struct Seen *next;
    unsigned long long after;
    Mark *mark;
} Seen;

typedef struct Stream {
    Object object;
    Context *context;
    unsigned flags;
    int priority;
    bool detached; /* its green context is gone */
    bool ending, paused;
    pthread_t worker;
    pthread_cond_t work;
    Op *first, **last;
    unsigned long long submitted, completed;
    unsigned long long observed; /* the host has learnt that all up to here is done */
    Seen *seen;
    struct Capture *capture;
    Frontier tails;
} Stream;

typedef struct Event {
    Object object;
    Context *context;
    unsigned flags;
    Mark *mark; /* NULL before the first recording */
    struct Capture *capture; /* last recorded inside this capture, */
    Frontier after;          /* after these nodes */
} Event;

Stream *stream_new(Context *context, unsigned flags, int priority);
Stream *stream_of(Call *call, CUstream handle, CUresult *error);
/* The submission number of the op, which the stream now owns. */
unsigned long long stream_submit(Stream *stream, Op *op);
/* Capture it or submit it. */
CUresult stream_issue(Call *call, Stream *stream, Op *op);
Op *op_new(Work work, Stream *stream);
void op_drop(Op *op);
void stream_observe(Stream *stream, unsigned long long sequence);
/* The stream waits for a mark, and for those joined to it. */
void stream_wait_mark(Stream *stream, Mark *mark);
/* Records a mark in the stream. The caller has a reference. */
Mark *stream_mark(Stream *stream, Mark *joined);
bool use_pending(const Use *use);
bool stream_drained(const Stream *stream);
void stream_detach(Stream *stream);
void streams_forget(void);
double now_ms(void);
CUresult mark_wait(const Mark *mark);
void mark_observe(const Mark *mark);

/* ---- Kernels (modules.c) --------------------------------------------------------------------------------------- */

/* A kernel of a library, or a function of a module. */
typedef struct Code {
    Object object;
    char *name;
    struct Loaded *from;
    int shared_limit;
} Code;

Use *code_use(Code *code);
bool code_unloaded(const Code *code);
void kernel_run(const Op *op);
void modules_forget(void);

/* ---- Memory (memory.c, mapping.c) ------------------------------------------------------------------------------- */

enum { MAPPING_GRAIN = 2 << 20 };

typedef struct Memory {
    Object object;
    char *base;
    size_t size;
    int fd;         /* of its bytes, which other processes may map too */
    Context *owner;
    Use last;
    bool open;      /* a mapping: accessible */
    unsigned opened;/* an IPC mapping: how often; an allocation: handles */
    int origin_pid, origin_fd;
    CUmemAllocationHandleType shareable;
    struct Memory *backing;
} Memory;

void memory_run(const Op *op);
void memory_note_use(const Op *op, Stream *stream, unsigned long long sequence);
size_t memory_free_bytes(void);
bool memory_take(size_t bytes);
void memory_give(size_t bytes);
Memory *memory_find(Kind kind, const void *base);
int bytes_new(size_t size);
void memory_forget(void);

/* ---- Captures and graphs (captures.c, graphs.c) ----------------------------------------------------------------------------- */

/* Whether an unsafe call must be refused; breaks the captures it would have spoilt. */
bool capture_forbids(Call *call);
bool capture_blocks_default_stream(Call *call);
CUresult capture_add(Call *call, Stream *stream, Op *op);
CUresult capture_record(Call *call, Stream *stream, Event *event, unsigned flags);
CUresult capture_wait(Call *call, Stream *stream, Event *event, unsigned flags);
void capture_break(struct Capture *capture);
/* Executable graphs with a kernel in the context: records of misuse. */
void graphs_check_end(Call *call, const Context *context);
void captures_forget(void);
void graphs_forget(void);

#endif
