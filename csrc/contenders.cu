// Neighbours for the profiler: they load one resource, as hard as asked, while something else is measured.
//
// Both work in bursts, so that they can be throttled (`duty`) and stopped: they end when `*stop` is not 0, which is
// looked at before every burst and in every nap, or after `bursts` bursts. So they end even if nobody stops them.
#include "device.h"

namespace {

// Runs bursts until told to stop; naps between them so that bursts fill `duty` percent of the time.
template <class Burst>
__device__ void contend(const int* stop, long long bursts, int duty, long long* done, Burst burst) {
    duty = duty < 1 ? 1 : duty;  // 0 would be one endless nap
    long long finished = 0;
    for (; finished < bursts && peek(stop) == 0; ++finished) {
        const long long began = clock64();
        burst();
        const long long busy = clock64() - began;
        while ((clock64() - began) * duty < busy * 100 && peek(stop) == 0) __nanosleep(200);
    }
    if (threadIdx.x == 0) done[blockIdx.x] = finished;
}

}  // namespace

// Arithmetic pressure: fused multiply-adds on registers; touches no memory within a burst.
// Launch: grid = SMs of the lane x blocks an SM, block = 256 or so.
//   stop     int32[1], in memory that the host or another stream writes
//   bursts   at most so many
//   steps    length of a burst: each step is 8 multiply-adds a thread
//   duty     1..100: percent of the time spent in bursts
//   done     int64[grid]: bursts that each block's first thread finished
//   sink     float32[1]: keeps the compiler from dropping the work; not a result
extern "C" __global__ void arithmetic(const int* stop, long long bursts, int steps, int duty, long long* done,
                                      float* sink) {
    float sums[8];
    for (int i = 0; i < 8; ++i) sums[i] = static_cast<float>(threadIdx.x + i);
    contend(stop, bursts, duty, done, [&] {
        for (int step = 0; step < steps; ++step) {
            for (int i = 0; i < 8; ++i) sums[i] = fmaf(sums[i], 0.999f, 0.5f);
        }
    });
    float total = 0.0f;
    for (int i = 0; i < 8; ++i) total += sums[i];
    if (total < 0.0f) *sink = total;
}

// Memory pressure: streams through a buffer, past L1. Its size says which memory is pressed: several times the L2
// cache for DRAM bandwidth, half of it or less for L2 bandwidth.
// Launch: grid = SMs of the lane x blocks an SM, block = 256 or so. All blocks share the buffer.
//   buffer   uint4[vectors], 16-byte aligned: the working set
//   batch    length of a burst: 16-byte vectors a thread
//   stores   0: read only; otherwise every vector read is written back, changed
//   others as for `arithmetic`; `sink` uint32[1]
extern "C" __global__ void memory(const int* stop, long long bursts, uint4* buffer, long long vectors, int batch,
                                  int stores, int duty, long long* done, unsigned int* sink) {
    const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long mine = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long long at = mine % vectors;
    const long long stride = threads % vectors;
    unsigned int folded = 0;
    contend(stop, bursts, duty, done, [&] {
        for (int i = 0; i < batch; ++i) {
            uint4 value = __ldcg(buffer + at);
            folded ^= value.x ^ value.y ^ value.z ^ value.w;
            if (stores) {
                value.x ^= 1u;
                __stcg(buffer + at, value);
            }
            at += stride;
            if (at >= vectors) at -= vectors;
        }
    });
    if (folded == 0x9e3779b9u) *sink = folded;
}
