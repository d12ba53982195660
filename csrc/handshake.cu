// A proof that two lanes share no SM, which does not trust %smid.
//
// Blocks of both lanes meet through one 64-bit word in global memory. Every block asks for so much dynamic shared
// memory that two cannot be on one SM (MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: more than half of an SM's on every GPU so
// far). A block that arrives adds itself to its lane's count and stays until the meeting is decided:
//
//     MET     the word equals what is wanted: both counts are complete, and nobody has given up
//     MISSED  a block ran out of time and set the MISSED bit, by a swap that fails if any count changed meanwhile
//
// A block that comes after MISSED takes itself off the count again. So the word's changes have one order, in which the
// verdict comes once, and the counts left behind are those of the blocks that waited together.
//
// What MET proves: at the moment of the last arrival every counted block had arrived and none had left. All were
// resident at once, one to an SM, so at least (prefill + decode) SMs were in use.
//
// What it does not prove: that the lanes are confined. Two streams that may use the whole device meet too. Therefore
// three meetings, on idle lanes that are said to have P and D SMs:
//   1. P blocks on the prefill lane, D on the decode lane, wanted (P, D):   MET
//   2. P + 1 blocks on the prefill lane alone, wanted (P + 1, 0):           MISSED, with exactly P counted
//   3. D + 1 blocks on the decode lane alone, wanted (0, D + 1):            MISSED, with exactly D counted
// By 2 and 3 the lanes hold at most P and D SMs; if they had one in common, both together would hold less than P + D,
// and 1 could not have been met. This is sound where a lane's set of SMs is fixed (green contexts, static MPS
// partitions). Under an MPS percentage a lane is any N SMs: 1 to 3 then show the sizes, and that full lanes are apart.
//
// Time slicing could fake 1: a block switched out with its context still counts as arrived. So each block reports the
// longest time between two looks at the clock until it saw the verdict, and after MET it stays for `hold_ns`. If the
// lanes take turns, the lane that arrived first is off its SMs while the other one arrives and holds: for a whole turn
// or for `hold_ns`, whichever is shorter. So gaps of at most a tenth of `hold_ns` exclude turns longer than that; and
// shorter ones cannot be with hold_ns = 1 ms: a turn is about 2 ms by default, and saving full SMs alone takes long.
#include "device.h"

namespace {

using Word = unsigned long long;  // bits 0-15: prefill blocks counted; 16-31: decode blocks counted; 32: MISSED

constexpr Word kMissed = 1ull << 32;

__device__ bool decided(Word word, Word wanted) { return word == wanted || (word & kMissed) != 0; }

// Count one block in, unless the meeting is over.
__device__ bool arrive(Word* word, Word one) {
    if ((atomicAdd(word, one) & kMissed) == 0) return true;
    atomicAdd(word, 0 - one);
    return false;
}

// Try to declare the meeting missed. Fails where the word changes at that moment, which it does at most twice a block.
__device__ void give_up(Word* word, Word wanted) {
    const Word seen = peek(word);
    if (!decided(seen, wanted)) atomicCAS(word, seen, seen | kMissed);
}

}  // namespace

// Launch: grid = the lane's wanted count (at most 65535), block = any (one thread works), dynamic shared memory = as
// much as a block may have.
//   word         uint64[1], zero before the first of the two launches. After both: equal to
//                (wanted_prefill | wanted_decode << 16) if MET, else with bit 32 set and the counts below it
//   side         0: prefill lane; 1: decode lane
//   wanted_*     blocks to wait for, of each lane
//   timeout_ns   how long a block waits for the others
//   hold_ns      how long it stays after the meeting
//   sm           int32[grid]: the SM of each counted block; -1 where a block came too late
//   gap_ns       uint64[grid]: each counted block's longest time between two looks at the clock; 0 where it came late
extern "C" __global__ void meet(Word* word, int side, int wanted_prefill, int wanted_decode,
                                unsigned long long timeout_ns, unsigned long long hold_ns, int* sm,
                                unsigned long long* gap_ns) {
    if (threadIdx.x != 0) return;
    const Word one = side == 0 ? 1ull : 1ull << 16;
    const Word wanted = static_cast<Word>(wanted_prefill) | static_cast<Word>(wanted_decode) << 16;
    sm[blockIdx.x] = -1;
    gap_ns[blockIdx.x] = 0;

    Patience meeting(timeout_ns);
    if (!arrive(word, one)) return;
    sm[blockIdx.x] = sm_id();
    while (!decided(peek(word), wanted)) {
        if (!meeting.more()) give_up(word, wanted);
    }
    unsigned long long gap = meeting.longest_gap();
    if (peek(word) == wanted) {
        Patience hold(hold_ns);
        // Switched out between a poll and the look at the word, a block finds the meeting met: that is a gap too.
        if (hold.started() - meeting.last() > gap) gap = hold.started() - meeting.last();
        while (hold.more()) {
        }
    }
    gap_ns[blockIdx.x] = gap;
}
