/* Marks: recordings of events, and what the host has learnt from them about streams. */
#include "fake.h"

#include <stdlib.h>

/* ---- Recordings ---------------------------------------------------------------------------------------------------- */

Mark *mark_new(Stream *stream, Mark *joined) {
    Mark *mark = calloc(1, sizeof *mark);
    mark->references = 1;
    mark->stream = stream;
    mark->joined = joined;
    mark->done = !stream;
    return mark;
}

Mark *mark_keep(Mark *mark) {
    mark->references++;
    return mark;
}

void mark_drop(Mark *mark) {
    while (mark && !--mark->references) {
        Mark *joined = mark->joined;
        free(mark);
        mark = joined;
    }
}

bool mark_done(const Mark *mark) {
    for (; mark; mark = mark->joined)
        if (!mark->done) return false;
    return true;
}

CUresult mark_wait(const Mark *mark) {
    while (!mark_done(mark)) wait_for_change();
    return device_error();
}

void mark_observe(const Mark *mark) {
    for (; mark; mark = mark->joined)
        if (mark->stream) stream_observe(mark->stream, mark->sequence);
}

/* ---- What the host has learnt of a stream ---------------------------------------------------------------------
 *
 * A stream is drained if the host knows that its work is done, not if it merely happens to be: the test of whether
 * one was drained must not depend on how fast the worker is. Knowing that an event is done tells of all work before
 * it, and of whatever that work had waited for in other streams. */

void stream_observe(Stream *stream, unsigned long long sequence) {
    Seen *todo = NULL;
    for (;;) {
        if (stream->observed < sequence) stream->observed = sequence;
        for (Seen **at = &stream->seen; *at;) {
            Seen *seen = *at;
            if (seen->after > stream->observed) {
                at = &seen->next;
                continue;
            }
            *at = seen->next;
            seen->next = todo;
            todo = seen;
        }
        if (!todo) return;
        Seen *seen = todo;
        todo = seen->next;
        stream = seen->mark->stream;
        sequence = seen->mark->sequence;
        mark_drop(seen->mark);
        free(seen);
        if (!stream) return;
    }
}

bool stream_drained(const Stream *stream) { return stream->observed >= stream->submitted; }

/* On a poisoned device nothing can be drained any more, and nothing runs. */
bool use_pending(const Use *use) {
    return use->stream && use->stream->observed < use->sequence && !device_poisoned();
}
