// What the fused CPU formats share: the arguments of a call, the dtypes, and where a head lies.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#ifdef __SSE2__
#include <immintrin.h>
#endif

using i64 = std::int64_t;
using i32 = std::int32_t;
using i16 = std::int16_t;
using u32 = std::uint32_t;
using u16 = std::uint16_t;
using u8 = std::uint8_t;
using i8 = std::int8_t;

// The arguments of one call, field by field as in cpu.py. Strides count elements.
struct Job {
    void *state;
    i64 stride_layer, stride_row, stride_head, stride_v, stride_k;
    void *stored[6];  // the compressed tensors, in the order in which the format names them
    double *report;
    const i64 *state_rows, *stored_rows;
    i64 num_slots, num_layers, num_heads, d_v, d_k, num_stored_rows, num_threads;
    float largest_scale;
};

namespace {

constexpr float MIN_AMAX = 1e-8f;
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, half to even, and leaves it in the low bits
constexpr i64 RUN = 256;  // rows that are summed in float32 before the sums move on to float64

inline u32 bits(float x) { u32 b; std::memcpy(&b, &x, 4); return b; }
inline float from_bits(u32 b) { float x; std::memcpy(&x, &b, 4); return x; }

// A dtype: how to read and write its words, and which magnitudes (a word without its sign bit) are finite.
struct Float32 {
    using Word = u32;
    using Scale = Float32;
    static constexpr Word MAGNITUDE = 0x7fffffff, NON_FINITE = 0x7f800000;
    static float load(Word w) { return from_bits(w); }
    static Word store(float x) { return bits(x); }
};

struct BFloat16 {
    using Word = u16;
    using Scale = BFloat16;
    static constexpr Word MAGNITUDE = 0x7fff, NON_FINITE = 0x7f80;
    static float load(Word w) { return from_bits(u32(w) << 16); }
    static Word store(float x) { const u32 b = bits(x); return Word((b + 0x7fff + (b >> 16 & 1)) >> 16); }
};

struct Float16 {
    using Word = u16;
    using Scale = Float32;
    static constexpr Word MAGNITUDE = 0x7fff, NON_FINITE = 0x7c00;
    static float load(Word w) { return from_bits(u32(w & 0x8000) << 16 | bits(from_bits(u32(w & 0x7fff) << 13) * 0x1p112f)); }
    static Word store(float x) {
        const u32 sign = bits(x) >> 16 & 0x8000, b = bits(x) & 0x7fffffff;
        const u32 normal = (b + 0xfff + (b >> 13 & 1) - (112u << 23)) >> 13;
        const u32 subnormal = bits(from_bits(b) + 0.5f) - bits(0.5f);
        return Word(sign | (b < 113u << 23 ? subnormal : normal));
    }
};

// Half of the elements of a and b in turn, from element FIRST on.
template <int FIRST, class Vector, int... I> inline Vector interleave(Vector a, Vector b, std::integer_sequence<int, I...>) {
    constexpr int COUNT = sizeof...(I);
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (FIRST + I / 2 + I % 2 * COUNT)...);
#else
    return __builtin_shuffle(a, b, decltype(a < b){(FIRST + I / 2 + I % 2 * COUNT)...});
#endif
}

// Of COUNT vectors with COUNT elements: interleaving the first half of the rows with the second, log2(COUNT) times, is a transposition.
template <int COUNT, class Vector> [[gnu::always_inline]] inline void transpose(Vector *row) {
    constexpr std::make_integer_sequence<int, COUNT> places{};
    constexpr int TIMES = COUNT == 16 ? 4 : COUNT == 8 ? 3 : 2;
    Vector mixed[COUNT];
    for (int time = 0; time < TIMES; ++time) {
        for (int i = 0; i < COUNT / 2; ++i) {
            mixed[2 * i] = interleave<0>(row[i], row[i + COUNT / 2], places);
            mixed[2 * i + 1] = interleave<COUNT / 2>(row[i], row[i + COUNT / 2], places);
        }
        for (int i = 0; i < COUNT; ++i) row[i] = mixed[i];
    }
}

constexpr i64 LINE = 64;  // bytes of a line of the cache

// Whether rows so far apart can be streamed: written line by line past the cache, which then need not read them first. A restored state
// is larger than the cache as a rule.
template <class Word> inline bool streamable(const Word *state, i64 stride) {
    return reinterpret_cast<std::uintptr_t>(state) % LINE == 0 && stride * i64(sizeof(Word)) % LINE == 0;
}
inline void stream_line(const void *from, void *to) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i *>(to), _mm512_loadu_si512(from));
#elif defined(__AVX__)
    for (int i = 0; i < 2; ++i)
        _mm256_stream_si256(static_cast<__m256i *>(to) + i, _mm256_loadu_si256(static_cast<const __m256i *>(from) + i));
#elif defined(__SSE2__)
    for (int i = 0; i < 4; ++i) _mm_stream_si128(static_cast<__m128i *>(to) + i, _mm_loadu_si128(static_cast<const __m128i *>(from) + i));
#else
    std::memcpy(to, from, LINE);
#endif
}
// Lets other cores see what was streamed before what is written later.
inline void end_streams() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

// One head: where it lies, its number among the stored heads, and what is to be fetched while it is worked on.
template <class D> struct Head {
    using Word = typename D::Word;
    Word *state;
    const Word *next;
    i64 stride_v, stride_k, d_v, d_k, stored;

    Head(const Job &job, i64 task) : stride_v(job.stride_v), stride_k(job.stride_k), d_v(job.d_v), d_k(job.d_k) {
        const i64 head = task % job.num_heads, rest = task / job.num_heads;
        const i64 layer = rest % job.num_layers, slot = rest / job.num_layers;
        next = state = static_cast<Word *>(job.state) + layer * job.stride_layer + job.state_rows[slot] * job.stride_row +
                       head * job.stride_head;
        stored = (layer * job.num_stored_rows + job.stored_rows[slot]) * job.num_heads + head;
    }
};

// What a head adds to the report. The sums are those of elements times unit, a power of two that brings the head near 1: squares
// must stay within float32.
struct Report {
    float unit = 1;
    double signal = 0, error = 0, non_finite = 0;

    void add(const float *signals, const float *errors, int count) {
        for (int i = 0; i < count; ++i) signal += signals[i], error += errors[i];
    }
    void write(double *out) const {
        const double square = double(unit) * double(unit);
        out[0] = signal / square, out[1] = error / square, out[2] = non_finite;
    }
};

inline float unit_of(float largest) { return from_bits((254 - std::min(bits(largest) >> 23, 253u)) << 23); }

// Calls body(head, scratch, report) for every head of every slot, on all threads, each of which has a scratch of its own.
template <class D, class Scratch, class Body> void each_head(const Job &job, Body body) {
    const i64 num_tasks = job.num_slots * job.num_layers * job.num_heads;
#pragma omp parallel num_threads(int(job.num_threads))
    {
        Scratch scratch(job.d_v, job.d_k);
#pragma omp for schedule(dynamic, 4)
        for (i64 task = 0; task < num_tasks; ++task) {
            Head<D> head(job, task);
            if (task + 1 < num_tasks) head.next = Head<D>(job, task + 1).state;
            body(head, scratch, job.report + task * 3);
        }
        end_streams();
    }
}

}  // namespace
