// A small GPU played on a CPU, so that g++ compiles the kernels and tests run their logic where there is no GPU.
//
// What it plays: SMs with room for so many threads and so much shared memory; streams, each allowed on some SMs and in
// order; blocks that wait for room, then stay until they end; threads as fibers that take turns at every timer read,
// nap, peek, atomic, shuffle and load past L1; a clock that advances by one tick whenever each resident thread has had
// a turn; launches that take turns with the whole device, if asked.
// Everything happens in one OS thread, in the same order every time: a test can neither hang by chance nor flicker.
//
// What it does not: memory ordering between SMs, true simultaneity, caches, speed. Those need a GPU.
//
// Include it, through device.h, in one translation unit only: it defines the functions that tests call.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

namespace shim {

using Time = unsigned long long;

struct Dim {
    unsigned int x = 1;
};

struct Device {
    int sms = 1;
    size_t shared_per_sm = 0;   // bytes of dynamic shared memory
    unsigned threads_per_sm = 2048;
    Time tick = 100;            // ns a round; 0: the timer stands still
    Time slice = 0;             // ns a turn, where launches take turns with the whole device; 0: all at once
};

// A barrier for threads some of which may have ended.
struct Barrier {
    unsigned arrived = 0, passed = 0;
};

struct Block;

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Block* block;
    unsigned index;
    bool ended = false;
};

struct Launch {
    std::function<void()> kernel;
    unsigned grid, threads;
    size_t shared;
    int stream;
    std::vector<int> sms;
    unsigned begun = 0, ended = 0;

    bool over() const { return ended == grid; }
};

struct Block {
    Launch* launch;
    unsigned index;
    int sm;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<unsigned long long> exchange;  // a word a thread, for shuffles
    std::vector<Barrier> warps;

    unsigned living_in(unsigned warp) const {
        unsigned count = 0;
        for (const auto& thread : threads) count += !thread->ended && thread->index / 32 == warp;
        return count;
    }
    bool over() const {
        for (const auto& thread : threads) {
            if (!thread->ended) return false;
        }
        return true;
    }
};

inline Device device;
inline Time now = 0;
inline std::vector<std::unique_ptr<Launch>> launches;
inline std::vector<std::unique_ptr<Block>> resident;
inline Thread* current = nullptr;
inline ucontext_t scheduler;
inline size_t active = 0;  // the launch whose turn it is, where they take turns

[[noreturn]] inline void die(const char* why) {
    std::fprintf(stderr, "host_shim: %s\n", why);
    std::abort();
}

// Let the other threads have their turn.
inline void yield() { swapcontext(&current->context, &scheduler); }

inline Thread& self() {
    if (current == nullptr) die("device code called outside a kernel");
    return *current;
}

inline void wait_at(Barrier& barrier, const std::function<unsigned()>& living) {
    const unsigned passed = barrier.passed;
    ++barrier.arrived;
    while (barrier.passed == passed) {
        if (barrier.arrived >= living()) {
            barrier.arrived = 0;
            ++barrier.passed;
        } else {
            yield();
        }
    }
}

inline void warp_barrier() {
    Thread& thread = self();
    const unsigned warp = thread.index / 32;
    wait_at(thread.block->warps[warp], [&] { return thread.block->living_in(warp); });
}

inline void fiber() {
    current->block->launch->kernel();
    current->ended = true;
    yield();
    die("an ended thread was resumed");
}

inline void make_fiber(Thread& thread) {
    constexpr size_t bytes = 32 * 1024;
    thread.stack.reset(new char[bytes]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = bytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, fiber, 0);
}

inline bool fits(const Launch& launch, int sm) {
    unsigned threads = launch.threads;
    size_t shared = launch.shared;
    for (const auto& block : resident) {
        if (block->sm != sm || (device.slice > 0 && block->launch != &launch)) continue;
        threads += block->launch->threads;
        shared += block->launch->shared;
    }
    return threads <= device.threads_per_sm && shared <= device.shared_per_sm;
}

inline void start_block(Launch& launch, int sm) {
    auto block = std::make_unique<Block>();
    block->launch = &launch;
    block->index = launch.begun++;
    block->sm = sm;
    block->exchange.resize(launch.threads);
    block->warps.resize((launch.threads + 31) / 32);
    for (unsigned i = 0; i < launch.threads; ++i) {
        block->threads.push_back(std::make_unique<Thread>());
        block->threads.back()->block = block.get();
        block->threads.back()->index = i;
        make_fiber(*block->threads.back());
    }
    resident.push_back(std::move(block));
}

// Put waiting blocks where there is room, each on the emptiest SM that its stream may use.
inline void place() {
    for (size_t i = 0; i < launches.size(); ++i) {
        Launch& launch = *launches[i];
        bool first = true;  // of its stream
        for (size_t before = 0; before < i; ++before) {
            first = first && (launches[before]->stream != launch.stream || launches[before]->over());
        }
        while (first && launch.begun < launch.grid) {
            int best = -1, least = 0;
            for (const int sm : launch.sms) {
                int load = 0;
                for (const auto& block : resident) load += block->sm == sm;
                if (fits(launch, sm) && (best < 0 || load < least)) best = sm, least = load;
            }
            if (best < 0) break;
            start_block(launch, best);
        }
    }
}

// With time slicing: the next launch that has blocks gets the device when the turn of the last one is over.
inline void take_turns() {
    const auto runs = [](size_t turn) {
        const Launch* launch = launches[turn % launches.size()].get();
        for (const auto& block : resident) {
            if (block->launch == launch) return true;
        }
        return false;
    };
    if (now % device.slice >= device.tick && runs(active)) return;
    for (size_t ahead = 1; ahead <= launches.size(); ++ahead) {
        if (runs(active + ahead)) {
            active = (active + ahead) % launches.size();
            return;
        }
    }
}

inline void run_round() {
    for (size_t b = 0; b < resident.size(); ++b) {
        if (device.slice > 0 && resident[b]->launch != launches[active].get()) continue;
        for (const auto& thread : resident[b]->threads) {
            if (thread->ended) continue;
            current = thread.get();
            swapcontext(&scheduler, &thread->context);
            current = nullptr;
        }
    }
    now += device.tick;
    for (size_t b = resident.size(); b-- > 0;) {
        if (!resident[b]->over()) continue;
        ++resident[b]->launch->ended;
        resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(b));
    }
}

template <class... Parameters, size_t... I>
std::function<void()> with_arguments(void (*kernel)(Parameters...), void** args, std::index_sequence<I...>) {
    return [=, values = std::make_tuple(*static_cast<std::remove_reference_t<Parameters>*>(args[I])...)] {
        std::apply(kernel, values);
    };
}

template <class... Parameters>
void queue(void (*kernel)(Parameters...), void** args, unsigned grid, unsigned threads, size_t shared, int stream,
           const int* sms, int sm_count) {
    auto launch = std::make_unique<Launch>();
    launch->kernel = with_arguments(kernel, args, std::index_sequence_for<Parameters...>());
    launch->grid = grid;
    launch->threads = threads;
    launch->shared = shared;
    launch->stream = stream;
    launch->sms.assign(sms, sms + sm_count);
    for (const int sm : launch->sms) {
        if (sm < 0 || sm >= device.sms) die("a stream on an SM that the device lacks");
    }
    launches.push_back(std::move(launch));
}

}  // namespace shim

// ---- what kernels see ----------------------------------------------------------------------------------------------

#define threadIdx (shim::Dim{shim::self().index})
#define blockIdx (shim::Dim{shim::self().block->index})
#define blockDim (shim::Dim{shim::self().block->launch->threads})
#define gridDim (shim::Dim{shim::self().block->launch->grid})

inline int sm_id() { return shim::self().block->sm; }

inline unsigned long long now_ns() {
    shim::yield();
    return shim::now;
}

inline long long clock64() { return static_cast<long long>(now_ns()); }

inline void __nanosleep(unsigned int) { shim::yield(); }

template <class T>
T peek(const T* at) {
    shim::yield();
    return *at;
}

template <class T>
T atomicAdd(T* at, T more) {
    shim::yield();
    const T before = *at;
    *at = before + more;
    return before;
}

template <class T>
T atomicCAS(T* at, T expected, T desired) {
    shim::yield();
    const T before = *at;
    if (before == expected) *at = desired;
    return before;
}

inline unsigned int __shfl_xor_sync(unsigned int mask, unsigned int value, int apart) {
    if (mask != 0xffffffffu) shim::die("__shfl_xor_sync: whole warps only");
    shim::Thread& thread = shim::self();
    thread.block->exchange[thread.index] = value;
    shim::warp_barrier();
    const unsigned other = thread.index ^ static_cast<unsigned>(apart);
    const auto found = static_cast<unsigned int>(thread.block->exchange[other]);
    shim::warp_barrier();
    return found;
}

[[noreturn]] inline void __trap() { shim::die("__trap"); }

inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint4 __ldcg(const uint4* at) {
    shim::yield();  // loads past L1 take their time
    return *at;
}

inline void __stcg(uint4* at, uint4 value) { *at = value; }

// ---- what tests call -----------------------------------------------------------------------------------------------

// Forgets every launch and sets up a device.
extern "C" inline __attribute__((used)) void shim_device(int sms, size_t shared_per_sm, unsigned threads_per_sm,
                                                         unsigned long long tick, unsigned long long slice) {
    shim::launches.clear();
    shim::resident.clear();
    shim::now = 0;
    shim::active = 0;
    shim::device = {sms, shared_per_sm, threads_per_sm, tick, slice};
}

// Runs everything queued to its end. Returns the ns it took on the device's clock; -1 if a block fits nowhere.
extern "C" inline __attribute__((used)) long long shim_run() {
    const unsigned long long began = shim::now;
    for (;;) {
        shim::place();
        if (shim::resident.empty()) break;
        if (shim::device.slice > 0) shim::take_turns();
        shim::run_round();
    }
    bool over = true;
    for (const auto& launch : shim::launches) over = over && launch->over();
    shim::launches.clear();
    return over ? static_cast<long long>(shim::now - began) : -1;
}

// Defines queue_NAME(args, grid, block, shared, stream, sms, sm_count), where args are as for cuLaunchKernel.
#define SHIM_KERNEL(name)                                                                                    \
    extern "C" void queue_##name(void** args, unsigned grid, unsigned block, size_t shared, int stream,      \
                                 const int* sms, int sm_count) {                                             \
        shim::queue(&name, args, grid, block, shared, stream, sms, sm_count);                                \
    }
