/* Starting afresh, and counting what is left. */
#include "fake.h"

#include <string.h>

EXPORT void fake_set_driver(int version) {
    pthread_mutex_lock(&lock);
    driver_version = version;
    pthread_mutex_unlock(&lock);
}

EXPORT bool fake_option(const char *name, long value) {
    pthread_mutex_lock(&lock);
    bool known = true;
    if (!strcmp(name, "initialised")) options.initialised = value;
    else if (!strcmp(name, "refuses_aligned")) options.refuses_aligned = value;
    else if (!strcmp(name, "short_rest")) options.short_rest = (unsigned)value;
    else if (!strcmp(name, "short_context")) options.short_context = (unsigned)value;
    else if (!strcmp(name, "events_per_primary")) options.events_per_primary = value;
    else if (!strcmp(name, "mps")) options.mps = value;
    else if (!strcmp(name, "mps_sms")) options.mps_sms = (unsigned)value;
    else if (!strcmp(name, "context_bytes")) options.context_bytes = (size_t)value;
    else if (!strcmp(name, "graph_bytes")) options.graph_bytes = (size_t)value;
    else known = false;
    pthread_mutex_unlock(&lock);
    return known;
}

/* Forgets every handle, fault and record; ends all streams, whatever they still have to do. Only two things live
 * on, as they would in the process of a real driver: cuInit has been called, and references to the primary context
 * that others hold. */
EXPORT bool fake_reset(const char *key) {
    pthread_mutex_lock(&lock);
    calls_forget();
    streams_forget();
    memset(&options, 0, sizeof options);
    options.initialised = process_initialised;
    const bool known = gpu_choose(key);
    devices_forget();
    contexts_forget();
    resources_forget();
    captures_forget();
    graphs_forget();
    modules_forget();
    memory_forget();
    objects_forget();
    pthread_mutex_unlock(&lock);
    return known;
}

EXPORT const char *fake_kind(unsigned kind) { return kind < KINDS ? kind_name(kind) : NULL; }

EXPORT unsigned fake_live(unsigned kind) {
    if (kind == PRIMARY) return fake_primary_retained();
    pthread_mutex_lock(&lock);
    const unsigned count = objects_live(kind);
    pthread_mutex_unlock(&lock);
    return count;
}
