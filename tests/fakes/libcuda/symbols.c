/* Which function answers to which name, for a driver of which version.
 *
 * A real driver's cuGetProcAddress knows only what its version has: so does this one. Nothing else is exported but
 * what any driver since 12.4 has and a program may look up by dlsym. Versions are those of CUDA's own headers. */
#include "fake.h"

#include <string.h>

typedef struct Symbol {
    const char *name;
    int since;
    void *function;
} Symbol;

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status);

#define SYMBOL(name, since, function) {name, since, (void *)(uintptr_t)(function)},
static const Symbol SYMBOLS[] = {
#include "symbols.inc"
};

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    (void)flags;
    const Symbol *best = NULL;
    bool newer = false;
    for (size_t at = 0; at < sizeof SYMBOLS / sizeof *SYMBOLS; at++) {
        const Symbol *symbol = &SYMBOLS[at];
        if (strcmp(symbol->name, name) || symbol->since > driver_version) continue;
        newer = newer || symbol->since > version;
        if (symbol->since <= version && (!best || symbol->since > best->since)) best = symbol;
    }
    *function = best ? best->function : NULL;
    if (status)
        *status = best    ? CU_GET_PROC_ADDRESS_SUCCESS
                  : newer ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                          : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return best ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- Names of errors: taken from cuda.h when this is built ------------------------------------------------------ */

static const struct {
    CUresult code;
    const char *name;
} ERRORS[] = {
#include "errors.inc"
};

static const char *error_name(CUresult code) {
    for (size_t at = 0; at < sizeof ERRORS / sizeof *ERRORS; at++)
        if (ERRORS[at].code == code) return ERRORS[at].name;
    return NULL;
}

CUresult cuGetErrorName(CUresult code, const char **name) {
    *name = error_name(code);
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **text) { return cuGetErrorName(code, text); }

/* NVRTC asks a driver that is there for tables of its own, without looking whether it knows how. It has none here. */
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

/* Calls that a fault can be injected into. */
EXPORT bool fake_knows(const char *name) {
    for (size_t at = 0; at < sizeof SYMBOLS / sizeof *SYMBOLS; at++)
        if (!strcmp(SYMBOLS[at].name, name)) return true;
    return false;
}
