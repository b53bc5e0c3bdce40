// What the formats of pivot.py store of a head, in bits and bytes.

#pragma once

#include "cpu_tiles.h"

namespace {

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

inline F read_codes(const u8 *from) { Bytes b; std::memcpy(&b, from, LANES); return __builtin_convertvector(widen(b), F); }
inline void write_codes(I codes, u8 *to) { const Bytes b = low_bytes(codes); std::memcpy(to, &b, LANES); }
// Four vectors of codes that fit a byte, to places so many bytes apart.
[[gnu::always_inline]] inline void write_four(const I *codes, u8 *to, i64 apart) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i *c = reinterpret_cast<const __m256i *>(codes);
    const __m256i halves = _mm256_packs_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (apart == LANES) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), bytes);
    } else {
        const __m128i first = _mm256_castsi256_si128(bytes), last = _mm256_extracti128_si256(bytes, 1);
        _mm_storel_pi(reinterpret_cast<__m64 *>(to), _mm_castsi128_ps(first));
        _mm_storeh_pi(reinterpret_cast<__m64 *>(to + apart), _mm_castsi128_ps(first));
        _mm_storel_pi(reinterpret_cast<__m64 *>(to + 2 * apart), _mm_castsi128_ps(last));
        _mm_storeh_pi(reinterpret_cast<__m64 *>(to + 3 * apart), _mm_castsi128_ps(last));
    }
#else
    for (int i = 0; i < 4; ++i) write_codes(codes[i], to + i * apart);
#endif
}

// Codes of 2, 4 or 8 bits in bytes, the first in the lowest bits.
template <int BITS> inline i64 packed_size(i64 count) { return (count * BITS + 7) / 8; }
// A vector of codes, or those that there are; the others must be 0.
template <int BITS> inline void pack(u8 *packed, I codes, i64 count) {
    constexpr int PER_BYTE = 8 / BITS;
    u8 code[LANES], byte[LANES] = {};
    write_codes(codes, code);
    for (int i = 0; i < LANES; ++i) byte[i / PER_BYTE] |= u8(code[i] << (i % PER_BYTE * BITS));
    if (count >= LANES) std::memcpy(packed, byte, packed_size<BITS>(LANES));
    else std::memcpy(packed, byte, packed_size<BITS>(count));
}
template <int BITS> inline I unpack(const u8 *packed, i64 count) {
    constexpr int PER_BYTE = 8 / BITS;
    u8 byte[LANES] = {};
    if (count >= LANES) std::memcpy(byte, packed, packed_size<BITS>(LANES));
    else if (count > 0) std::memcpy(byte, packed, packed_size<BITS>(count));
    I codes;
    for (int i = 0; i < LANES; ++i) codes[i] = byte[i / PER_BYTE] >> (i % PER_BYTE * BITS) & ((1 << BITS) - 1);
    return codes;
}

// How q is stored: a byte each, in two's complement.
struct EightBits {
    static constexpr int LEVELS = 127, TENSORS = 1;

    static u8 *stored(const Job &job, i64 head) { return static_cast<u8 *>(job.stored[0]) + head * job.d_v * job.d_k; }
    static bool in_place(const Job &job, const Buffers &buffers) { return job.d_k == buffers.q_stride && job.d_v == buffers.num_rows; }
    // Where q is to be written, before put().
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

private:
    static void copy_rows(const u8 *from, i64 from_stride, u8 *to, i64 to_stride, const Job &job) {
        for (i64 v = 0; v < job.d_v; ++v) std::copy_n(from + v * from_stride, job.d_k, to + v * to_stride);
    }
};

// How q + 16 is stored: five bits, four of them two rows to a byte and the fifth eight rows to a byte.
struct FiveBits {
    static constexpr int LEVELS = 15, TENSORS = 2;

    static u8 *low(const Job &job, i64 head) { return static_cast<u8 *>(job.stored[0]) + head * packed_size<4>(job.d_v) * job.d_k; }
    static u8 *high(const Job &job, i64 head) { return static_cast<u8 *>(job.stored[1]) + head * packed_size<1>(job.d_v) * job.d_k; }
    static u8 *target(const Job &, i64, const Buffers &buffers) { return buffers.q(); }
    static void put(const Job &job, i64 head, const Buffers &buffers) {
        std::fill(buffers.q() + job.d_v * buffers.q_stride, buffers.q() + buffers.num_rows * buffers.q_stride, u8(-16));
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

private:
    static void pair(const u8 *__restrict a, const u8 *__restrict b, i64 count, u8 *__restrict to) {
        for (i64 k = 0; k < count; ++k) to[k] = u8((a[k] & 15) | b[k] << 4);
    }
    static void collect(const u8 *const *row, i64 count, u8 *__restrict to) {
        std::fill_n(to, count, u8(0));
        for (int i = 0; i < 8; ++i) add(row[i], i, count, to);
    }
    static void add(const u8 *__restrict from, int shift, i64 count, u8 *__restrict to) {
        for (i64 k = 0; k < count; ++k) to[k] |= u8((from[k] >> 7 ^ 1) << shift);
    }
    static void join(const u8 *__restrict from_low, const u8 *__restrict from_high, int low_shift, int high_shift, i64 count, u8 *__restrict to) {
        for (i64 k = 0; k < count; ++k) to[k] = u8((from_low[k] >> low_shift & 15) + ((from_high[k] >> high_shift & 1) << 4) - 16);
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
    // u of LANES rows, or of those that there are, and zeros.
    static F u_of(I codes, i64 count) {
        F u = __builtin_convertvector(2 * (codes - N) + 1, F);
        for (i64 i = std::max(count, i64(0)); i < LANES; ++i) u[i] = 0;
        return u;
    }
    static F gain_of(I codes) {
        const F size = Gain::value(codes & Gain::LARGEST) / float(2 * N);
        return as_floats(as_bits(size) | codes >> Gain::BITS << 31);
    }
};

}  // namespace
