/* GPU performance monitoring. Counters are integrals over the test's clock, so that two samples give a true mean. */
#include "fake.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const double refresh_s = 0.1;

struct nvmlGpmSample_st {
    enum { FREE, EMPTY, TAKEN } state;
    const Gpu *gpu;
    double at, busy[GPM_METRICS];
};

static struct nvmlGpmSample_st samples[MAX_SAMPLES]; /* a place is never used twice: a stale handle stays stale */
static int allocated;

void fake_forget_samples(void)
{
    memset(samples, 0, sizeof samples);
    allocated = 0;
}

int fake_live_samples(void)
{
    int live = 0;
    for (int i = 0; i < allocated; i++) live += samples[i].state != FREE;
    return live;
}

static int usable(const char *function, nvmlGpmSample_t sample)
{
    if (sample >= samples && sample < samples + allocated && sample->state != FREE) return 1;
    fake_refuse(function, NVML_ERROR_INVALID_ARGUMENT, "sample %p is not allocated", (void *)sample);
    return 0;
}

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    ENTER;
    GPU(device);
    REQUIRE(support);
    if (support->version != NVML_GPM_SUPPORT_VERSION)
        REFUSE(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "version %u", support->version);
    support->isSupportedDevice = (unsigned int)gpu->is.gpm;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
    ENTER;
    REQUIRE(sample);
    if (allocated == MAX_SAMPLES) return NVML_ERROR_MEMORY;
    *sample = &samples[allocated++];
    (*sample)->state = EMPTY;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
    ENTER;
    if (!usable(__func__, sample)) return NVML_ERROR_INVALID_ARGUMENT;
    sample->state = FREE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
    ENTER;
    GPU(device);
    if (!usable(__func__, sample)) return NVML_ERROR_INVALID_ARGUMENT;
    if (!gpu->is.gpm) return NVML_ERROR_NOT_SUPPORTED;
    sample->state = TAKEN;
    sample->gpu = gpu;
    sample->at = fake_now;
    memcpy(sample->busy, gpu->busy, sizeof sample->busy);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    ENTER;
    REQUIRE(get);
    if (get->version != NVML_GPM_METRICS_GET_VERSION)
        REFUSE(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "version %u", get->version);
    if (get->numMetrics == 0 || get->numMetrics > NVML_GPM_METRIC_MAX)
        REFUSE(NVML_ERROR_INVALID_ARGUMENT, "%u metrics", get->numMetrics);
    nvmlGpmSample_t from = get->sample1, to = get->sample2;
    if (!usable(__func__, from) || !usable(__func__, to)) return NVML_ERROR_INVALID_ARGUMENT;
    if (from->state != TAKEN || to->state != TAKEN || from->gpu != to->gpu)
        REFUSE(NVML_ERROR_INVALID_ARGUMENT, "samples that were not both taken from one GPU");
    if (to->at - from->at <= refresh_s)
        fake_refuse(__func__, NVML_SUCCESS, "samples %.0f ms apart", (to->at - from->at) * 1e3);
    for (unsigned int i = 0; i < get->numMetrics; i++) {
        nvmlGpmMetric_t *metric = &get->metrics[i];
        char fault[32];
        snprintf(fault, sizeof fault, "metric %u", metric->metricId);
        metric->nvmlReturn = metric->metricId < GPM_METRICS ? fake_injected(fault) : NVML_ERROR_INVALID_ARGUMENT;
        if (metric->nvmlReturn != NVML_SUCCESS) continue;
        double busy = to->busy[metric->metricId] - from->busy[metric->metricId];
        metric->value = to->at - from->at > refresh_s ? busy / (to->at - from->at) : NAN;
    }
    return NVML_SUCCESS;
}
