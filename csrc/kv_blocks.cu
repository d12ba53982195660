// Moves scattered KV blocks of all layers to or from one contiguous staging buffer, in one launch, and converts their
// element type on the way if asked.
//
// Pages: one layer is [2, blocks, block_tokens, kv_heads, head_dim] (keys, then values), contiguous.
// Staging: one record a block, `stride` bytes apart, so that a record can be stored or sent on its own:
//
//     values  [layers, 2, block_tokens, kv_heads, head_dim]  in the staged type
//     scales  [layers, 2, block_tokens, kv_heads] float32    at the next multiple of 16; quantised types only
//
// Types: 0 float32, 1 float16, 2 bfloat16, 3 float8_e4m3fn, 4 int8, 5 float64. Equal types are copied as bytes and have
// no scales. Otherwise pages hold 0 to 2, staging 0 to 4, and 3 and 4 are quantised: each token and head has the scale
// largest magnitude / largest code (448 or 127); element = code * scale. A token and head with an infinity or a NaN
// gets the scale NaN and reads back as NaN: it is never hidden. Conversions round to nearest, ties to even.
//
// They are plain integer and float arithmetic: no toolkit header, no difference between GPUs, and the same result where
// the code runs on a CPU. Their speed has not been measured yet.
#include "device.h"

namespace {

constexpr int kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat8 = 3, kInt8 = 4, kFloat64 = 5;

// ---- element types -------------------------------------------------------------------------------------------------

struct Float32 {
    using Bits = unsigned int;
    static __device__ float decode(Bits code) { return __uint_as_float(code); }
    static __device__ Bits encode(float value) { return __float_as_uint(value); }
};

// A float of 1 sign, E exponent and M mantissa bits. The method is Fabian Giesen's: let a float addition or
// multiplication do the rounding and the subnormals (https://gist.github.com/rygorous/2156668).
template <int E, int M, class BitsOf>
struct SmallFloat {
    using Bits = BitsOf;
    static constexpr int kBias = (1 << (E - 1)) - 1;
    static constexpr int kShift = 23 - M;
    static constexpr unsigned int kSign = 1u << (E + M);

    // Code of a magnitude that is not NaN; may run past the largest finite code.
    static __device__ unsigned int round(unsigned int magnitude) {
        if (magnitude < static_cast<unsigned int>(127 - kBias + 1) << 23) {
            // Subnormal here: added to a number whose last bit is this type's smallest step.
            constexpr unsigned int step = static_cast<unsigned int>(127 - kBias + 23 - M + 1) << 23;
            return __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(step)) - step;
        }
        const unsigned int odd = magnitude >> kShift & 1u;
        const unsigned int rebased = magnitude - (static_cast<unsigned int>(127 - kBias) << 23);
        return (rebased + (1u << (kShift - 1)) - 1u + odd) >> kShift;
    }

    // Value of a code without its sign bit, infinities and NaNs left aside.
    static __device__ float magnitude(unsigned int code) {
        return __uint_as_float(code << kShift) * __uint_as_float(static_cast<unsigned int>(254 - kBias) << 23);
    }
};

template <int E, int M>
struct Ieee : SmallFloat<E, M, unsigned short> {
    using Base = SmallFloat<E, M, unsigned short>;
    using Bits = unsigned short;
    static constexpr unsigned int kInfinity = ((1u << E) - 1u) << M;

    static __device__ float decode(Bits code) {
        const unsigned int sign = static_cast<unsigned int>(code & Base::kSign) << (31 - E - M);
        const unsigned int rest = code & (Base::kSign - 1u);
        const unsigned int value = rest >= kInfinity ? 0x7f800000u | (rest << Base::kShift)
                                                           : __float_as_uint(Base::magnitude(rest));
        return __uint_as_float(value | sign);
    }

    static __device__ Bits encode(float value) {
        const unsigned int bits = __float_as_uint(value);
        const unsigned int sign = bits >> (31 - E - M) & Base::kSign;
        const unsigned int magnitude = bits & 0x7fffffffu;
        unsigned int code;
        if (magnitude > 0x7f800000u) {
            code = kInfinity | 1u << (M - 1);
        } else {
            code = magnitude == 0x7f800000u ? kInfinity : Base::round(magnitude);
            if (code > kInfinity) code = kInfinity;
        }
        return static_cast<Bits>(sign | code);
    }
};

using Float16 = Ieee<5, 10>;
using BFloat16 = Ieee<8, 7>;

// float8_e4m3fn: no infinity, one NaN, largest 448. What is beyond is held at the largest.
struct Float8 : SmallFloat<4, 3, unsigned char> {
    static constexpr unsigned int kNan = 0x7fu, kLargestCode = 0x7eu;

    static __device__ float decode(Bits code) {
        const unsigned int rest = code & kNan;
        const unsigned int value = rest == kNan ? 0x7fc00000u : __float_as_uint(magnitude(rest));
        return __uint_as_float(value | static_cast<unsigned int>(code & kSign) << 24);
    }

    static __device__ Bits encode(float value) {
        const unsigned int bits = __float_as_uint(value);
        const unsigned int rest = bits & 0x7fffffffu;
        unsigned int code = rest > 0x7f800000u ? kNan : rest >= 0x43e00000u ? kLargestCode : round(rest);
        return static_cast<Bits>(code | (bits >> 24 & kSign));
    }
};

struct Int8 {
    using Bits = signed char;
    static __device__ float decode(Bits code) { return static_cast<float>(code); }
    static __device__ Bits encode(float value) {
        return static_cast<Bits>(rintf(fminf(fmaxf(value, -127.0f), 127.0f)));
    }
};

// ---- memory -----------------------------------------------------------------------------------------------------

// A thread handles N elements at a time: 8 where rows allow vector accesses (16 bytes of a 16-bit type), or 1.
constexpr int kVector = 8;

// As words, because the compiler splits vectors of shorter types.
template <int BYTES>
struct alignas(BYTES < 16 ? BYTES : 16) Words {
    unsigned int at[BYTES / 4];
};

template <class Type, int N>
__device__ void load_as(const void* base, long long element, float (&values)[N]) {
    const auto* from = static_cast<const typename Type::Bits*>(base) + element;
    typename Type::Bits codes[N];
    if constexpr (N == 1) {
        codes[0] = *from;
    } else {
        const auto words = *reinterpret_cast<const Words<sizeof codes>*>(from);
        memcpy(codes, &words, sizeof codes);
    }
    for (int i = 0; i < N; ++i) values[i] = Type::decode(codes[i]);
}

template <class Type, int N>
__device__ void store_as(void* base, long long element, const float (&values)[N]) {
    auto* to = static_cast<typename Type::Bits*>(base) + element;
    typename Type::Bits codes[N];
    for (int i = 0; i < N; ++i) codes[i] = Type::encode(values[i]);
    if constexpr (N == 1) {
        *to = codes[0];
    } else {
        Words<sizeof codes> words;
        memcpy(&words, codes, sizeof codes);
        *reinterpret_cast<Words<sizeof codes>*>(to) = words;
    }
}

// Types are chosen at run time: every thread takes the same way, and one kernel serves all pairs of types.

template <int N>
__device__ void load_page(int type, const void* base, long long element, float (&values)[N]) {
    switch (type) {
        case kFloat32: return load_as<Float32>(base, element, values);
        case kFloat16: return load_as<Float16>(base, element, values);
        default: return load_as<BFloat16>(base, element, values);
    }
}

template <int N>
__device__ void store_page(int type, void* base, long long element, const float (&values)[N]) {
    switch (type) {
        case kFloat32: return store_as<Float32>(base, element, values);
        case kFloat16: return store_as<Float16>(base, element, values);
        default: return store_as<BFloat16>(base, element, values);
    }
}

template <int N>
__device__ void load_staged(int type, const void* base, long long element, float (&values)[N]) {
    switch (type) {
        case kFloat8: return load_as<Float8>(base, element, values);
        case kInt8: return load_as<Int8>(base, element, values);
        default: return load_page(type, base, element, values);
    }
}

template <int N>
__device__ void store_staged(int type, void* base, long long element, const float (&values)[N]) {
    switch (type) {
        case kFloat8: return store_as<Float8>(base, element, values);
        case kInt8: return store_as<Int8>(base, element, values);
        default: return store_page(type, base, element, values);
    }
}

__device__ int bytes_of(int type) {
    return type == kFloat64 ? 8 : type == kFloat32 ? 4 : type >= kFloat8 ? 1 : 2;
}

__device__ unsigned long long address(const void* at) { return reinterpret_cast<unsigned long long>(at); }

// ---- one run: the keys or the values of one block in one layer -----------------------------------------------------

struct Shape {
    int layers, blocks, block_tokens, kv_heads, head_dim;

    __device__ int rows() const { return block_tokens * kv_heads; }  // of a run
    __device__ long long elements() const { return static_cast<long long>(rows()) * head_dim; }
};

struct Run {
    unsigned char* page;    // the layer's first page
    long long start;        // element at which the run begins there
    unsigned char* record;  // the block's
    int index;              // of the run, in the record
};

// Rows are shared out to teams of threads within a warp: as many as a row has chunks, rounded up to a power of two.
__device__ int team_size(int head_dim, int chunk) {
    int size = 1;
    while (size < 32 && size * chunk < head_dim) size *= 2;
    return size;
}

// Scale of a row, by its whole team. Magnitudes compare as integers, which puts infinities and NaNs last.
template <int N>
__device__ float scale_of(int page_type, int staged_type, const void* page, long long row, int dim, int member,
                          int team) {
    unsigned int most = 0;
    float values[N];
    for (int at = member * N; at < dim; at += team * N) {
        load_page(page_type, page, row + at, values);
        for (int i = 0; i < N; ++i) {
            const unsigned int bits = __float_as_uint(values[i]) & 0x7fffffffu;
            if (bits > most) most = bits;
        }
    }
    for (int apart = team / 2; apart > 0; apart /= 2) {
        const unsigned int other = __shfl_xor_sync(0xffffffffu, most, apart);
        if (other > most) most = other;
    }
    if (most >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    return __uint_as_float(most) / (staged_type == kFloat8 ? 448.0f : 127.0f);
}

// Page to record.
template <int N>
__device__ void pack(const Run& run, const Shape& shape, float* scales, int page_type, int staged_type) {
    const bool quantised = staged_type >= kFloat8;
    const int team = team_size(shape.head_dim, N), member = threadIdx.x % team, teams = blockDim.x / team;
    // Every thread of a warp takes every turn, with or without a row: the shuffles need them all.
    for (int turn = 0; turn < shape.rows(); turn += teams) {
        const int row = turn + threadIdx.x / team;
        const int dim = row < shape.rows() ? shape.head_dim : 0;
        const long long first = static_cast<long long>(row) * shape.head_dim;
        float scale = 1.0f;
        if (quantised) {
            scale = scale_of<N>(page_type, staged_type, run.page, run.start + first, dim, member, team);
            if (dim > 0 && member == 0) scales[row] = scale;
        }
        for (int at = member * N; at < dim; at += team * N) {
            float values[N];
            load_page(page_type, run.page, run.start + first + at, values);
            if (quantised) {
                // The scale is 0 for zeros alone, and NaN where an element is not finite.
                for (int i = 0; i < N; ++i) values[i] = scale > 0.0f ? values[i] / scale : 0.0f;
            }
            store_staged(staged_type, run.record, run.index * shape.elements() + first + at, values);
        }
    }
}

// Record to page.
template <int N>
__device__ void unpack(const Run& run, const Shape& shape, const float* scales, int page_type, int staged_type) {
    const bool quantised = staged_type >= kFloat8;
    const int team = team_size(shape.head_dim, N), member = threadIdx.x % team, teams = blockDim.x / team;
    for (int row = threadIdx.x / team; row < shape.rows(); row += teams) {
        const long long first = static_cast<long long>(row) * shape.head_dim;
        const float scale = quantised ? scales[row] : 1.0f;
        for (int at = member * N; at < shape.head_dim; at += team * N) {
            float values[N];
            load_staged(staged_type, run.record, run.index * shape.elements() + first + at, values);
            for (int i = 0; i < N; ++i) values[i] *= scale;
            store_page(page_type, run.page, run.start + first + at, values);
        }
    }
}

// All threads of the block copy `bytes` bytes.
__device__ void copy(unsigned char* to, const unsigned char* from, long long bytes) {
    const bool aligned = (address(to) | address(from)) % sizeof(uint4) == 0;
    const long long vectors = aligned ? bytes / static_cast<long long>(sizeof(uint4)) : 0;
    for (long long i = threadIdx.x; i < vectors; i += blockDim.x) {
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    for (long long i = vectors * static_cast<long long>(sizeof(uint4)) + threadIdx.x; i < bytes; i += blockDim.x) {
        to[i] = from[i];
    }
}

// ---- all runs ------------------------------------------------------------------------------------------------------

enum class Way { kGather, kScatter };

template <Way way>
__device__ void move(unsigned char* staging, long long stride, unsigned char* const* pages, const int* ids, int count,
                     const Shape& shape, int page_type, int staged_type) {
    const bool exists = page_type == staged_type ? page_type >= kFloat32 && page_type <= kFloat64
                                                 : page_type >= kFloat32 && page_type <= kBFloat16 &&
                                                       staged_type >= kFloat32 && staged_type <= kInt8;
    if (!exists) __trap();  // the caller's fault, and never silent
    const int runs = shape.layers * 2;  // of a block
    const int page_bytes = bytes_of(page_type), staged_bytes = bytes_of(staged_type);
    const long long scales_at = (shape.elements() * runs * staged_bytes + 15) / 16 * 16;
    const long long total = static_cast<long long>(count) * runs;
    for (long long i = blockIdx.x; i < total; i += gridDim.x) {
        const int block = static_cast<int>(i / runs), id = ids[block];
        if (id < 0 || id >= shape.blocks) continue;
        Run run;
        run.index = static_cast<int>(i % runs);
        run.page = pages[run.index / 2];
        run.start = (static_cast<long long>(run.index % 2) * shape.blocks + id) * shape.elements();
        run.record = staging + block * stride;
        if (page_type == staged_type) {
            unsigned char* page = run.page + run.start * page_bytes;
            unsigned char* staged = run.record + run.index * shape.elements() * page_bytes;
            const long long bytes = shape.elements() * page_bytes;
            way == Way::kGather ? copy(staged, page, bytes) : copy(page, staged, bytes);
            continue;
        }
        float* scales = reinterpret_cast<float*>(run.record + scales_at) + run.index * shape.rows();
        const bool vectors = shape.head_dim % kVector == 0 && (address(run.page) | address(run.record)) % 16 == 0;
        if constexpr (way == Way::kGather) {
            vectors ? pack<kVector>(run, shape, scales, page_type, staged_type)
                    : pack<1>(run, shape, scales, page_type, staged_type);
        } else {
            vectors ? unpack<kVector>(run, shape, scales, page_type, staged_type)
                    : unpack<1>(run, shape, scales, page_type, staged_type);
        }
    }
}

}  // namespace

// Launch both: grid = any (count * layers * 2 blocks at most have work), block = a multiple of 32, at most 1024.
//   staging      uint8[count, stride], on the device or in pinned host memory; 16-byte aligned to be fast
//   stride       bytes from record to record: at least a record's size, a multiple of 4; of 16 to be fast
//   pages        uint64[layers]: address of each layer's pages; any subset of the layers, in any order
//   ids          int32[count]: the blocks, in the order of their records; an id outside [0, blocks) is padding: its
//                record or page is left alone. `scatter` must not be given one id twice
//   blocks       blocks in a layer's pages
//   page_type, staged_type   see above
extern "C" __global__ void gather(unsigned char* staging, long long stride, unsigned char* const* pages, const int* ids,
                                  int count, int layers, int blocks, int block_tokens, int kv_heads, int head_dim,
                                  int page_type, int staged_type) {
    move<Way::kGather>(staging, stride, pages, ids, count, {layers, blocks, block_tokens, kv_heads, head_dim},
                       page_type, staged_type);
}

extern "C" __global__ void scatter(unsigned char* staging, long long stride, unsigned char* const* pages,
                                   const int* ids, int count, int layers, int blocks, int block_tokens, int kv_heads,
                                   int head_dim, int page_type, int staged_type) {
    move<Way::kScatter>(staging, stride, pages, ids, count, {layers, blocks, block_tokens, kv_heads, head_dim},
                        page_type, staged_type);
}
