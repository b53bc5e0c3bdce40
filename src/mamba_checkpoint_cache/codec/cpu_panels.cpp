// int16 and the formats of pivot.py fused for the CPU: every layer and head of every slot in one call. Built by cpu_build.py.
//
// A head is read into panels: 16 of its channels side by side in float32, so that a vector holds one row of a panel, and a panel
// stays in the innermost cache while it is rotated, predicted, quantised and measured. Whatever dtype a state has and however it
// lies in memory, from there on all is the same. Results are bit for bit those of the definitions: sums run in their order, and
// the compiler may neither contract to fused multiply-adds nor assume that there is no NaN.

#include "cpu_common.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
typedef float F __attribute__((vector_size(4 * LANES)));
typedef i32 I __attribute__((vector_size(4 * LANES)));
typedef i16 Shorts __attribute__((vector_size(2 * LANES)));

inline F all(float x) { return F{} + x; }
inline I as_bits(F x) { I b; std::memcpy(&b, &x, sizeof b); return b; }
inline F as_floats(I b) { F x; std::memcpy(&x, &b, sizeof x); return x; }
inline F magnitude(F x) { return as_floats(as_bits(x) & 0x7fffffff); }
// Numbers that are not negative are ordered as their bits are, and integers are compared in less time.
inline F largest_of(F x, F so_far) { const I a = as_bits(magnitude(x)), b = as_bits(so_far); return as_floats(a > b ? a : b); }
inline F larger(F a, F b) { return a > b ? a : b; }
inline F smaller(F a, F b) { return a < b ? a : b; }
inline I between(I x, i32 low, i32 high) { x = x < low ? I{} + low : x; return x > high ? I{} + high : x; }
// Half to even; the magnitude must be under 2^22.
inline F rounded(F x) { return (x + ROUND) - ROUND; }
inline bool any(I x) { i32 found = 0; for (int i = 0; i < LANES; ++i) found |= x[i]; return found; }
inline float sum(F x) { float s = 0; for (int i = 0; i < LANES; ++i) s += x[i]; return s; }

typedef u8 Bytes16 __attribute__((vector_size(LANES)));
typedef u16 Words16 __attribute__((vector_size(2 * LANES)));

// Compilers make several instructions of these where there is one.
#ifdef __AVX512F__
inline I widen(Bytes16 x) { return I(_mm512_cvtepu8_epi32(__m128i(x))); }
inline I widen(Words16 x) { return I(_mm512_cvtepu16_epi32(__m256i(x))); }
#else
inline I widen(Bytes16 x) { return __builtin_convertvector(__builtin_convertvector(x, Words16), I); }
inline I widen(Words16 x) { return __builtin_convertvector(x, I); }
#endif
inline I widen(I x) { return x; }

inline F interleave_first(F a, F b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
    return __builtin_shuffle(a, b, I{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#endif
}

inline F interleave_last(F a, F b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
    return __builtin_shuffle(a, b, I{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
}

// 16 x 16: interleaving the first half of the rows with the second four times is a transposition.
inline void transpose(F *row) {
    F mixed[LANES];
    for (int round = 0; round < 4; ++round) {
        for (int i = 0; i < 8; ++i) {
            mixed[2 * i] = interleave_first(row[i], row[i + 8]);
            mixed[2 * i + 1] = interleave_last(row[i], row[i + 8]);
        }
        std::copy_n(mixed, LANES, row);
    }
}

// The words of a dtype, 16 at a time, to float32 and back.
template <class D> struct Words {
    using Packed = std::conditional_t<sizeof(typename D::Word) == 4, I, Words16>;

    static I read(const typename D::Word *from) {
        Packed words;
        std::memcpy(&words, from, sizeof words);
        return widen(words);
    }
    static void write(F values, typename D::Word *to) {
        const Packed words = __builtin_convertvector(narrow(values), Packed);
        std::memcpy(to, &words, sizeof words);
    }
    static F load(I words) {
        if constexpr (std::is_same_v<D, Float32>) return as_floats(words);
        else if constexpr (std::is_same_v<D, BFloat16>) return as_floats(words << 16);
        else return as_floats((words & 0x8000) << 16 | as_bits(as_floats((words & 0x7fff) << 13) * 0x1p112f));
    }
    static I narrow(F values) {
        const I b = as_bits(values);
        if constexpr (std::is_same_v<D, Float32>) return b;
        else if constexpr (std::is_same_v<D, BFloat16>) return (b + 0x7fff + (b >> 16 & 1)) >> 16 & 0xffff;
        else {
            const I sign = b >> 16 & 0x8000, size = b & 0x7fffffff;
            const I normal = (size + 0xfff + (size >> 13 & 1) - (112 << 23)) >> 13;
            const I subnormal = as_bits(as_floats(size) + 0.5f) - as_bits(all(0.5f));
            return sign | (size < 113 << 23 ? subnormal : normal);
        }
    }
    // What the dtype makes of float32 values.
    static F cast(F values) {
        if constexpr (std::is_same_v<D, Float32>) return values;
        else return load(narrow(values));
    }
};

// Memory for vectors.
class Vectors {
    std::unique_ptr<char[]> memory;
    F *first;

public:
    explicit Vectors(i64 count) : memory(new char[(count + 1) * sizeof(F)]) {
        first = reinterpret_cast<F *>((reinterpret_cast<std::uintptr_t>(memory.get()) / sizeof(F) + 1) * sizeof(F));
    }
    F *vectors() const { return first; }
    float *floats() const { return reinterpret_cast<float *>(first); }
};

// Reads and writes a head 16 channels at a time: part p of a row is a vector. Channels beyond d_k are zeros.
template <class D> struct Access {
    using Word = typename D::Word;
    const Head<D> &h;
    const i64 whole = h.d_k / LANES, next = h.next - h.state;
    I seen = {};  // the largest magnitudes read so far, as words

    F row(i64 v, i64 p) {
        if (p < whole && h.stride_k == 1) return load(h.state + v * h.stride_v + p * LANES);
        F x = {};
        for (i64 k = p * LANES; k < std::min((p + 1) * LANES, h.d_k); ++k) {
            const Word word = h.state[v * h.stride_v + k * h.stride_k];
            seen[k % LANES] = std::max(seen[k % LANES], i32(word & D::MAGNITUDE));
            x[k % LANES] = D::load(word);
        }
        return x;
    }
    void write(i64 v, i64 p, F x) const {
        if (p < whole && h.stride_k == 1) return Words<D>::write(x, h.state + v * h.stride_v + p * LANES);
        for (i64 k = p * LANES; k < std::min((p + 1) * LANES, h.d_k); ++k) h.state[v * h.stride_v + k * h.stride_k] = D::store(x[k % LANES]);
    }
    // 16 rows from v on, which may lie as columns in memory.
    void tile(i64 v, i64 p, F *x) {
        const i64 stride_v = h.stride_v, stride_k = h.stride_k, ahead = next;
        const Word *from = h.state + v * stride_v + p * LANES * stride_k;
        if (p == whole || (stride_k != 1 && stride_v != 1)) {
            for (int i = 0; i < LANES; ++i) x[i] = row(v + i, p);
            return;
        }
        const i64 stride = stride_k == 1 ? stride_v : stride_k;
        I size = seen;
        for (int i = 0; i < LANES; ++i) {
            const I words = Words<D>::read(from + i * stride), magnitudes = words & D::MAGNITUDE;
            size = magnitudes > size ? magnitudes : size;
            x[i] = Words<D>::load(words);
            __builtin_prefetch(from + ahead + i * stride, 0, 2);
        }
        seen = size;
        if (stride_k != 1) transpose(x);
    }
    void write_tile(i64 v, i64 p, F *x) const {
        const i64 stride_v = h.stride_v, stride_k = h.stride_k;
        Word *to = h.state + v * stride_v + p * LANES * stride_k;
        if (p == whole || (stride_k != 1 && stride_v != 1)) {
            for (int i = 0; i < LANES; ++i) write(v + i, p, x[i]);
            return;
        }
        if (stride_k != 1) transpose(x);
        const i64 stride = stride_k == 1 ? stride_v : stride_k;
        for (int i = 0; i < LANES; ++i) Words<D>::write(x[i], to + i * stride);
    }

private:
    F load(const Word *from) {
        const I words = Words<D>::read(from), size = words & D::MAGNITUDE;
        seen = size > seen ? size : seen;
        return Words<D>::load(words);
    }
};

constexpr i64 MAX_BLOCK = 128;
inline i64 block_of(i64 d_v) { return std::min(d_v & -d_v, MAX_BLOCK); }

// The random sign of a row: the top bit of its mixed number.
inline float sign_of(i64 v) {
    u32 mixed = u32(v + 1) * 0x9E3779B1u;
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6Bu;
    return mixed >> 31 ? -1.0f : 1.0f;
}

// Buffers of one thread: a head in float32, and what belongs to its channels and rows. The vectors of a row follow each other; the
// stride from row to row is odd, lest the rows of one part fall on few lines of the cache.
struct Panels {
    i64 count, stride;
    Vectors head, first, second, pivot, signs;
    std::unique_ptr<u8[]> q, packed;

    Panels(i64 d_v, i64 d_k)
        : count((d_k + LANES - 1) / LANES), stride(count | 1), head(stride * d_v), first(count), second(count),
          pivot(d_v / LANES + 1), signs(d_v / LANES + 1), q(new u8[d_v * count * LANES]), packed(new u8[d_v * d_k * 4]) {
        for (i64 v = 0; v < d_v; ++v) signs.floats()[v] = sign_of(v);
    }
    F &at(i64 v, i64 p) const { return head.vectors()[v * stride + p]; }
};

// Butterflies of 2^STAGES rows in registers: between neighbours first, or last.
template <int STAGES> [[gnu::always_inline]] inline void butterflies(F *row, bool near_first) {
#pragma GCC unroll 4
    for (int step = 0; step < STAGES; ++step) {
        const int stage = near_first ? step : STAGES - 1 - step;
#pragma GCC unroll 16
        for (int i = 0; i < 1 << STAGES; ++i)
            if (!(i >> stage & 1)) {
                const F a = row[i], b = row[i | 1 << stage];
                row[i] = a + b, row[i | 1 << stage] = a - b;
            }
    }
}

// The butterflies between rows at least apart, in the middle of a rotation: groups of 2^STAGES rows, all parts of a row together.
template <int STAGES, class Load, class Store>
[[gnu::always_inline]] inline void far_groups(i64 begin, i64 end, i64 block, i64 apart, bool near_first, Load load, Store store) {
    for (i64 inner = 0; inner < apart; ++inner)
        for (i64 p = begin; p < end; ++p) {
            F row[1 << STAGES];
#pragma GCC unroll 8
            for (int i = 0; i < 1 << STAGES; ++i) row[i] = load(block + inner + i * apart, p);
            butterflies<STAGES>(row, near_first);
#pragma GCC unroll 8
            for (int i = 0; i < 1 << STAGES; ++i) store(block + inner + i * apart, p, row[i]);
        }
}

// A whole rotation of rows too few, or too odd in number, for registers; in place.
void rotate_slowly(const Panels &panels, i64 begin, i64 end, i64 d_v, bool near_first) {
    const i64 block = block_of(d_v);
    for (i64 i = 1; i < block; i *= 2) {
        const i64 apart = near_first ? i : block / 2 / i;
        for (i64 v = 0; v < d_v; ++v)
            for (i64 p = begin; p < end && !(v & apart); ++p) {
                const F a = panels.at(v, p), b = panels.at(v + apart, p);
                panels.at(v, p) = a + b, panels.at(v + apart, p) = a - b;
            }
    }
}

// H X of parts begin to end, rows near each other first. load_tile(v, p, rows) and load(v, p) give X; store(v, p, row) takes H X.
template <class LoadTile, class Load, class Store>
[[gnu::always_inline]] inline void rotate(const Panels &panels, i64 begin, i64 end, i64 d_v, LoadTile load_tile, Load load, Store store) {
    const i64 block = block_of(d_v);
    F *head = panels.head.vectors();
    const i64 stride = panels.stride;
    const auto middle = [=](i64 v, i64 p) { return head[v * stride + p]; };
    if (block < 64) {
        for (i64 v = 0; v < d_v; ++v)
            for (i64 p = begin; p < end; ++p) panels.at(v, p) = load(v, p);
        rotate_slowly(panels, begin, end, d_v, true);
        for (i64 v = 0; v < d_v; ++v)
            for (i64 p = begin; p < end; ++p) store(v, p, panels.at(v, p));
        return;
    }
    for (i64 v = 0; v < d_v; v += LANES)
        for (i64 p = begin; p < end; ++p) {
            F row[LANES];
            load_tile(v, p, row);
            butterflies<4>(row, true);
            for (int i = 0; i < LANES; ++i) head[(v + i) * stride + p] = row[i];
        }
    for (i64 v = 0; v < d_v; v += block)
        if (block == 128) far_groups<3>(begin, end, v, LANES, true, middle, store);
        else far_groups<2>(begin, end, v, LANES, true, middle, store);
}

// H X of parts begin to end, rows far from each other first. load(v, p) gives X; store_tile(v, p, rows) and store(v, p, row) take H X.
template <class Load, class StoreTile, class Store>
[[gnu::always_inline]] inline void rotate_back(const Panels &panels, i64 begin, i64 end, i64 d_v, Load load, StoreTile store_tile, Store store) {
    const i64 block = block_of(d_v);
    F *head = panels.head.vectors();
    const i64 stride = panels.stride;
    const auto middle = [=](i64 v, i64 p, F x) { head[v * stride + p] = x; };
    if (block < 64) {
        for (i64 v = 0; v < d_v; ++v)
            for (i64 p = begin; p < end; ++p) panels.at(v, p) = load(v, p);
        rotate_slowly(panels, begin, end, d_v, false);
        for (i64 v = 0; v < d_v; ++v)
            for (i64 p = begin; p < end; ++p) store(v, p, panels.at(v, p));
        return;
    }
    for (i64 v = 0; v < d_v; v += block)
        if (block == 128) far_groups<3>(begin, end, v, LANES, false, load, middle);
        else far_groups<2>(begin, end, v, LANES, false, load, middle);
    for (i64 v = 0; v < d_v; v += LANES)
        for (i64 p = begin; p < end; ++p) {
            F row[LANES];
            for (int i = 0; i < LANES; ++i) row[i] = head[(v + i) * stride + p];
            butterflies<4>(row, false);
            store_tile(v, p, row);
        }
}

// Positive numbers in few bits; see Minifloat in pivot.py.
template <int EXPONENT_BITS, int MANTISSA_BITS, int TOP, bool ZERO> struct Minifloat {
    static constexpr int SHIFT = 23 - MANTISSA_BITS, LARGEST = (1 << (EXPONENT_BITS + MANTISSA_BITS)) - 1;
    static constexpr int BASE = ((127 + TOP + 1) << MANTISSA_BITS) - 1 - LARGEST, BITS = EXPONENT_BITS + MANTISSA_BITS;

    static I code_up(F x) { return between(((as_bits(x) + ((1 << SHIFT) - 1)) >> SHIFT) - BASE, 0, LARGEST); }
    static I code_nearest(F x) { return between(((as_bits(x) + (1 << (SHIFT - 1))) >> SHIFT) - BASE, 0, LARGEST); }
    static F value(I code) {
        const F x = as_floats((code + BASE) << SHIFT);
        return ZERO ? (code > 0 ? x : F{}) : x;
    }
};

using Scale = Minifloat<5, 3, 0, false>;

struct Fine {
    using Gain = Minifloat<4, 3, 1, true>;
    static constexpr int PIVOT_BITS = 4;
};
struct Coarse {
    using Gain = Minifloat<3, 0, 1, true>;
    static constexpr int PIVOT_BITS = 2;
};
template <class D> using PrecisionOf = std::conditional_t<std::is_same_v<D, BFloat16>, Coarse, Fine>;

// Codes of 2, 4 or 8 bits in bytes, the first in the lowest bits.
template <int BITS> inline i64 packed_size(i64 count) { return (count * BITS + 7) / 8; }
template <int BITS> inline u32 unpack(const u8 *packed, i64 i) {
    constexpr int PER_BYTE = 8 / BITS;
    return packed[i / PER_BYTE] >> (i % PER_BYTE * BITS) & ((1u << BITS) - 1);
}
template <int BITS> inline void pack(u8 *packed, i64 i, u32 code) {
    constexpr int PER_BYTE = 8 / BITS;
    u8 &byte = packed[i / PER_BYTE];
    byte = u8((i % PER_BYTE ? byte : 0) | code << (i % PER_BYTE * BITS));
}

// Rows of bytes between the buffer, where they are padded to whole vectors, and where they are stored.
inline void copy_rows(const u8 *from, i64 from_stride, u8 *to, i64 to_stride, i64 num_rows, i64 width) {
    if (from_stride == width && to_stride == width) std::memcpy(to, from, num_rows * width);
    else for (i64 v = 0; v < num_rows; ++v) std::copy_n(from + v * from_stride, width, to + v * to_stride);
}

inline I read_codes(const u8 *from) { Bytes16 b; std::memcpy(&b, from, LANES); return widen(b); }
inline void write_codes(I codes, u8 *to) { const Bytes16 b = __builtin_convertvector(codes, Bytes16); std::memcpy(to, &b, LANES); }

// How q + OFFSET is stored: a byte each, in two's complement.
struct EightBits {
    static constexpr int LEVELS = 127, TENSORS = 1, OFFSET = 0;

    static void put(const Job &job, i64 head, const u8 *q, i64 stride) {
        copy_rows(q, stride, static_cast<u8 *>(job.stored[0]) + head * job.d_v * job.d_k, job.d_k, job.d_v, job.d_k);
    }
    static void take(const Job &job, i64 head, u8 *q, i64 stride) {
        copy_rows(static_cast<u8 *>(job.stored[0]) + head * job.d_v * job.d_k, job.d_k, q, stride, job.d_v, job.d_k);
    }
    static F value(I code) { return __builtin_convertvector((code ^ 128) - 128, F); }
};

// How q + OFFSET is stored: five bits, four of them two rows to a byte and the fifth eight rows to a byte.
struct FiveBits {
    static constexpr int LEVELS = 15, TENSORS = 2, OFFSET = 16;

    static u8 *low(const Job &job, i64 head) { return static_cast<u8 *>(job.stored[0]) + head * packed_size<4>(job.d_v) * job.d_k; }
    static u8 *high(const Job &job, i64 head) { return static_cast<u8 *>(job.stored[1]) + head * packed_size<1>(job.d_v) * job.d_k; }
    static void put(const Job &job, i64 head, const u8 *__restrict q, i64 stride) {
        for (i64 v0 = 0; v0 < job.d_v; v0 += 8) {
            u8 *__restrict to_low = low(job, head) + v0 / 2 * job.d_k, *__restrict to_high = high(job, head) + v0 / 8 * job.d_k;
            const i64 rows = std::min(job.d_v - v0, i64(8));
            std::fill_n(to_low, (rows + 1) / 2 * job.d_k, u8(0));
            std::fill_n(to_high, job.d_k, u8(0));
            for (i64 v = 0; v < rows; ++v)
                for (i64 k = 0; k < job.d_k; ++k) {
                    to_low[v / 2 * job.d_k + k] |= u8((q[(v0 + v) * stride + k] & 15) << v % 2 * 4);
                    to_high[k] |= u8(q[(v0 + v) * stride + k] >> 4 << v);
                }
        }
    }
    static void take(const Job &job, i64 head, u8 *__restrict q, i64 stride) {
        for (i64 v = 0; v < job.d_v; ++v) {
            const u8 *__restrict from_low = low(job, head) + v / 2 * job.d_k, *__restrict from_high = high(job, head) + v / 8 * job.d_k;
            for (i64 k = 0; k < job.d_k; ++k)
                q[v * stride + k] = u8((from_low[k] >> v % 2 * 4 & 15) | (from_high[k] >> v % 8 & 1) << 4);
        }
    }
    static F value(I code) { return __builtin_convertvector(code - OFFSET, F); }
};

// Where a head of a pivot format is stored. The names are those of pivot.py.
template <class D, class Q> struct Stored {
    using Precision = PrecisionOf<D>;
    using Gain = typename Precision::Gain;
    static constexpr int PIVOT_BITS = Precision::PIVOT_BITS, GAIN_BITS = Gain::BITS + 1, N = 1 << (PIVOT_BITS - 1);
    u8 *exponent, *pivot, *gain, *scale;

    Stored(const Job &job, i64 head)
        : exponent(at(job, 0) + head), pivot(at(job, 1) + head * packed_size<PIVOT_BITS>(job.d_v)),
          gain(at(job, 2) + head * packed_size<GAIN_BITS>(job.d_k)), scale(at(job, 3) + head * job.d_k) {}
    static u8 *at(const Job &job, int i) { return static_cast<u8 *>(job.stored[Q::TENSORS + i]); }

    float power() const { return from_bits(u32(*exponent) << 23); }
    float u(i64 v) const { return float(2 * (int(unpack<PIVOT_BITS>(pivot, v)) - N) + 1); }
    static F gain_of(I codes) {
        const F size = Gain::value(codes & Gain::LARGEST) / float(2 * N);
        return as_floats(as_bits(size) | codes >> Gain::BITS << 31);
    }
};

// What a panel adds to the report; two sums each, as one would wait for itself.
template <class D> struct Sums {
    Report &report;
    F signal[2] = {}, error[2] = {};
    i64 count = 0;

    void add(F x, F restored, int turn) {
        const F s = x * report.unit, e = (x - Words<D>::cast(restored)) * report.unit;
        signal[turn] += s * s;
        error[turn] += e * e;
        if (++count == 2 * RUN) flush();
    }
    void flush() {
        report.signal += sum(signal[0]) + sum(signal[1]), report.error += sum(error[0]) + sum(error[1]);
        signal[0] = signal[1] = error[0] = error[1] = F{}, count = 0;
    }
};

// A head whose NaNs and infinities are replaced by zeros, in memory of its own; returns how many there were.
template <class D> double clean(Head<D> &h, const Panels &panels) {
    using Word = typename D::Word;
    Word *to = reinterpret_cast<Word *>(panels.packed.get());
    double non_finite = 0;
    for (i64 v = 0; v < h.d_v; ++v)
        for (i64 k = 0; k < h.d_k; ++k) {
            const Word word = h.state[v * h.stride_v + k * h.stride_k];
            const bool finite = (word & D::MAGNITUDE) < D::NON_FINITE;
            to[v * h.d_k + k] = finite ? word : Word(0);
            non_finite += !finite;
        }
    h.state = to, h.next = to, h.stride_v = h.d_k, h.stride_k = 1;
    return non_finite;
}

// Restored rows: from the rotated basis, in units of power, to what the dtype can hold.
template <class D> struct Finish {
    const float *sign;
    float power;
    const float limit = D::load(typename D::Word(D::NON_FINITE - 1));
    const bool near_limit = power > limit * 0x1p-20f;  // else no sum of a head can be that large

    F operator()(F x, i64 v) const {
        x = x * (sign[v] * power);
        return near_limit ? smaller(larger(x, all(-limit)), all(limit)) : x;
    }
};

// Returns false, with nothing of use stored, if an element is NaN or infinite.
template <class D, class Q> bool compress_pivot_head(const Job &job, const Head<D> &h, const Panels &panels, Report &report) {
    using S = Stored<D, Q>;
    using Gain = typename S::Gain;
    constexpr int N = S::N;
    const S stored(job, h.stored);
    const i64 q_stride = panels.count * LANES;
    const float *sign = panels.signs.floats(), per_block = 1.0f / float(block_of(h.d_v));
    float *u = panels.pivot.floats();
    F *head = panels.head.vectors();
    const i64 stride = panels.stride;
    u8 *codes_of_q = panels.q.get();
    F *largest = panels.first.vectors();
    Access<D> access{h};

    std::fill_n(largest, panels.count, F{});
    rotate(
        panels, 0, panels.count, h.d_v,
        [&](i64 v, i64 p, F *rows) {
            access.tile(v, p, rows);
            for (int i = 0; i < LANES; ++i) rows[i] = rows[i] * (sign[v + i] * per_block);
        },
        [&](i64 v, i64 p) { return access.row(v, p) * (sign[v] * per_block); },
        [&](i64 v, i64 p, F x) {
            head[v * stride + p] = x;
            largest[p] = largest_of(x, largest[p]);
        });
    if (any(access.seen >= I{} + D::NON_FINITE)) return false;

    const i64 pivot = std::max_element(panels.first.floats(), panels.first.floats() + h.d_k) - panels.first.floats();
    const float top = panels.first.floats()[pivot];
    *stored.exponent = u8(std::clamp(bits(top) >> 23, 1u, 253u));
    const float power = stored.power(), unit = from_bits((254u - *stored.exponent) << 23), step = top * unit / N;
    report.unit = unit;
    i32 square = 0;
    for (i64 v = 0; v < h.d_v; ++v) {
        const float level = std::floor(panels.head.floats()[v * panels.stride * LANES + pivot] * unit / (step > 0 ? step : 1.0f));
        pack<S::PIVOT_BITS>(stored.pivot, v, u32(int(std::clamp(level, float(-N), float(N - 1))) + N));
        u[v] = stored.u(v);
        square += int(u[v]) * int(u[v]);
    }

    const Finish<D> finish{sign, power};
    F *gain = panels.first.vectors(), *scale = panels.second.vectors();
    const auto some = [&](i64 begin, auto width) {
        F total[width] = {}, most[width] = {};
        for (i64 v = 0; v < h.d_v; ++v)
            for (int i = 0; i < width; ++i) total[i] = total[i] + head[v * stride + begin + i] * unit * u[v];
        for (int i = 0; i < width; ++i) {
            const F exact = total[i] / float(square);
            const I codes = Gain::code_nearest(magnitude(exact) * float(2 * N)) | (exact < 0.0f ? I{} + (1 << Gain::BITS) : I{});
            gain[begin + i] = S::gain_of(codes);
            for (i64 k = (begin + i) * LANES; k < std::min((begin + i + 1) * LANES, h.d_k); ++k)
                pack<S::GAIN_BITS>(stored.gain, k, u32(codes[k % LANES]));
        }
        for (i64 v = 0; v < h.d_v; ++v)
            for (int i = 0; i < width; ++i)
                most[i] = largest_of(head[v * stride + begin + i] * unit - gain[begin + i] * u[v], most[i]);
        F inverse[width];
        for (int i = 0; i < width; ++i) {
            const I codes = Scale::code_up(most[i] / float(Q::LEVELS));
            scale[begin + i] = Scale::value(codes), inverse[i] = 1.0f / scale[begin + i];
            for (i64 k = (begin + i) * LANES; k < std::min((begin + i + 1) * LANES, h.d_k); ++k) stored.scale[k] = u8(codes[k % LANES]);
        }
        Sums<D> sums{report};
        rotate_back(
            panels, begin, begin + width, h.d_v,
            [&](i64 v, i64 p) {
                const F predicted = gain[p] * u[v], q = rounded((head[v * stride + p] * unit - predicted) * inverse[p - begin]);
                write_codes(__builtin_convertvector(q, I) + Q::OFFSET, codes_of_q + v * q_stride + p * LANES);
                return q * scale[p] + predicted;
            },
            [&](i64 v, i64 p, F *rows) {
                F x[LANES];
                access.tile(v, p, x);
                for (int i = 0; i < LANES; ++i) sums.add(x[i], finish(rows[i], v + i), i % 2);
            },
            [&](i64 v, i64 p, F row) { sums.add(access.row(v, p), finish(row, v), v % 2); });
        sums.flush();
    };
    i64 p = 0;
    for (; p + 4 <= panels.count; p += 4) some(p, std::integral_constant<int, 4>());
    for (; p < panels.count; ++p) some(p, std::integral_constant<int, 1>());
    Q::put(job, h.stored, panels.q.get(), q_stride);
    return true;
}

template <class D, class Q> void compress_pivot(const Job &job) {
    each_head<D, Panels>(job, [&](Head<D> h, const Panels &panels, double *out) {
        Report report;
        if (!compress_pivot_head<D, Q>(job, h, panels, report)) {
            report.non_finite = clean(h, panels);
            compress_pivot_head<D, Q>(job, h, panels, report);
        }
        report.write(out);
    });
}

template <class D, class Q> void restore_pivot(const Job &job) {
    using S = Stored<D, Q>;
    each_head<D, Panels>(job, [&](const Head<D> &h, const Panels &panels, double *) {
        const S stored(job, h.stored);
        const i64 q_stride = panels.count * LANES;
        const Finish<D> finish{panels.signs.floats(), stored.power()};
        const Access<D> access{h};
        float *u = panels.pivot.floats();
        F *gain = panels.first.vectors(), *scale = panels.second.vectors();
        for (i64 v = 0; v < h.d_v; ++v) u[v] = stored.u(v);
        for (i64 p = 0; p < panels.count; ++p) {
            I gain_codes = {}, scale_codes = {};
            for (i64 k = p * LANES; k < std::min((p + 1) * LANES, h.d_k); ++k) {
                gain_codes[k % LANES] = i32(unpack<S::GAIN_BITS>(stored.gain, k));
                scale_codes[k % LANES] = stored.scale[k];
            }
            gain[p] = S::gain_of(gain_codes), scale[p] = Scale::value(scale_codes);
        }
        u8 *q = panels.q.get();
        Q::take(job, h.stored, q, q_stride);
        rotate_back(
            panels, 0, panels.count, h.d_v,
            [&](i64 v, i64 p) { return Q::value(read_codes(q + v * q_stride + p * LANES)) * scale[p] + gain[p] * u[v]; },
            [&](i64 v, i64 p, F *rows) {
                for (int i = 0; i < LANES; ++i) rows[i] = finish(rows[i], v + i);
                access.write_tile(v, p, rows);
            },
            [&](i64 v, i64 p, F row) { access.write(v, p, finish(row, v)); });
    });
}

// Calls step(v, p, rows, count) for all rows and parts of a head: 16 rows at a time, then one.
template <class Tile, class Row> inline void in_tiles(const Panels &panels, i64 d_v, Tile tile, Row row) {
    i64 v = 0;
    for (; v + LANES <= d_v; v += LANES)
        for (i64 p = 0; p < panels.count; ++p) tile(v, p);
    for (; v < d_v; ++v)
        for (i64 p = 0; p < panels.count; ++p) row(v, p);
}

template <class D> bool compress_int16_head(const Job &job, const Head<D> &h, const Panels &panels, Report &report) {
    i16 *q = static_cast<i16 *>(job.stored[0]) + h.stored * h.d_v * h.d_k;
    F *largest = panels.first.vectors(), *scale = panels.second.vectors();
    Access<D> access{h};
    std::fill_n(largest, panels.count, F{});
    const auto keep = [&](i64 v, i64 p, F x) {
        panels.at(v, p) = x;
        largest[p] = largest_of(x, largest[p]);
    };
    in_tiles(
        panels, h.d_v,
        [&](i64 v, i64 p) {
            F x[LANES];
            access.tile(v, p, x);
            for (int i = 0; i < LANES; ++i) keep(v + i, p, x[i]);
        },
        [&](i64 v, i64 p) { keep(v, p, access.row(v, p)); });
    if (any(access.seen >= I{} + D::NON_FINITE)) return false;

    report.unit = unit_of(*std::max_element(panels.first.floats(), panels.first.floats() + panels.count * LANES));
    for (i64 p = 0; p < panels.count; ++p)
        scale[p] = smaller(larger(largest[p], all(MIN_AMAX)) / 32767.0f, all(job.largest_scale));
    std::copy_n(panels.second.floats(), h.d_k, static_cast<float *>(job.stored[1]) + h.stored * h.d_k);
    Sums<D> sums{report};
    for (i64 v = 0; v < h.d_v; ++v)
        for (i64 p = 0; p < panels.count; ++p) {
            const F x = panels.at(v, p), level = rounded(smaller(larger(x / scale[p], all(-32767.0f)), all(32767.0f)));
            const Shorts codes = __builtin_convertvector(__builtin_convertvector(level, I), Shorts);
            i16 *to = q + v * h.d_k + p * LANES;
            if (p < access.whole) std::memcpy(to, &codes, sizeof codes);
            else std::memcpy(to, &codes, 2 * (h.d_k - p * LANES));
            sums.add(x, level * scale[p], p % 2);
        }
    sums.flush();
    return true;
}

template <class D> void compress_int16(const Job &job) {
    each_head<D, Panels>(job, [&](Head<D> h, const Panels &panels, double *out) {
        Report report;
        if (!compress_int16_head(job, h, panels, report)) {
            report.non_finite = clean(h, panels);
            compress_int16_head(job, h, panels, report);
        }
        report.write(out);
    });
}

template <class D> void restore_int16(const Job &job) {
    each_head<D, Panels>(job, [&](const Head<D> &h, const Panels &panels, double *) {
        const i16 *q = static_cast<const i16 *>(job.stored[0]) + h.stored * h.d_v * h.d_k;
        std::copy_n(static_cast<const float *>(job.stored[1]) + h.stored * h.d_k, h.d_k, panels.second.floats());
        const Access<D> access{h};
        const auto restored = [&](i64 v, i64 p) {
            Shorts codes = {};
            const i16 *from = q + v * h.d_k + p * LANES;
            if (p < access.whole) std::memcpy(&codes, from, sizeof codes);
            else std::memcpy(&codes, from, 2 * (h.d_k - p * LANES));
            return __builtin_convertvector(__builtin_convertvector(codes, I), F) * panels.second.vectors()[p];
        };
        in_tiles(
            panels, h.d_v,
            [&](i64 v, i64 p) {
                F rows[LANES];
                for (int i = 0; i < LANES; ++i) rows[i] = restored(v + i, p);
                access.write_tile(v, p, rows);
            },
            [&](i64 v, i64 p) { access.write(v, p, restored(v, p)); });
    });
}

}  // namespace

#define EXPORT(name, D)                                                                                    extern "C" void compress_int16_##name(const Job *job) { compress_int16<D>(*job); }                     extern "C" void restore_int16_##name(const Job *job) { restore_int16<D>(*job); }                       extern "C" void compress_int8_pivot_##name(const Job *job) { compress_pivot<D, EightBits>(*job); }     extern "C" void restore_int8_pivot_##name(const Job *job) { restore_pivot<D, EightBits>(*job); }       extern "C" void compress_int5_pivot_##name(const Job *job) { compress_pivot<D, FiveBits>(*job); }      extern "C" void restore_int5_pivot_##name(const Job *job) { restore_pivot<D, FiveBits>(*job); }

EXPORT(float32, Float32)
EXPORT(bfloat16, BFloat16)
EXPORT(float16, Float16)
