// What the kernels need of a GPU beyond plain CUDA C++: which SM, what time, a nap. Needs no toolkit header, so that
// NVRTC alone compiles them. Without a CUDA compiler host_shim.h plays the GPU, and the same sources run on a CPU.
#pragma once

#ifdef __CUDACC__

// The SM this block runs on. The PTX manual calls %smid virtual: proofs must not rest on it alone (see handshake.cu).
__device__ __forceinline__ int sm_id() {
    int id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

// Nanoseconds on a clock that all SMs share. It advances in steps of 32 ns to about 1 us, by GPU.
__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// What lies at an address now, whoever wrote it.
template <class T>
__device__ __forceinline__ T peek(const T* at) {
    return *static_cast<const volatile T*>(at);
}

#else
#include "host_shim.h"
#endif

// One thread's bounded wait. A poll naps and reads the timer, which takes longer than kShortestPoll; so the count of
// polls ends the wait only where the timer stands still, and nothing ever hangs.
class Patience {
  public:
    static constexpr unsigned long long kShortestPoll = 8;  // ns

    __device__ explicit Patience(unsigned long long ns)
        : started_(now_ns()), last_(started_), longest_(0), ns_(ns), polls_(ns / kShortestPoll + 1) {}

    // Nap, then say whether there is time left.
    __device__ bool more() {
        __nanosleep(200);
        const unsigned long long now = now_ns();
        if (now - last_ > longest_) longest_ = now - last_;
        last_ = now;
        if (polls_ > 0) --polls_;
        return now - started_ < ns_ && polls_ > 0;
    }

    __device__ unsigned long long started() const { return started_; }
    __device__ unsigned long long last() const { return last_; }
    // The longest time between two polls so far: how long this thread may have been off its SM.
    __device__ unsigned long long longest_gap() const { return longest_; }

  private:
    unsigned long long started_, last_, longest_, ns_, polls_;
};
