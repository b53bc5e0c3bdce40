// The formats of pivot.py fused for the CPU: every layer and head of every slot in one call. Built by cpu_build.py.
//
// A tile is rotated as it is read, and the head kept in float32. Once its pivot is known, gains and scales are found for a few columns
// of tiles at a time, and the tiles quantised. Results are bit for bit those of the definition: sums run in its order, and the
// compiler may neither contract to fused multiply-adds nor assume that there is no NaN.

#include "cpu_tiles.h"

namespace {

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

}  // namespace

#define EXPORT(name, D)                                                                                \
    extern "C" void compress_int8_pivot_##name(const Job *job) { compress_pivot<D, EightBits>(*job); } \
    extern "C" void restore_int8_pivot_##name(const Job *job) { restore_pivot<D, EightBits>(*job); }   \
    extern "C" void compress_int5_pivot_##name(const Job *job) { compress_pivot<D, FiveBits>(*job); }  \
    extern "C" void restore_int5_pivot_##name(const Job *job) { restore_pivot<D, FiveBits>(*job); }

EXPORT(float32, Float32)
EXPORT(bfloat16, BFloat16)
EXPORT(float16, Float16)
