// A head in tiles of 16 rows by 16 channels in float32: a vector holds one row of a tile, and a tile fits the registers. Whatever dtype
// a state has and however it lies in memory, from there on all is the same.

#pragma once

#include "cpu_common.h"

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
inline double sum(F x) {
    double total = 0;
    for (int i = 0; i < 4; ++i) total += double((x[i] + x[i + 4]) + (x[i + 8] + x[i + 12]));
    return total;
}

typedef i8 Bytes16 __attribute__((vector_size(LANES)));
typedef u8 UnsignedBytes16 __attribute__((vector_size(LANES)));
typedef u16 Words16 __attribute__((vector_size(2 * LANES)));

// Compilers make several instructions of these where there is one.
#ifdef __AVX512F__
inline I widen(Bytes16 x) { return I(_mm512_cvtepi8_epi32(__m128i(x))); }
inline I widen(Words16 x) { return I(_mm512_cvtepu16_epi32(__m256i(x))); }
inline Bytes16 low_bytes(I x) { return Bytes16(_mm512_cvtepi32_epi8(__m512i(x))); }
inline I larger(I a, I b) { return I(_mm512_max_epi32(__m512i(a), __m512i(b))); }
#else
inline I widen(Bytes16 x) { return __builtin_convertvector(__builtin_convertvector(x, Shorts), I); }
inline I widen(Words16 x) { return __builtin_convertvector(x, I); }
inline Bytes16 low_bytes(I x) { return Bytes16(__builtin_convertvector(x, UnsignedBytes16)); }
inline I larger(I a, I b) { return a > b ? a : b; }
#endif
inline I widen(I x) { return x; }
// Rounded once or twice: for reports, and where a * b is exact.
#ifdef __AVX512F__
inline F multiply_add(F a, F b, F c) { return F(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c))); }
#else
inline F multiply_add(F a, F b, F c) { return a * b + c; }
#endif
inline F larger(F a, F b) { return a > b ? a : b; }
inline F smaller(F a, F b) { return a < b ? a : b; }
// Numbers that are not negative are ordered as their bits are, and integers are compared in less time.
inline F largest_of(F x, F so_far) { return as_floats(larger(as_bits(magnitude(x)), as_bits(so_far))); }
// A NaN counts as larger than all else.
inline float largest_of(const F *x, i64 count) {
    F most = {};
    for (i64 i = 0; i < count; ++i) most = largest_of(x[i], most);
    u32 found = 0;
    for (int i = 0; i < LANES; ++i) found = std::max(found, bits(most[i]));
    return from_bits(found);
}

// The words of a dtype, 16 at a time, to float32 and back.
template <class D> struct Words {
    using Packed = std::conditional_t<sizeof(typename D::Word) == 4, I, Words16>;

    static I read(const typename D::Word *from) {
        Packed words;
        std::memcpy(&words, from, sizeof words);
        return widen(words);
    }
    // NORMAL: no value is subnormal, which the processor's own rounding would make 0.
    template <bool NORMAL> static void write(F values, typename D::Word *to) {
#ifdef __AVX512BF16__
        if constexpr (NORMAL && std::is_same_v<D, BFloat16>) {
            const __m256bh words = _mm512_cvtneps_pbh(__m512(values));
            std::memcpy(to, &words, sizeof words);
            return;
        }
#endif
        const Packed words = __builtin_convertvector(narrow(values), Packed);
        std::memcpy(to, &words, sizeof words);
    }
    static F load(I words) {
        if constexpr (std::is_same_v<D, Float32>) return as_floats(words);
        else if constexpr (std::is_same_v<D, BFloat16>) return as_floats(words << 16);
        else {
            const I size = as_bits(as_floats((words & 0x7fff) << 13) * 0x1p112f);
            return as_floats((words & 0x8000) << 16 | ((words & D::NON_FINITE) == D::NON_FINITE ? size | 0x7f800000 : size));
        }
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

// Fetches the next head while this one is worked on: a few lines of the cache at a time, as only so many can be under way, and in their
// order in memory, for which it is built.
template <class D> class Ahead {
    const char *at, *row, *end;
    i64 apart, bytes, rows;

public:
    explicit Ahead(const Head<D> &h) : at(reinterpret_cast<const char *>(h.next)), row(at) {
        const i64 size = sizeof(*h.next);
        apart = size * (h.stride_k == 1 ? h.stride_v : h.stride_k), bytes = size * (h.stride_k == 1 ? h.d_k : h.d_v);
        rows = h.stride_k == 1 ? h.d_v : h.stride_v == 1 ? h.d_k : 0;
        if (apart == bytes) bytes *= rows, rows = std::min(rows, i64(1));
        end = at + bytes;
    }
    template <bool WRITE> [[gnu::always_inline]] void fetch(int count) {
        if (end - at < count * LINE) return fetch_slowly<WRITE>(count);
        for (int i = 0; i < count; ++i) __builtin_prefetch(at + i * LINE, WRITE);
        at += count * LINE;
    }

private:
    template <bool WRITE> [[gnu::noinline]] void fetch_slowly(int count) {
        for (; count > 0 && rows > 0; --count) {
            __builtin_prefetch(at, WRITE);
            if ((at += LINE) >= end) --rows, at = row += apart, end = at + bytes;
        }
    }
};

// Reads and writes tiles of a head. Part p of a row is a vector; rows beyond d_v and channels beyond d_k are zeros.
template <class D> class Access {
    using Word = typename D::Word;
    const Head<D> &h;

public:
    const bool streams;  // so that write() need not find in the cache what it will overwrite

    explicit Access(const Head<D> &head) : h(head), streams(h.stride_k == 1 && streamable<D>(h.state, h.stride_v)) {}

    // 16 rows from v on.
    [[gnu::always_inline]] void read(i64 v, i64 p, F *x) const {
        Word copy[LANES * LANES];
        const Tile tile = at(v, p, copy);
        if (tile.copied) gather(v, p, copy);
        for (int i = 0; i < LANES; ++i) x[i] = Words<D>::load(Words<D>::read(tile.words + i * tile.apart));
        if (tile.turned) transpose(x);
    }
    // Calls body(i, x, y) with 16 vectors of the state and what y, 16 rows of a tile, has in the same places. May transpose y.
    template <class Body> [[gnu::always_inline]] void compare(i64 v, i64 p, F *y, Body body) const {
        Word copy[LANES * LANES];
        const Tile tile = at(v, p, copy);
        if (tile.copied) gather(v, p, copy);
        if (tile.turned) transpose(y);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) body(i, Words<D>::load(Words<D>::read(tile.words + i * tile.apart)), y[i]);
    }
    template <bool NORMAL = false> [[gnu::always_inline]] void write(i64 v, i64 p, F *x) const {
        Word copy[LANES * LANES];
        const Tile tile = at(v, p, copy);
        if (tile.turned) transpose(x);
        if (streams && !tile.copied)
            for (int i = 0; i < LANES; ++i) stream_line(&x[i], tile.words + i * tile.apart);
        else
            for (int i = 0; i < LANES; ++i) Words<D>::template write<NORMAL>(x[i], tile.words + i * tile.apart);
        if (tile.copied) scatter(v, p, copy);
    }

private:
    // Where the vectors of a tile lie: in a copy of it, unless it is whole and one of its axes contiguous.
    struct Tile {
        Word *words;
        i64 apart;
        bool turned, copied;
    };

    Tile at(i64 v, i64 p, Word *copy) const {
        const i64 k = p * LANES;
        if (v + LANES > h.d_v || k + LANES > h.d_k || (h.stride_k != 1 && h.stride_v != 1)) return {copy, LANES, false, true};
        Word *words = h.state + v * h.stride_v + k * h.stride_k;
        return h.stride_k == 1 ? Tile{words, h.stride_v, false, false} : Tile{words, h.stride_k, true, false};
    }
    [[gnu::noinline]] void gather(i64 v, i64 p, Word *copy) const {
        std::fill_n(copy, LANES * LANES, Word(0));
        each_element(v, p, copy, [](Word &mine, const Word &theirs) { mine = theirs; });
    }
    [[gnu::noinline]] void scatter(i64 v, i64 p, Word *copy) const {
        each_element(v, p, copy, [](const Word &mine, Word &theirs) { theirs = mine; });
    }
    template <class Body> void each_element(i64 v, i64 p, Word *copy, Body body) const {
        const i64 k = p * LANES, rows = std::min(h.d_v - v, i64(LANES)), channels = std::min(h.d_k - k, i64(LANES));
        for (i64 i = 0; i < rows; ++i)
            for (i64 j = 0; j < channels; ++j) body(copy[i * LANES + j], h.state[(v + i) * h.stride_v + (k + j) * h.stride_k]);
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

// Buffers of one thread: a head in float32, and what belongs to its rows and channels. Parts are worked on in groups that a core's
// nearest cache holds: one group lies after the other, each row by row.
struct Buffers {
    static constexpr int GROUP = 4;
    i64 num_rows, count, q_stride, block;
    Vectors head_, gain_, scale_, signs_, back_, pivot_;
    std::unique_ptr<u8[]> q_, packed;

    Buffers(i64 d_v, i64 d_k)
        : num_rows((d_v + LANES - 1) / LANES * LANES), count((d_k + LANES - 1) / LANES), q_stride(count * LANES),
          block(block_of(d_v)), head_(count * num_rows), gain_(count), scale_(count), signs_(num_rows / LANES), back_(num_rows / LANES),
          pivot_(num_rows / LANES), q_(new u8[num_rows * q_stride]()), packed(new u8[d_v * d_k * 4]) {
        for (i64 v = 0; v < num_rows; ++v) signs()[v] = sign_of(v) / float(block);
    }
    F *group(i64 first_part) const { return head_.vectors() + first_part * num_rows; }
    // Where the vectors of a part begin, and how far they lie apart.
    F *part(i64 p) const { return group(p - p % apart(p)) + p % apart(p); }
    i64 apart(i64 p) const { return p < count / GROUP * GROUP ? GROUP : 1; }
    F *gain() const { return gain_.vectors(); }
    F *scale() const { return scale_.vectors(); }
    float *signs() const { return signs_.floats(); }  // what rows are multiplied by before they are rotated,
    float *back() const { return back_.floats(); }    // and after they were rotated back
    F *pivot() const { return pivot_.vectors(); }
    const float *u() const { return pivot_.floats(); }
    u8 *q() const { return q_.get(); }
};

// A sum of squares for the report, in several parts, as one would wait for itself.
struct Squares {
    static constexpr int COUNT = 4;
    F part[COUNT] = {};

    void add(F x, int turn) { part[turn % COUNT] = multiply_add(x, x, part[turn % COUNT]); }
    F total() const { return (part[0] + part[1]) + (part[2] + part[3]); }
};

// Calls body(first_part, width) for every group of parts. The width is known to the compiler.
template <class Body> [[gnu::always_inline]] inline void each_group(const Buffers &buffers, Body body) {
    i64 p = 0;
    for (; p + Buffers::GROUP <= buffers.count; p += Buffers::GROUP) body(p, std::integral_constant<int, Buffers::GROUP>());
    for (; p < buffers.count; ++p) body(p, std::integral_constant<int, 1>());
}

// Calls body(v, p) for every tile.
template <class Body> [[gnu::always_inline]] inline void each_tile(const Buffers &buffers, Body body) {
    for (i64 v = 0; v < buffers.num_rows; v += LANES)
        for (i64 p = 0; p < buffers.count; ++p) body(v, p);
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
