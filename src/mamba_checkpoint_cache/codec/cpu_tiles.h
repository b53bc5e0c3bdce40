// A head in tiles of 16 rows by 16 channels in float32: a vector holds one row of a tile, and a tile fits the registers. Whatever dtype
// a state has and however it lies in memory, from there on all is the same.

#pragma once

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

}  // namespace
