/* Handles: every object ever made has a number that is never given out again, so that a stale handle is known as
 * such and never mistaken for a newer object. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

enum { STEP = 64 };
static const uintptr_t FIRST = 0x500000000000;

static Object **objects;
static size_t known, room, forgotten;
static unsigned numbers[KINDS];

static const char *const NAMES[KINDS] = {
    [PRIMARY] = "primary context", [CONTEXT] = "context", [GREEN] = "green context",
    [GREEN_CONTEXT] = "context of a green context", [DESCRIPTOR] = "resource descriptor", [STREAM] = "stream",
    [EVENT] = "event", [MODULE] = "module", [LIBRARY] = "library", [KERNEL] = "kernel", [FUNCTION] = "function",
    [MEMORY] = "memory", [HOST_MEMORY] = "host memory", [IPC_MEMORY] = "IPC mapping",
    [ALLOCATION] = "physical allocation", [ADDRESSES] = "address range", [MAPPING] = "mapping", [CAPTURE] = "capture", [GRAPH] = "graph",
    [NODE] = "graph node", [EXECUTABLE] = "executable graph",
};

const char *kind_name(Kind kind) { return NAMES[kind]; }

void *object_new(Kind kind, size_t size) {
    if (known == room) {
        room = room ? 2 * room : 256;
        objects = realloc(objects, room * sizeof *objects);
    }
    Object *object = calloc(1, size);
    object->kind = kind;
    object->number = ++numbers[kind];
    object->handle = FIRST + STEP * (uintptr_t)known;
    objects[known++] = object;
    return object;
}

void object_end(void *object) {
    ((Object *)object)->dead = true;
}

void *object_seek(Kind kind, const void *handle) {
    const uintptr_t value = (uintptr_t)handle;
    if (value < FIRST || (value - FIRST) % STEP) return NULL;
    const size_t at = (value - FIRST) / STEP;
    Object *object = at < known ? objects[at] : NULL;
    return object && object->kind == kind ? object : NULL;
}

void *object_of(Call *call, Kind kind, const void *handle) {
    Object *object = object_seek(kind, handle);
    if (object && !object->dead) return object;
    const uintptr_t value = (uintptr_t)handle;
    if (object)
        misuse(call, "%s %u used after its end", NAMES[kind], object->number);
    else if (!handle)
        misuse(call, "NULL for a %s", NAMES[kind]);
    else if (value >= FIRST && (value - FIRST) / STEP < forgotten)
        misuse(call, "this %s handle is of before the last reset", NAMES[kind]);
    else
        misuse(call, "%p was never a %s", handle, NAMES[kind]);
    return NULL;
}

void objects_each(Kind kind, void (*visit)(void *, void *), void *with) {
    for (size_t at = forgotten; at < known; at++)
        if (objects[at] && objects[at]->kind == kind && !objects[at]->dead) visit(objects[at], with);
}

void objects_each_ever(Kind kind, void (*visit)(void *, void *), void *with) {
    for (size_t at = forgotten; at < known; at++)
        if (objects[at] && objects[at]->kind == kind) visit(objects[at], with);
}

unsigned objects_live(Kind kind) {
    unsigned count = 0;
    for (size_t at = forgotten; at < known; at++)
        count += objects[at] && objects[at]->kind == kind && !objects[at]->dead && !objects[at]->hidden;
    return count;
}

void objects_forget(void) {
    for (size_t at = forgotten; at < known; at++) {
        if (objects[at]->kind == PRIMARY) continue; /* the process has one for good; its handle never changes */
        free(objects[at]);
        objects[at] = NULL;
    }
    forgotten = known;
    memset(numbers, 0, sizeof numbers);
}
