// int16 and the formats of pivot.py fused for the CPU: every layer and head of every slot in one call. Built by cpu_build.py.
//
// A head is worked on in tiles of 16 rows by 16 channels in float32: a vector holds one row of a tile, and a tile fits the registers
// while it is rotated. Whatever dtype a state has and however it lies in memory, from there on all is the same. Results are bit for
// bit those of the definitions: sums run in their order, and the compiler may neither contract to fused multiply-adds nor assume
// that there is no NaN.

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
inline I between(I x, i32 low, i32 high) { x = x < low ? I{} + low : x; return x > high ? I{} + high : x; }
// Half to even; the magnitude must be under 2^22.
inline F rounded(F x) { return (x + ROUND) - ROUND; }
inline bool any(I x) { i32 found = 0; for (int i = 0; i < LANES; ++i) found |= x[i]; return found; }
inline double sum(F x) {
    double total = 0;
    for (int i = 0; i < 4; ++i) total += double((x[i] + x[i + 4]) + (x[i + 8] + x[i + 12]));
    return total;
}

typedef u8 Bytes16 __attribute__((vector_size(LANES)));
typedef u16 Words16 __attribute__((vector_size(2 * LANES)));

// Compilers make several instructions of these where there is one.
#ifdef __AVX512F__
inline I widen(Bytes16 x) { return I(_mm512_cvtepu8_epi32(__m128i(x))); }
inline I widen(Words16 x) { return I(_mm512_cvtepu16_epi32(__m256i(x))); }
inline I larger(I a, I b) { return I(_mm512_max_epi32(__m512i(a), __m512i(b))); }
#else
inline I widen(Bytes16 x) { return __builtin_convertvector(__builtin_convertvector(x, Words16), I); }
inline I widen(Words16 x) { return __builtin_convertvector(x, I); }
inline I larger(I a, I b) { return a > b ? a : b; }
#endif
inline I widen(I x) { return x; }
inline F larger(F a, F b) { return a > b ? a : b; }
inline F smaller(F a, F b) { return a < b ? a : b; }
// Numbers that are not negative are ordered as their bits are, and integers are compared in less time.
inline F largest_of(F x, F so_far) { return as_floats(larger(as_bits(magnitude(x)), as_bits(so_far))); }

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
        else if constexpr (std::is_same_v<D, BFloat16>) return round_to_16(b) >> 16;
        else {
            const I sign = b >> 16 & 0x8000, size = b & 0x7fffffff;
            const I normal = (size + 0xfff + (size >> 13 & 1) - (112 << 23)) >> 13;
            const I subnormal = as_bits(as_floats(size) + 0.5f) - as_bits(all(0.5f));
            return sign | (size < 113 << 23 ? subnormal : normal);
        }
    }
    static I round_to_16(I b) { return b + 0x7fff + (b >> 16 & 1); }  // half to even, on the upper 16 bits
    // What the dtype makes of float32 values.
    static F cast(F values) {
        if constexpr (std::is_same_v<D, Float32>) return values;
        else if constexpr (std::is_same_v<D, BFloat16>) return as_floats(round_to_16(as_bits(values)) & ~0xffff);
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

// Reads and writes tiles of a head. Part p of a row is a vector; rows beyond d_v and channels beyond d_k are zeros.
template <class D> struct Access {
    using Word = typename D::Word;
    const Head<D> &h;
    const i64 ahead = h.next - h.state;
    I seen = {};  // the largest magnitudes read so far, as words

    // 16 rows from v on.
    void read(i64 v, i64 p, F *x) {
        const i64 k = p * LANES;
        if (!vectors(v, k)) return read_slowly(v, k, x);
        const Word *from = first(v, k);
        const i64 apart = h.stride_k == 1 ? h.stride_v : h.stride_k;
        I largest = seen;
        for (int i = 0; i < LANES; ++i) {
            const I words = Words<D>::read(from + i * apart), size = words & D::MAGNITUDE;
            largest = larger(size, largest);
            x[i] = Words<D>::load(words);
        }
        seen = largest;
        if (h.stride_k != 1) transpose(x);
    }
    void write(i64 v, i64 p, F *x) const {
        const i64 k = p * LANES;
        if (!vectors(v, k)) return write_slowly(v, k, x);
        if (h.stride_k != 1) transpose(x);
        Word *to = first(v, k);
        const i64 apart = h.stride_k == 1 ? h.stride_v : h.stride_k;
        for (int i = 0; i < LANES; ++i) Words<D>::write(x[i], to + i * apart);
    }
    // What read() will read, or write() write, of the next head.
    template <bool WRITE> void prefetch(i64 v, i64 p) const {
        const i64 apart = h.stride_k == 1 ? h.stride_v : h.stride_k;
        const Word *at = first(v, p * LANES) + ahead;
        for (int i = 0; i < LANES; ++i) __builtin_prefetch(at + i * apart, WRITE, 2);
    }

private:
    Word *first(i64 v, i64 k) const { return h.state + v * h.stride_v + k * h.stride_k; }
    bool vectors(i64 v, i64 k) const {
        return v + LANES <= h.d_v && k + LANES <= h.d_k && (h.stride_k == 1 || h.stride_v == 1);
    }
    void read_slowly(i64 v, i64 k, F *x) {
        for (int i = 0; i < LANES; ++i) x[i] = F{};
        for (i64 i = 0; i < std::min(h.d_v - v, i64(LANES)); ++i)
            for (i64 j = 0; j < std::min(h.d_k - k, i64(LANES)); ++j) {
                const Word word = *first(v + i, k + j);
                seen[j] = std::max(seen[j], i32(word & D::MAGNITUDE));
                x[i][j] = D::load(word);
            }
    }
    void write_slowly(i64 v, i64 k, const F *x) const {
        for (i64 i = 0; i < std::min(h.d_v - v, i64(LANES)); ++i)
            for (i64 j = 0; j < std::min(h.d_k - k, i64(LANES)); ++j) *first(v + i, k + j) = D::store(x[i][j]);
    }
};

// Rows that are rotated together.
inline i64 block_of(i64 d_v) { return std::min(d_v & -d_v, i64(LANES)); }

// The random sign of a row: the top bit of its mixed number.
inline float sign_of(i64 v) {
    u32 mixed = u32(v + 1) * 0x9E3779B1u;
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6Bu;
    return mixed >> 31 ? -1.0f : 1.0f;
}

// Butterflies between the rows of a tile: of neighbours first, or last.
template <int STAGES, bool NEAR_FIRST> inline void butterflies(F *row) {
#pragma GCC unroll 4
    for (int step = 0; step < STAGES; ++step) {
        const int bit = 1 << (NEAR_FIRST ? step : STAGES - 1 - step);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
            if (!(i & bit)) {
                const F a = row[i], b = row[i | bit];
                row[i] = a + b, row[i | bit] = a - b;
            }
    }
}

template <bool NEAR_FIRST> inline void rotate(F *row, i64 block) {
    if (block == 16) butterflies<4, NEAR_FIRST>(row);
    else if (block == 8) butterflies<3, NEAR_FIRST>(row);
    else if (block == 4) butterflies<2, NEAR_FIRST>(row);
    else if (block == 2) butterflies<1, NEAR_FIRST>(row);
}

// Buffers of one thread: a head in float32, and what belongs to its rows and channels. The vectors of a row follow each other; the
// stride from row to row is odd, lest the rows of one part fall on few lines of the cache.
struct Buffers {
    i64 num_rows, count, stride, q_stride, block;
    Vectors head_, gain_, scale_, signs_, back_, pivot_;
    std::unique_ptr<u8[]> q_, packed;

    Buffers(i64 d_v, i64 d_k)
        : num_rows((d_v + LANES - 1) / LANES * LANES), count((d_k + LANES - 1) / LANES), stride(count | 1), q_stride(count * LANES),
          block(block_of(d_v)), head_(stride * num_rows), gain_(count), scale_(count), signs_(num_rows / LANES), back_(num_rows / LANES),
          pivot_(num_rows / LANES), q_(new u8[num_rows * q_stride]()), packed(new u8[d_v * d_k * 4]) {
        for (i64 v = 0; v < num_rows; ++v) signs()[v] = sign_of(v) / float(block), u()[v] = 0;
    }
    F *head() const { return head_.vectors(); }
    F *gain() const { return gain_.vectors(); }
    F *scale() const { return scale_.vectors(); }
    float *signs() const { return signs_.floats(); }  // what rows are multiplied by before they are rotated,
    float *back() const { return back_.floats(); }    // and after they were rotated back
    float *u() const { return pivot_.floats(); }
    u8 *q() const { return q_.get(); }
};

// A sum of squares for the report, in several parts, as one would wait for itself.
struct Squares {
    static constexpr int COUNT = 4;
    F part[COUNT] = {};

    void add(F x, int turn) { part[turn % COUNT] += x * x; }
    double total() const { return sum((part[0] + part[1]) + (part[2] + part[3])); }
};

// Calls body(v, p, squares) for every tile; returns the total of the squares, which are summed up in float32 for few tiles only.
template <class Body> [[gnu::always_inline]] inline double each_tile(const Buffers &buffers, Body body) {
    double total = 0;
    for (i64 v = 0; v < buffers.num_rows; v += LANES) {
        Squares squares;
        for (i64 p = 0; p < buffers.count; ++p) body(v, p, squares);
        total += squares.total();
    }
    return total;
}

// A head whose NaNs and infinities are replaced by zeros, in memory of its own; returns how many there were.
template <class D> double clean(Head<D> &h, const Buffers &buffers) {
    using Word = typename D::Word;
    Word *to = reinterpret_cast<Word *>(buffers.packed.get());
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

// Compresses every head; compress_head(h, buffers, report) returns false if it came upon a NaN or an infinity.
template <class D, class CompressHead> void compress_heads(const Job &job, CompressHead compress_head) {
    each_head<D, Buffers>(job, [&](Head<D> h, const Buffers &buffers, double *out) {
        Report report;
        if (!compress_head(h, buffers, report)) {
            report.non_finite = clean(h, buffers);
            compress_head(h, buffers, report);
        }
        report.write(out);
    });
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

inline I read_codes(const u8 *from) { Bytes16 b; std::memcpy(&b, from, LANES); return widen(b); }
inline void write_codes(I codes, u8 *to) { const Bytes16 b = __builtin_convertvector(codes, Bytes16); std::memcpy(to, &b, LANES); }

// How q + OFFSET is stored: a byte each, in two's complement.
struct EightBits {
    static constexpr int LEVELS = 127, TENSORS = 1, OFFSET = 0;

    static u8 *stored(const Job &job, i64 head) { return static_cast<u8 *>(job.stored[0]) + head * job.d_v * job.d_k; }
    static bool in_place(const Job &job, const Buffers &buffers) { return job.d_k == buffers.q_stride && job.d_v == buffers.num_rows; }
    // Where the codes are to be written, before put().
    static u8 *target(const Job &job, i64 head, const Buffers &buffers) {
        return in_place(job, buffers) ? stored(job, head) : buffers.q();
    }
    static void put(const Job &job, i64 head, const Buffers &buffers) {
        if (!in_place(job, buffers)) copy_rows(buffers.q(), buffers.q_stride, stored(job, head), job.d_k, job);
    }
    static const u8 *take(const Job &job, i64 head, const Buffers &buffers) {
        if (in_place(job, buffers)) return stored(job, head);
        copy_rows(stored(job, head), job.d_k, buffers.q(), buffers.q_stride, job);
        return buffers.q();
    }
    static F value(I code) { return __builtin_convertvector((code ^ 128) - 128, F); }

private:
    static void copy_rows(const u8 *from, i64 from_stride, u8 *to, i64 to_stride, const Job &job) {
        for (i64 v = 0; v < job.d_v; ++v) std::copy_n(from + v * from_stride, job.d_k, to + v * to_stride);
    }
};

// How q + OFFSET is stored: five bits, four of them two rows to a byte and the fifth eight rows to a byte.
struct FiveBits {
    static constexpr int LEVELS = 15, TENSORS = 2, OFFSET = 16;

    static u8 *low(const Job &job, i64 head) { return static_cast<u8 *>(job.stored[0]) + head * packed_size<4>(job.d_v) * job.d_k; }
    static u8 *high(const Job &job, i64 head) { return static_cast<u8 *>(job.stored[1]) + head * packed_size<1>(job.d_v) * job.d_k; }
    static u8 *target(const Job &, i64, const Buffers &buffers) { return buffers.q(); }
    static void put(const Job &job, i64 head, const Buffers &buffers) {
        std::fill(buffers.q() + job.d_v * buffers.q_stride, buffers.q() + buffers.num_rows * buffers.q_stride, u8(0));
        for (i64 v = 0; v < job.d_v; v += 8) {
            const u8 *row[8];
            for (int i = 0; i < 8; ++i) row[i] = buffers.q() + (v + i) * buffers.q_stride;
            collect(row, job.d_k, high(job, head) + v / 8 * job.d_k);
            for (int i = 0; i < 8 && v + i < job.d_v; i += 2) pair(row[i], row[i + 1], job.d_k, low(job, head) + (v + i) / 2 * job.d_k);
        }
    }
    static const u8 *take(const Job &job, i64 head, const Buffers &buffers) {
        for (i64 v = 0; v < job.d_v; ++v)
            join(low(job, head) + v / 2 * job.d_k, high(job, head) + v / 8 * job.d_k, int(v % 2 * 4), int(v % 8), job.d_k,
                 buffers.q() + v * buffers.q_stride);
        return buffers.q();
    }
    static F value(I code) { return __builtin_convertvector(code - OFFSET, F); }

private:
    static void pair(const u8 *__restrict a, const u8 *__restrict b, i64 count, u8 *__restrict to) {
        for (i64 k = 0; k < count; ++k) to[k] = u8((a[k] & 15) | b[k] << 4);
    }
    static void collect(const u8 *const *row, i64 count, u8 *__restrict to) {
        for (i64 k = 0; k < count; ++k) to[k] = row[0][k] >> 4;
        for (int i = 1; i < 8; ++i) add(row[i], i, count, to);
    }
    static void add(const u8 *__restrict from, int shift, i64 count, u8 *__restrict to) {
        for (i64 k = 0; k < count; ++k) to[k] |= u8(from[k] >> 4 << shift);
    }
    static void join(const u8 *__restrict from_low, const u8 *__restrict from_high, int low_shift, int high_shift, i64 count, u8 *__restrict to) {
        for (i64 k = 0; k < count; ++k) to[k] = u8((from_low[k] >> low_shift & 15) | (from_high[k] >> high_shift & 1) << 4);
    }
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

// From the rotated basis, in units of power, to a tile as it is restored.
template <class D> struct Restore {
    const i64 block;
    const float *back;
    const float limit = D::load(typename D::Word(D::NON_FINITE - 1));
    const bool near_limit;

    Restore(const Buffers &buffers, float power)
        : block(buffers.block), back(buffers.back()), near_limit(power > limit * 0x1p-20f) {  // else no sum of a tile is that large
        for (i64 v = 0; v < buffers.num_rows; ++v) buffers.back()[v] = buffers.signs()[v] * float(block) * power;
    }
    void operator()(i64 v, F *row) const {
        rotate<false>(row, block);
        for (int i = 0; i < LANES; ++i) row[i] = row[i] * back[v + i];
        if (near_limit)
            for (int i = 0; i < LANES; ++i) row[i] = smaller(larger(row[i], all(-limit)), all(limit));
    }
};

// The pivot channel in odd integers; returns the sum of their squares.
template <class S> float find_pivot(const S &stored, const Buffers &buffers, i64 d_v, i64 pivot, float largest, float unit) {
    constexpr int N = S::N;
    const float step = largest * unit / N, *channel = buffers.head_.floats() + pivot;
    i32 square = 0;
    for (i64 v = 0; v < d_v; ++v) {
        const float level = std::floor(channel[v * buffers.stride * LANES] * unit / (step > 0 ? step : 1.0f));
        pack<S::PIVOT_BITS>(stored.pivot, v, u32(int(std::clamp(level, float(-N), float(N - 1))) + N));
        const float u = buffers.u()[v] = stored.u(v);
        square += int(u) * int(u);
    }
    return float(square);
}

// Gains and scales of the parts from begin on, stored and in the buffers; returns their signal energy in the rotated basis.
template <class S, int LEVELS, int WIDTH>
double find_scales(const S &stored, const Buffers &buffers, i64 d_k, i64 begin, float square, float unit) {
    using Gain = typename S::Gain;
    const F *head = buffers.head() + begin;
    const float *u = buffers.u();
    const i64 stride = buffers.stride;
    F total[WIDTH] = {}, most[WIDTH] = {}, gain[WIDTH];
    double energy = 0;
    for (i64 v0 = 0; v0 < buffers.num_rows; v0 += RUN) {
        Squares signal;
        for (i64 v = v0; v < std::min(v0 + RUN, buffers.num_rows); ++v)
            for (int i = 0; i < WIDTH; ++i) {
                const F r = head[v * stride + i] * unit;
                total[i] = total[i] + r * u[v];
                signal.add(r, i);
            }
        energy += signal.total();
    }
    for (int i = 0; i < WIDTH; ++i) {
        const F exact = total[i] / square;
        const I codes = Gain::code_nearest(magnitude(exact) * float(2 * S::N)) | (exact < 0.0f ? I{} + (1 << Gain::BITS) : I{});
        buffers.gain()[begin + i] = gain[i] = S::gain_of(codes);
        for (i64 k = (begin + i) * LANES; k < std::min((begin + i + 1) * LANES, d_k); ++k)
            pack<S::GAIN_BITS>(stored.gain, k, u32(codes[k % LANES]));
    }
    for (i64 v = 0; v < buffers.num_rows; ++v)
        for (int i = 0; i < WIDTH; ++i) most[i] = largest_of(head[v * stride + i] * unit - gain[i] * u[v], most[i]);
    for (int i = 0; i < WIDTH; ++i) {
        const I codes = Scale::code_up(most[i] / float(LEVELS));
        buffers.scale()[begin + i] = Scale::value(codes);
        for (i64 k = (begin + i) * LANES; k < std::min((begin + i + 1) * LANES, d_k); ++k) stored.scale[k] = u8(codes[k % LANES]);
    }
    return energy;
}

// Returns false, with nothing of use stored, if an element is NaN or infinite.
template <class D, class Q> bool compress_pivot_head(const Job &job, const Head<D> &h, const Buffers &buffers, Report &report) {
    using S = Stored<D, Q>;
    const S stored(job, h.stored);
    const i64 stride = buffers.stride, q_stride = buffers.q_stride, block = buffers.block;
    const float *sign = buffers.signs(), *u = buffers.u();
    F *head = buffers.head(), *gain = buffers.gain(), *scale = buffers.scale(), *largest = gain;
    u8 *codes = Q::target(job, h.stored, buffers);
    Access<D> access{h};

    std::fill_n(largest, buffers.count, F{});
    each_tile(buffers, [&](i64 v, i64 p, Squares &) {
        F row[LANES], most = largest[p];
        access.read(v, p, row);
        access.template prefetch<false>(v, p);
        for (int i = 0; i < LANES; ++i) row[i] = row[i] * sign[v + i];
        rotate<true>(row, block);
        for (int i = 0; i < LANES; ++i) head[(v + i) * stride + p] = row[i], most = largest_of(row[i], most);
        largest[p] = most;
    });
    if (any(access.seen >= I{} + D::NON_FINITE)) return false;

    const float *by_channel = reinterpret_cast<const float *>(largest);
    const i64 pivot = std::max_element(by_channel, by_channel + h.d_k) - by_channel;
    *stored.exponent = u8(std::clamp(bits(by_channel[pivot]) >> 23, 1u, 253u));
    const float unit = report.unit = from_bits((254u - *stored.exponent) << 23);
    const float square = find_pivot(stored, buffers, h.d_v, pivot, by_channel[pivot], unit);
    double signal = 0;
    i64 begin = 0;
    for (; begin + 4 <= buffers.count; begin += 4) signal += find_scales<S, Q::LEVELS, 4>(stored, buffers, h.d_k, begin, square, unit);
    for (; begin < buffers.count; ++begin) signal += find_scales<S, Q::LEVELS, 1>(stored, buffers, h.d_k, begin, square, unit);
    report.signal = signal * double(block);

    // A rotation keeps sums of squares, so that the error may be measured before it is undone. What is not known then is how the
    // result will be clamped, and rounded: in float32 that is next to nothing, unless the error itself is, or the elements are few.
    const Restore<D> restore(buffers, stored.power());
    const bool exactly = !std::is_same_v<D, Float32> || restore.near_limit || h.d_v * h.d_k < 4096;
    const auto add_error = [&](i64 v, i64 p, F *row, Squares &error) {
        F x[LANES];
        restore(v, row);
        access.read(v, p, x);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) error.add((x[i] - Words<D>::cast(row[i])) * unit, i);
    };
    report.error = each_tile(buffers, [&](i64 v, i64 p, Squares &error) {
        const F inverse = 1.0f / scale[p];
        F row[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) {
            const F predicted = gain[p] * u[v + i], rest = head[(v + i) * stride + p] * unit - predicted;
            const F q = rounded(rest * inverse), quantised = q * scale[p];
            write_codes(__builtin_convertvector(q, I) + Q::OFFSET, codes + (v + i) * q_stride + p * LANES);
            if (!exactly) error.add(rest - quantised, i);
            row[i] = quantised + predicted;
        }
        if (exactly) add_error(v, p, row, error);
    });
    Q::put(job, h.stored, buffers);
    if (exactly) return true;
    report.error *= double(block);
    if (report.error > 1e-6 * report.signal) return true;
    report.error = each_tile(buffers, [&](i64 v, i64 p, Squares &error) {
        F row[LANES];
        for (int i = 0; i < LANES; ++i)
            row[i] = Q::value(read_codes(codes + (v + i) * q_stride + p * LANES)) * scale[p] + gain[p] * u[v + i];
        add_error(v, p, row, error);
    });
    return true;
}

template <class D, class Q> void compress_pivot(const Job &job) {
    compress_heads<D>(job, [&](const Head<D> &h, const Buffers &buffers, Report &report) {
        return compress_pivot_head<D, Q>(job, h, buffers, report);
    });
}

template <class D, class Q> void restore_pivot(const Job &job) {
    using S = Stored<D, Q>;
    each_head<D, Buffers>(job, [&](const Head<D> &h, const Buffers &buffers, double *) {
        const S stored(job, h.stored);
        const Restore<D> restore(buffers, stored.power());
        const Access<D> access{h};
        const i64 q_stride = buffers.q_stride;
        float *u = buffers.u();
        F *gain = buffers.gain(), *scale = buffers.scale();
        for (i64 v = 0; v < h.d_v; ++v) u[v] = stored.u(v);
        for (i64 p = 0; p < buffers.count; ++p) {
            I gain_codes = {}, scale_codes = {};
            for (i64 k = p * LANES; k < std::min((p + 1) * LANES, h.d_k); ++k) {
                gain_codes[k % LANES] = i32(unpack<S::GAIN_BITS>(stored.gain, k));
                scale_codes[k % LANES] = stored.scale[k];
            }
            gain[p] = S::gain_of(gain_codes), scale[p] = Scale::value(scale_codes);
        }
        const u8 *codes = Q::take(job, h.stored, buffers);
        each_tile(buffers, [&](i64 v, i64 p, Squares &) {
            F row[LANES];
            for (int i = 0; i < LANES; ++i)
                row[i] = Q::value(read_codes(codes + (v + i) * q_stride + p * LANES)) * scale[p] + gain[p] * u[v + i];
            restore(v, row);
            access.template prefetch<true>(v, p);
            access.write(v, p, row);
        });
    });
}

// q of 16 channels, or of those that there are.
inline F read_shorts(const i16 *from, i64 width) {
    Shorts codes = {};
    if (width >= LANES) std::memcpy(&codes, from, sizeof codes);
    else std::memcpy(&codes, from, width * sizeof(i16));
    return __builtin_convertvector(__builtin_convertvector(codes, I), F);
}
inline void write_shorts(F values, i16 *to, i64 width) {
    const Shorts codes = __builtin_convertvector(__builtin_convertvector(values, I), Shorts);
    if (width >= LANES) std::memcpy(to, &codes, sizeof codes);
    else std::memcpy(to, &codes, width * sizeof(i16));
}

// Returns false, with nothing stored, if an element is NaN or infinite.
template <class D> bool compress_int16_head(const Job &job, const Head<D> &h, const Buffers &buffers, Report &report) {
    i16 *q = static_cast<i16 *>(job.stored[0]) + h.stored * h.d_v * h.d_k;
    F *head = buffers.head(), *largest = buffers.gain(), *scale = buffers.scale();
    const i64 stride = buffers.stride;
    Access<D> access{h};
    std::fill_n(largest, buffers.count, F{});
    each_tile(buffers, [&](i64 v, i64 p, Squares &) {
        F row[LANES], most = largest[p];
        access.read(v, p, row);
        access.template prefetch<false>(v, p);
        for (int i = 0; i < LANES; ++i) head[(v + i) * stride + p] = row[i], most = largest_of(row[i], most);
        largest[p] = most;
    });
    if (any(access.seen >= I{} + D::NON_FINITE)) return false;

    const float *by_channel = reinterpret_cast<const float *>(largest);
    report.unit = unit_of(*std::max_element(by_channel, by_channel + h.d_k));
    for (i64 p = 0; p < buffers.count; ++p)
        scale[p] = smaller(larger(largest[p], all(MIN_AMAX)) / 32767.0f, all(job.largest_scale));
    std::copy_n(reinterpret_cast<const float *>(scale), h.d_k, static_cast<float *>(job.stored[1]) + h.stored * h.d_k);
    for (i64 v0 = 0; v0 < h.d_v; v0 += RUN) {
        Squares signal, error;
        for (i64 v = v0; v < std::min(v0 + RUN, h.d_v); ++v)
            for (i64 p = 0; p < buffers.count; ++p) {
                const F x = head[v * stride + p], level = rounded(smaller(larger(x / scale[p], all(-32767.0f)), all(32767.0f)));
                write_shorts(level, q + v * h.d_k + p * LANES, h.d_k - p * LANES);
                signal.add(x * report.unit, int(p));
                error.add((x - Words<D>::cast(level * scale[p])) * report.unit, int(p));
            }
        report.signal += signal.total(), report.error += error.total();
    }
    return true;
}

template <class D> void compress_int16(const Job &job) {
    compress_heads<D>(job, [&](const Head<D> &h, const Buffers &buffers, Report &report) {
        return compress_int16_head(job, h, buffers, report);
    });
}

template <class D> void restore_int16(const Job &job) {
    each_head<D, Buffers>(job, [&](const Head<D> &h, const Buffers &buffers, double *) {
        const i16 *q = static_cast<const i16 *>(job.stored[0]) + h.stored * h.d_v * h.d_k;
        F *scale = buffers.scale();
        std::copy_n(static_cast<const float *>(job.stored[1]) + h.stored * h.d_k, h.d_k, reinterpret_cast<float *>(scale));
        const Access<D> access{h};
        each_tile(buffers, [&](i64 v, i64 p, Squares &) {
            F row[LANES] = {};
            for (i64 i = 0; i < std::min(h.d_v - v, i64(LANES)); ++i)
                row[i] = read_shorts(q + (v + i) * h.d_k + p * LANES, h.d_k - p * LANES) * scale[p];
            access.write(v, p, row);
        });
    });
}

}  // namespace

#define EXPORT(name, D)                                                                                    extern "C" void compress_int16_##name(const Job *job) { compress_int16<D>(*job); }                     extern "C" void restore_int16_##name(const Job *job) { restore_int16<D>(*job); }                       extern "C" void compress_int8_pivot_##name(const Job *job) { compress_pivot<D, EightBits>(*job); }     extern "C" void restore_int8_pivot_##name(const Job *job) { restore_pivot<D, EightBits>(*job); }       extern "C" void compress_int5_pivot_##name(const Job *job) { compress_pivot<D, FiveBits>(*job); }      extern "C" void restore_int5_pivot_##name(const Job *job) { restore_pivot<D, FiveBits>(*job); }

EXPORT(float32, Float32)
EXPORT(bfloat16, BFloat16)
EXPORT(float16, Float16)
