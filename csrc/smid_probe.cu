// Which SMs does a stream really use? Each block writes the SM it ran on, and when.
//
// Launch more blocks than the device has SMs (four times as many, say), each holding its SM for `hold_ns`: then the
// hardware spreads them over every SM the stream may use. With dynamic shared memory of more than half an SM's
// (MAX_SHARED_MEMORY_PER_BLOCK_OPTIN is) no two blocks share an SM at one time.
#include "device.h"

// Launch: grid = any, block = any (one thread works).
//   sm       int32[grid]: the SM of each block
//   span     uint64[grid, 2]: when each block began and ended, in ns on the GPU's own clock
//   hold_ns  how long each block stays
extern "C" __global__ void probe(int* sm, unsigned long long* span, unsigned long long hold_ns) {
    if (threadIdx.x != 0) return;
    Patience hold(hold_ns);
    while (hold.more()) {
    }
    sm[blockIdx.x] = sm_id();
    span[2 * blockIdx.x] = hold.started();
    span[2 * blockIdx.x + 1] = hold.last();
}
