// Vectors as wide as the processor's registers, and what compilers don't know to make of them.

#pragma once

#include "cpu_common.h"

namespace {

// As wide as the processor's registers: of wider vectors, compilers make arrays in memory.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

template <class T> struct VectorOf { typedef T Type __attribute__((vector_size(sizeof(T) * LANES))); };
using F = VectorOf<float>::Type;
using I = VectorOf<i32>::Type;
using Unsigned = VectorOf<u32>::Type;
using Shorts = VectorOf<i16>::Type;
using UnsignedShorts = VectorOf<u16>::Type;
using Bytes = VectorOf<i8>::Type;
using UnsignedBytes = VectorOf<u8>::Type;

inline F all(float x) { return F{} + x; }
inline I as_bits(F x) { I b; std::memcpy(&b, &x, sizeof b); return b; }
inline F as_floats(I b) { F x; std::memcpy(&x, &b, sizeof x); return x; }
inline F magnitude(F x) { return as_floats(as_bits(x) & 0x7fffffff); }
inline I between(I x, i32 low, i32 high) { x = x < low ? I{} + low : x; return x > high ? I{} + high : x; }
// Half to even; the magnitude must be under 2^22.
inline I round_to_integer(F x) {
#if defined(__AVX512F__)
    return I(_mm512_cvtps_epi32(__m512(x)));
#elif defined(__AVX2__)
    return I(_mm256_cvtps_epi32(__m256(x)));
#else
    return as_bits(x + ROUND) - as_bits(all(ROUND));
#endif
}
inline double sum(F x) {
    double total = 0;
    for (int i = 0; i < LANES; ++i) total += x[i];
    return total;
}

// Compilers make several instructions of these where there is one.
#if defined(__AVX512F__)
inline I widen(Bytes x) { return I(_mm512_cvtepi8_epi32(__m128i(x))); }
inline I widen(UnsignedShorts x) { return I(_mm512_cvtepu16_epi32(__m256i(x))); }
inline I widen(Shorts x) { return I(_mm512_cvtepi16_epi32(__m256i(x))); }
inline Bytes low_bytes(I x) { return Bytes(_mm512_cvtepi32_epi8(__m512i(x))); }
inline Shorts low_shorts(I x) { return Shorts(_mm512_cvtepi32_epi16(__m512i(x))); }
inline I larger(I a, I b) { return I(_mm512_max_epi32(__m512i(a), __m512i(b))); }
#elif defined(__AVX2__)
inline I widen(Bytes x) { return I(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(i64(x)))); }
inline I widen(UnsignedShorts x) { return I(_mm256_cvtepu16_epi32(__m128i(x))); }
inline I widen(Shorts x) { return I(_mm256_cvtepi16_epi32(__m128i(x))); }
// What is kept of an element is brought together in either half of a register first.
inline Bytes low_bytes(I x) {
    const __m256i first = _mm256_setr_epi32(0x0c080400, -1, -1, -1, 0x0c080400, -1, -1, -1);
    const __m256i halves = _mm256_shuffle_epi8(__m256i(x), first);
    return Bytes(_mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1))));
}
inline Shorts low_shorts(I x) {
    const __m256i first = _mm256_setr_epi32(0x05040100, 0x0d0c0908, -1, -1, 0x05040100, 0x0d0c0908, -1, -1);
    const __m256i halves = _mm256_shuffle_epi8(__m256i(x), first);
    return Shorts(_mm_unpacklo_epi64(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
inline I larger(I a, I b) { return I(_mm256_max_epi32(__m256i(a), __m256i(b))); }
#else
inline I widen(Bytes x) { return __builtin_convertvector(__builtin_convertvector(x, Shorts), I); }
inline I widen(UnsignedShorts x) { return __builtin_convertvector(x, I); }
inline I widen(Shorts x) { return __builtin_convertvector(x, I); }
inline Bytes low_bytes(I x) { return Bytes(__builtin_convertvector(x, UnsignedBytes)); }
inline Shorts low_shorts(I x) { return Shorts(__builtin_convertvector(x, UnsignedShorts)); }
inline I larger(I a, I b) { return a > b ? a : b; }
#endif
inline I widen(I x) { return x; }
// Into the upper halves.
inline I widen_up(UnsignedShorts x) {
#ifdef __AVX512BW__
    const __m512i places = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16);
    return I(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, places, _mm512_castsi256_si512(__m256i(x))));
#else
    return widen(x) << 16;
#endif
}
// Rounded once or twice: for reports, and where a * b is exact.
#if defined(__AVX512F__)
inline F multiply_add(F a, F b, F c) { return F(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c))); }
#elif defined(__FMA__)
inline F multiply_add(F a, F b, F c) { return F(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c))); }
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

// The words of a dtype, a vector at a time, to float32 and back.
template <class D> struct Words {
    using Packed = std::conditional_t<sizeof(typename D::Word) == 4, I, UnsignedShorts>;

    static F read(const typename D::Word *from) {
        Packed words;
        std::memcpy(&words, from, sizeof words);
        if constexpr (std::is_same_v<D, BFloat16>) return as_floats(widen_up(words));
        else return load(widen(words));
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
        const I words = narrow(values);
        if constexpr (sizeof(typename D::Word) == 4) return void(std::memcpy(to, &words, sizeof words));
        const Shorts low = low_shorts(words);
        std::memcpy(to, &low, sizeof low);
    }
    // Two vectors, which with AVX2 takes less time than one after the other.
    template <bool NORMAL> [[gnu::always_inline]] static void write_two(F a, F b, typename D::Word *to_a, typename D::Word *to_b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
        if constexpr (sizeof(typename D::Word) == 2) {
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(__m256i(narrow(a)), __m256i(narrow(b))), 0xd8);
            _mm_storeu_si128(reinterpret_cast<__m128i *>(to_a), _mm256_castsi256_si128(both));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(to_b), _mm256_extracti128_si256(both, 1));
            return;
        }
#endif
        write<NORMAL>(a, to_a), write<NORMAL>(b, to_b);
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
        else if constexpr (std::is_same_v<D, BFloat16>) return I(Unsigned(round_to_16(b)) >> 16);
        else {
            const I sign = b >> 16 & 0x8000, size = b & 0x7fffffff;
            const I normal = (size + 0xfff + (size >> 13 & 1) - (112 << 23)) >> 13;
            const I subnormal = as_bits(as_floats(size) + 0.5f) - as_bits(all(0.5f));
            return sign | (size < 113 << 23 ? subnormal : normal);
        }
    }
    static I round_to_16(I b) { return b + 0x7fff + (b >> 16 & 1); }  // half to even, on the upper 16 bits
    // What the dtype makes of float32 values.
    template <bool NORMAL> static F cast(F values) {
#ifdef __AVX512BF16__
        if constexpr (NORMAL && std::is_same_v<D, BFloat16>)
            return as_floats(widen_up(UnsignedShorts(__m256i(_mm512_cvtneps_pbh(__m512(values))))));
#endif
        if constexpr (std::is_same_v<D, Float32>) return values;
        else if constexpr (std::is_same_v<D, BFloat16>) return as_floats(round_to_16(as_bits(values)) & ~0xffff);
        else return load(narrow(values));
    }
};

}  // namespace
