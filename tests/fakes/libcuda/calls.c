/* What happens around every driver call: the log, injected faults, asynchronous errors, misuse records. */
#include "fake.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;

typedef struct Logged {
    const char *name;
    unsigned count;
    long long args[MAX_ARGS];
} Logged;

typedef struct Fault {
    struct Fault *next;
    char name[64];
    unsigned nth; /* calls until it strikes */
    long times;   /* strikes left; negative: for ever */
    CUresult code;
} Fault;

static Logged *logged;
static size_t logged_count, logged_room;
static char **records;
static size_t records_count;
static Fault *faults;
static char held[64];
static bool holding;
static unsigned held_now;
static CUresult pending, poison;
static unsigned pending_after;

void wait_for_change(void) { pthread_cond_wait(&change, &lock); }

void changed(void) { pthread_cond_broadcast(&change); }

bool device_poisoned(void) { return poison != CUDA_SUCCESS; }

CUresult device_error(void) { return poison; }

void misuse(const Call *call, const char *format, ...) {
    char text[512];
    int used = snprintf(text, sizeof text, "%s: ", call->name);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, args);
    va_end(args);
    records = realloc(records, (records_count + 1) * sizeof *records);
    records[records_count++] = strdup(text);
}

static void write_down(const char *name, unsigned count, const long long *args) {
    if (logged_count == logged_room) {
        logged_room = logged_room ? 2 * logged_room : 1024;
        logged = realloc(logged, logged_room * sizeof *logged);
    }
    Logged *entry = &logged[logged_count++];
    entry->name = name;
    entry->count = count < MAX_ARGS ? count : MAX_ARGS;
    memcpy(entry->args, args, entry->count * sizeof *args);
}

static CUresult injected(const char *name) {
    for (Fault *fault = faults; fault; fault = fault->next) {
        if (!fault->times || strcmp(fault->name, name)) continue;
        if (fault->nth > 1) {
            fault->nth--;
            continue;
        }
        if (fault->times > 0) fault->times--;
        return fault->code;
    }
    return CUDA_SUCCESS;
}

/* Errors after which the context, and with it everything here, is of no more use. */
static bool sticky(CUresult code) {
    switch (code) {
    case CUDA_ERROR_ECC_UNCORRECTABLE: case CUDA_ERROR_NVLINK_UNCORRECTABLE: case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT: case CUDA_ERROR_ASSERT: case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION: case CUDA_ERROR_MISALIGNED_ADDRESS: case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC: case CUDA_ERROR_LAUNCH_FAILED: case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_CONTAINED: case CUDA_ERROR_TENSOR_MEMORY_LEAK:
        return true;
    default:
        return false;
    }
}

static CUresult asynchronous(void) {
    if (poison) return poison;
    if (!pending || --pending_after) return CUDA_SUCCESS;
    const CUresult code = pending;
    pending = CUDA_SUCCESS;
    if (sticky(code)) {
        poison = code;
        changed();
    }
    return code;
}

static void take_green(Call *call, CUgreenCtx handle) {
    Green *green = object_seek(GREEN, handle);
    if (!green) return;
    if (green->users++) misuse(call, "green context %u is in use by another thread", green->object.number);
    call->green = green;
}

static void stay_held(const char *name) {
    if (!holding || strcmp(held, name)) return;
    held_now++;
    changed();
    while (holding && !strcmp(held, name)) wait_for_change();
    held_now--;
}

Call call_enter(const Function *function, CUgreenCtx green, unsigned count, const long long *args) {
    pthread_mutex_lock(&lock);
    Call call = {.name = function->name};
    write_down(function->name, count, args);
    if (green) take_green(&call, green);
    stay_held(function->name);
    CUresult refused = injected(function->name);
    if (!refused && !options.initialised && !(function->flags & BEFORE_INIT)) {
        misuse(&call, "called before cuInit");
        refused = CUDA_ERROR_NOT_INITIALIZED;
    }
    if (!refused && (function->flags & ASYNC)) {
        const CUresult error = asynchronous();
        if (function->flags & RELEASE)
            call.poison = error;
        else
            refused = error;
    }
    if (!refused && (function->flags & IN_CONTEXT) && !context_current()) {
        misuse(&call, "no context is current to this thread");
        refused = CUDA_ERROR_INVALID_CONTEXT;
    }
    if (!refused && (function->flags & UNSAFE) && capture_forbids(&call)) refused = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    call.refused = refused;
    return call;
}

void call_leave(Call *call) {
    if (call->green) call->green->users--;
    pthread_mutex_unlock(&lock);
}

CUresult call_result(const Call *call, CUresult result) { return call->poison ? call->poison : result; }

void calls_forget(void) {
    logged_count = 0;
    while (records_count) free(records[--records_count]);
    while (faults) {
        Fault *fault = faults;
        faults = fault->next;
        free(fault);
    }
    holding = false;
    pending = poison = CUDA_SUCCESS;
    changed();
}

/* ---- Control ------------------------------------------------------------------------------------------------- */

EXPORT void fake_fail(const char *name, unsigned nth, long times, int code) {
    pthread_mutex_lock(&lock);
    Fault *fault = calloc(1, sizeof *fault);
    snprintf(fault->name, sizeof fault->name, "%s", name);
    fault->nth = nth;
    fault->times = times;
    fault->code = (CUresult)code;
    Fault **end = &faults;
    while (*end) end = &(*end)->next;
    *end = fault;
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_fail_async(int code, unsigned after) {
    pthread_mutex_lock(&lock);
    pending = (CUresult)code;
    pending_after = after;
    pthread_mutex_unlock(&lock);
}

/* Calls of this name stay inside the driver until let go (NULL). */
EXPORT void fake_hold(const char *name) {
    pthread_mutex_lock(&lock);
    holding = name != NULL;
    snprintf(held, sizeof held, "%s", name ? name : "");
    changed();
    pthread_mutex_unlock(&lock);
}

/* Returns once a call is being held. */
EXPORT void fake_wait_held(void) {
    pthread_mutex_lock(&lock);
    while (!held_now) wait_for_change();
    pthread_mutex_unlock(&lock);
}

EXPORT size_t fake_call_count(void) {
    pthread_mutex_lock(&lock);
    const size_t count = logged_count;
    pthread_mutex_unlock(&lock);
    return count;
}

EXPORT unsigned fake_call(size_t at, const char **name, long long *args) {
    pthread_mutex_lock(&lock);
    const Logged *entry = &logged[at];
    *name = entry->name;
    memcpy(args, entry->args, sizeof entry->args);
    const unsigned count = entry->count;
    pthread_mutex_unlock(&lock);
    return count;
}

EXPORT void fake_forget_calls(void) {
    pthread_mutex_lock(&lock);
    logged_count = 0;
    pthread_mutex_unlock(&lock);
}

EXPORT size_t fake_misuse_count(void) {
    pthread_mutex_lock(&lock);
    const size_t count = records_count;
    pthread_mutex_unlock(&lock);
    return count;
}

EXPORT const char *fake_misuse(size_t at) {
    pthread_mutex_lock(&lock);
    const char *record = records[at];
    pthread_mutex_unlock(&lock);
    return record;
}

EXPORT void fake_forget_misuse(void) {
    pthread_mutex_lock(&lock);
    while (records_count) free(records[--records_count]);
    pthread_mutex_unlock(&lock);
}
