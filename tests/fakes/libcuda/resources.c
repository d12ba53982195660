/* SM sets, and the resources that green contexts are made of.
 *
 * A CUdevResource carries the number of a record of ours in its padding, so that a resource which was altered, made
 * up, split before or taken from a split is known as such. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

/* ---- SM sets -------------------------------------------------------------------------------------------------- */

unsigned sms_count(const SmSet *set) {
    unsigned count = 0;
    for (unsigned at = 0; at < MAX_SMS / 64; at++) count += (unsigned)__builtin_popcountll(set->bits[at]);
    return count;
}

SmSet sms_first(unsigned count) {
    SmSet set = {{0}};
    for (unsigned sm = 0; sm < count; sm++) set.bits[sm / 64] |= 1ull << (sm % 64);
    return set;
}

SmSet sms_take(SmSet *from, unsigned count) {
    SmSet taken = {{0}};
    for (unsigned sm = 0; sm < MAX_SMS && count; sm++) {
        const uint64_t bit = 1ull << (sm % 64);
        if (!(from->bits[sm / 64] & bit)) continue;
        from->bits[sm / 64] &= ~bit;
        taken.bits[sm / 64] |= bit;
        count--;
    }
    return taken;
}

void sms_drop(SmSet *set, unsigned count) {
    for (unsigned sm = MAX_SMS; sm-- > 0 && count;) {
        const uint64_t bit = 1ull << (sm % 64);
        count -= (set->bits[sm / 64] & bit) != 0;
        set->bits[sm / 64] &= ~bit;
    }
}

/* ---- Resources ------------------------------------------------------------------------------------------------ */

typedef struct Record {
    SmSet sms;
    unsigned alignment;
    unsigned split; /* which split it came out of; 0: a query */
    bool was_split;
} Record;

typedef struct Tag { /* in CUdevResource._internal_padding */
    uint64_t magic;
    uint64_t record;
} Tag;

static const uint64_t MAGIC = 0x534d2d7265736f75;
static Record *records;
static size_t known, room, forgotten;
static unsigned splits;

unsigned sm_alignment(void) { return gpu->major >= 9 ? 8 : 2; }

unsigned sm_minimum(void) { return gpu->major >= 9 ? 8 : gpu->major == 8 ? 4 : 2; }

static bool has_workqueues(void) { return driver_version >= 13010; }

static void write_tag(CUdevResource *resource, const Record *record) {
    if (known == room) {
        room = room ? 2 * room : 256;
        records = realloc(records, room * sizeof *records);
    }
    const Tag tag = {MAGIC, known};
    records[known++] = *record;
    memcpy(resource->_internal_padding, &tag, sizeof tag);
}

static void fill_sms(CUdevResource *resource, const Record *record) {
    memset(resource, 0, sizeof *resource);
    const unsigned count = sms_count(&record->sms);
    if (!count) return; /* CU_DEV_RESOURCE_TYPE_INVALID: nothing left */
    resource->type = CU_DEV_RESOURCE_TYPE_SM;
    resource->sm.smCount = count;
    if (driver_version >= 13000) { /* older drivers do not know these fields */
        resource->sm.minSmPartitionSize = sm_minimum();
        resource->sm.smCoscheduledAlignment = record->alignment;
    }
    write_tag(resource, record);
}

CUresult resource_fill(CUdevResource *resource, CUdevResourceType type, const SmSet *sms, unsigned alignment,
                       const Workqueue *workqueue) {
    if (!resource) return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_DEV_RESOURCE_TYPE_SM) {
        const Record record = {.sms = *sms, .alignment = alignment};
        fill_sms(resource, &record);
        return CUDA_SUCCESS;
    }
    const bool known_type = type == CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG || type == CU_DEV_RESOURCE_TYPE_WORKQUEUE;
    if (!known_type || !has_workqueues()) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    memset(resource, 0, sizeof *resource);
    resource->type = type;
    if (type == CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG) {
        resource->wqConfig.device = 0;
        resource->wqConfig.wqConcurrencyLimit = workqueue && workqueue->given ? workqueue->limit : 8;
        resource->wqConfig.sharingScope =
            workqueue && workqueue->given ? workqueue->scope : CU_WORKQUEUE_SCOPE_DEVICE_CTX;
    }
    return CUDA_SUCCESS;
}

/* The record of an SM resource as it was given out; NULL for one made up or changed by hand. */
static Record *record_of(Call *call, const CUdevResource *resource) {
    Tag tag;
    memcpy(&tag, resource->_internal_padding, sizeof tag);
    if (tag.magic != MAGIC || tag.record < forgotten || tag.record >= known) {
        misuse(call, "the resource came from no query and no split");
        return NULL;
    }
    Record *record = &records[tag.record];
    if (resource->sm.smCount == sms_count(&record->sms)) return record;
    misuse(call, "the resource says %u SMs, it was given out with %u", resource->sm.smCount, sms_count(&record->sms));
    return NULL;
}

static Record *record_to_split(Call *call, const CUdevResource *resource, CUresult *error) {
    *error = CUDA_ERROR_INVALID_RESOURCE_TYPE;
    if (resource->type != CU_DEV_RESOURCE_TYPE_SM) return NULL;
    *error = CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    Record *record = record_of(call, resource);
    if (!record) return NULL;
    if (record->split) {
        misuse(call, "the resource is the product of a split: make a green context of it and query that");
        return NULL;
    }
    if (record->was_split) {
        misuse(call, "the resource was split before: the parts would overlap; query it anew");
        return NULL;
    }
    *error = CUDA_SUCCESS;
    return record;
}

void resources_forget(void) { forgotten = known; }

/* ---- Splits --------------------------------------------------------------------------------------------------- */

static unsigned round_up(unsigned count, unsigned step) { return (count + step - 1) / step * step; }

/* Where the topology refuses aligned counts, only even multiples of the alignment fit its clusters. */
static bool topology_refuses(unsigned count, unsigned alignment) {
    return options.refuses_aligned && alignment == sm_alignment() && count % (2 * alignment);
}

static void give_rest(CUdevResource *resource, SmSet rest, unsigned alignment, unsigned split) {
    sms_drop(&rest, options.short_rest);
    const Record record = {.sms = rest, .alignment = alignment, .split = split};
    fill_sms(resource, &record);
}

static CUresult by_count_rules(unsigned flags, unsigned *minimum, unsigned *alignment) {
    const unsigned fine = CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING;
    const unsigned large = CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE;
    REQUIRE(!(flags & ~(fine | large)) && flags != (fine | large), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(!(flags & large) || gpu->major >= 9, CUDA_ERROR_INVALID_VALUE);
    *minimum = flags & fine ? 2 : flags & large ? 16 : sm_minimum();
    *alignment = flags & fine ? 2 : flags & large ? 16 : sm_alignment();
    return CUDA_SUCCESS;
}

CUresult cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *groups, const CUdevResource *input,
                                     CUdevResource *rest, unsigned int flags, unsigned int least) {
    CALL(cuDevSmResourceSplitByCount, 0, groups ? *groups : 0, input ? input->sm.smCount : 0, N(flags), N(least));
    REQUIRE(groups && input, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    Record *record = record_to_split(&call, input, &error);
    if (!record) return error;
    unsigned minimum, alignment;
    error = by_count_rules(flags, &minimum, &alignment);
    if (error) return error;
    REQUIRE(least <= input->sm.smCount, CUDA_ERROR_INVALID_VALUE);
    const unsigned each = round_up(least > minimum ? least : minimum, alignment);
    if (topology_refuses(each, alignment)) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    const unsigned possible = input->sm.smCount / each;
    if (!result) {
        *groups = possible;
        return CUDA_SUCCESS;
    }
    REQUIRE(*groups, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(possible, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    if (*groups > possible) *groups = possible;
    record->was_split = true;
    SmSet left = record->sms;
    splits++;
    for (unsigned at = 0; at < *groups; at++) {
        const Record part = {.sms = sms_take(&left, each), .alignment = alignment, .split = splits};
        fill_sms(&result[at], &part);
    }
    if (rest) give_rest(rest, left, alignment, splits);
    return CUDA_SUCCESS;
}

/* The count of one group of a structured split; `left` SMs are there. */
static CUresult group_count(const CU_DEV_SM_RESOURCE_GROUP_PARAMS *wanted, unsigned left, unsigned *count) {
    const unsigned largest = gpu->major >= 9 ? 32 : 2;
    const bool backfill = wanted->flags & CU_DEV_SM_RESOURCE_GROUP_BACKFILL;
    const unsigned together = wanted->coscheduledSmCount ? wanted->coscheduledSmCount : sm_alignment();
    REQUIRE(!(wanted->flags & ~(unsigned)CU_DEV_SM_RESOURCE_GROUP_BACKFILL), CUDA_ERROR_INVALID_VALUE);
    for (unsigned at = 0; at < sizeof wanted->reserved / sizeof *wanted->reserved; at++)
        REQUIRE(!wanted->reserved[at], CUDA_ERROR_INVALID_VALUE);
    REQUIRE(together % 2 == 0 && together <= largest, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    const unsigned step = options.refuses_aligned && together == sm_alignment() ? 2 * together : together;
    *count = wanted->smCount;
    if (!*count) {
        *count = backfill ? left / 2 * 2 : left / step * step;
        return CUDA_SUCCESS;
    }
    REQUIRE(*count % 2 == 0 && *count <= left, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    REQUIRE(backfill || *count % step == 0, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    return CUDA_SUCCESS;
}

CUresult cuDevSmResourceSplit(CUdevResource *result, unsigned int groups, const CUdevResource *input,
                              CUdevResource *rest, unsigned int flags, CU_DEV_SM_RESOURCE_GROUP_PARAMS *params) {
    CALL(cuDevSmResourceSplit, 0, N(groups), input ? input->sm.smCount : 0, N(flags), groups ? params[0].smCount : 0,
         groups > 1 ? params[1].smCount : 0, result != NULL);
    REQUIRE(groups && input && params && !flags, CUDA_ERROR_INVALID_VALUE);
    CUresult error;
    Record *record = record_to_split(&call, input, &error);
    if (!record) return error;
    unsigned counts[groups];
    unsigned left = input->sm.smCount;
    for (unsigned at = 0; at < groups; at++) {
        error = group_count(&params[at], left, &counts[at]);
        if (error) return error;
        const unsigned together = params[at].coscheduledSmCount ? params[at].coscheduledSmCount : sm_alignment();
        if (result && counts[at] < together) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
        left -= counts[at];
    }
    SmSet sms = record->sms;
    if (result) {
        record->was_split = true;
        splits++;
    }
    for (unsigned at = 0; at < groups; at++) {
        params[at].smCount = counts[at];
        const unsigned together = params[at].coscheduledSmCount ? params[at].coscheduledSmCount : sm_alignment();
        const Record part = {.sms = sms_take(&sms, counts[at]), .alignment = together, .split = splits};
        if (!result) continue;
        fill_sms(&result[at], &part);
        result[at].sm.flags = params[at].flags;
    }
    if (rest) give_rest(rest, sms, sm_alignment(), splits);
    return CUDA_SUCCESS;
}

/* ---- Descriptors ---------------------------------------------------------------------------------------------- */

static CUresult add_sms(Call *call, Descriptor *into, const CUdevResource *resource, unsigned *split) {
    const Record *record = record_of(call, resource);
    REQUIRE(record, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    if (sms_count(&into->sms)) {
        const bool together = record->split && record->split == *split && record->alignment == into->alignment;
        if (!together) misuse(call, "SM resources of one descriptor must come out of one split");
        REQUIRE(together, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
    }
    for (unsigned at = 0; at < MAX_SMS / 64; at++) into->sms.bits[at] |= record->sms.bits[at];
    into->alignment = record->alignment;
    *split = record->split;
    return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *handle, CUdevResource *resources, unsigned int count) {
    CALL(cuDevResourceGenerateDesc, 0, count && resources ? resources[0].sm.smCount : 0, N(count));
    REQUIRE(handle && resources && count, CUDA_ERROR_INVALID_VALUE);
    Descriptor made = {.alignment = sm_alignment()};
    unsigned split = 0;
    for (unsigned at = 0; at < count; at++) {
        const CUdevResource *resource = &resources[at];
        CUresult error = CUDA_ERROR_INVALID_RESOURCE_TYPE;
        if (resource->type == CU_DEV_RESOURCE_TYPE_SM) {
            error = add_sms(&call, &made, resource, &split);
        } else if (has_workqueues() && resource->type == CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG) {
            REQUIRE(!made.workqueue.given, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
            made.workqueue = (Workqueue){true, resource->wqConfig.wqConcurrencyLimit, resource->wqConfig.sharingScope};
            error = made.workqueue.limit ? CUDA_SUCCESS : CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
        } else if (has_workqueues() && resource->type == CU_DEV_RESOURCE_TYPE_WORKQUEUE) {
            error = CUDA_SUCCESS;
        }
        if (error) return error;
    }
    if (!sms_count(&made.sms)) made.sms = sms_first(gpu->sms);
    Descriptor *descriptor = object_new(DESCRIPTOR, sizeof *descriptor);
    descriptor->sms = made.sms;
    descriptor->alignment = made.alignment;
    descriptor->workqueue = made.workqueue;
    descriptor->object.hidden = true; /* valid for the lifetime of the process: nothing destroys one */
    *handle = (CUdevResourceDesc)descriptor->object.handle;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type) {
    CALL(cuDeviceGetDevResource, 0, N(device), N(type));
    REQUIRE(device == 0, CUDA_ERROR_INVALID_DEVICE);
    const SmSet all = sms_first(gpu->sms);
    return resource_fill(resource, type, &all, sm_alignment(), NULL);
}

CUresult cuCtxGetDevResource(CUcontext handle, CUdevResource *resource, CUdevResourceType type) {
    CALL(cuCtxGetDevResource, 0, N(handle), N(type));
    CUresult error;
    const Context *context = context_of(&call, handle, &error);
    if (!context) return error;
    return resource_fill(resource, type, &context->sms, context->green ? context->green->alignment : sm_alignment(),
                         context->green ? &context->green->workqueue : NULL);
}

CUresult cuStreamGetDevResource(CUstream handle, CUdevResource *resource, CUdevResourceType type) {
    CALL(cuStreamGetDevResource, 0, N(handle), N(type));
    CUresult error;
    const Stream *stream = stream_of(&call, handle, &error);
    if (!stream) return error;
    REQUIRE(type == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE);
    const Green *green = stream->context->green;
    return resource_fill(resource, type, &stream->context->sms, green ? green->alignment : sm_alignment(), NULL);
}
