// The formats of pivot.py fused for the CPU: every layer and head of every slot in one call. Built by cpu_build.py.
//
// A tile is rotated as it is read, and the head kept in float32. Once its pivot is known, gains and scales are found for a few columns
// of tiles at a time, and the tiles quantised. Results are bit for bit those of the definition: sums run in its order, and the
// compiler may neither contract to fused multiply-adds nor assume that there is no NaN. Loops have functions of their own where a
// compiler would otherwise run out of registers.

#include "cpu_tiles.h"

namespace {

// Butterflies between COUNT rows: of neighbours first, or last. One half is done before the other, as registers are few.
template <int COUNT, bool NEAR_FIRST> [[gnu::always_inline]] inline void butterflies(F *row) {
    if constexpr (COUNT > 1) {
        constexpr int HALF = COUNT / 2;
        if constexpr (NEAR_FIRST) butterflies<HALF, true>(row), butterflies<HALF, true>(row + HALF);
#pragma GCC unroll 8
        for (int i = 0; i < HALF; ++i) {
            const F a = row[i], b = row[i + HALF];
            row[i] = a + b, row[i + HALF] = a - b;
        }
        if constexpr (!NEAR_FIRST) butterflies<HALF, false>(row), butterflies<HALF, false>(row + HALF);
    }
}

// Of all blocks in a tile.
template <int BLOCK, bool NEAR_FIRST> [[gnu::always_inline]] inline void rotate_blocks(F *row) {
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i += BLOCK) butterflies<BLOCK, NEAR_FIRST>(row + i);
}

template <bool NEAR_FIRST> [[gnu::always_inline]] inline void rotate(F *row, i64 block) {
    if (block == 16) rotate_blocks<16, NEAR_FIRST>(row);
    else if (block == 8) rotate_blocks<8, NEAR_FIRST>(row);
    else if (block == 4) rotate_blocks<4, NEAR_FIRST>(row);
    else if (block == 2) rotate_blocks<2, NEAR_FIRST>(row);
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
    else if (count > 0) std::memcpy(packed, byte, packed_size<BITS>(count));
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

// A tile of what was stored, in the rotated basis. Products are exact: they have few bits.
inline void take_tile(const u8 *q, i64 q_stride, F scale, F gain, const float *u, F *row) {
    asm("" : "+r"(q_stride));  // else compilers keep 16 pointers, for which there are no registers
    for (int i = 0; i < ROWS; ++i, q += q_stride) row[i] = multiply_add(read_codes(q), scale, gain * u[i]);
}

// Whether a head is so near 1 that neither its numbers nor their squares leave the normal ones, be they in units of its power or not.
// What the definition has in units of the power may then be worked out without: a power of two changes no digit. What is different
// where numbers become subnormal in one of both is too small to be stored.
inline bool ordinary(float power) { return power >= 0x1p-40f && power <= 0x1p40f; }

// From the rotated basis, in units of power, to a tile as it is restored.
template <class D, bool ORDINARY> struct Restore {
    // Scales and gains are multiples of 2^-34, and so is every sum. None reaches 2^20.
    static constexpr bool NORMAL = ORDINARY, NEAR_LIMIT = !ORDINARY || std::is_same_v<D, Float16>;
    const i64 block;
    const float *back;
    const float limit = D::load(typename D::Word(D::NON_FINITE - 1));

    Restore(const Buffers &buffers, float power) : block(buffers.block), back(buffers.back()) {
        for (i64 v = 0; v < buffers.num_rows; ++v) buffers.back()[v] = buffers.signs()[v] * float(block) * power;
    }
    [[gnu::always_inline]] void operator()(i64 v, F *row) const {
        rotate<false>(row, block);
        for (int i = 0; i < ROWS; ++i) row[i] = row[i] * back[v + i];
        if constexpr (NEAR_LIMIT)
            for (int i = 0; i < ROWS; ++i) row[i] = smaller(larger(row[i], all(-limit)), all(limit));
    }
};

// The pivot channel in odd integers; returns the sum of their squares.
template <class S> float find_pivot(const S &stored, const Buffers &buffers, i64 d_v, i64 pivot, float largest, float unit) {
    constexpr int N = S::N;
    const i64 p = pivot / LANES, apart = buffers.apart(p);
    const float *channel = reinterpret_cast<const float *>(buffers.part(p)) + pivot % LANES;
    const float step = largest * unit / N;
    // A loop of its own: vectors of what was just stored an element at a time would have to wait for it.
    float *rows = reinterpret_cast<float *>(buffers.pivot());
    for (i64 v = 0; v < buffers.num_rows; ++v) rows[v] = channel[v * apart * LANES];
    I squares = {};
    for (i64 v = 0; v < buffers.num_rows; v += LANES) {
        const i64 count = std::clamp(d_v - v, i64(0), i64(LANES));
        const F level = buffers.pivot()[v / LANES] * unit / (step > 0 ? step : 1.0f);
        I codes = __builtin_convertvector(level, I);
        codes = between(codes + (__builtin_convertvector(codes, F) > level), -N, N - 1) + N;
        if (count < LANES)
            for (i64 i = count; i < LANES; ++i) codes[i] = 0;
        pack<S::PIVOT_BITS>(stored.pivot + packed_size<S::PIVOT_BITS>(v), codes, count);
        const F u = buffers.pivot()[v / LANES] = S::u_of(codes, count);
        squares += __builtin_convertvector(u * u, I);
    }
    i32 square = 0;
    for (int i = 0; i < LANES; ++i) square += squares[i];
    return float(square);
}

// What it takes to compress a head once its pivot is known.
template <class D, class Q, bool ORDINARY> struct Task {
    using S = Stored<D, Q>;
    const Head<D> &h;
    const Buffers &buffers;
    const S &stored;
    const float square, power;  // of the pivot; of the numbers in the buffers
    u8 *const q;
    Ahead<D> ahead;

    Task(const Head<D> &head, const Buffers &all_buffers, const S &to, float pivot_square, u8 *q_target)
        : h(head), buffers(all_buffers), stored(to), square(pivot_square), power(ORDINARY ? to.power() : 1.0f), q(q_target), ahead(head) {}

    void fetch(int elements) { ahead.template fetch<false>(elements * int(sizeof(typename D::Word))); }
};

// Gains of WIDTH parts from first on, stored and in the buffers. Returns the energy of the head in them.
template <int WIDTH, class D, class Q, bool ORDINARY> [[gnu::noinline]] double find_gains(Task<D, Q, ORDINARY> &task, i64 first) {
    using S = Stored<D, Q>;
    using Gain = typename S::Gain;
    constexpr int TOGETHER = Buffers::GROUP / WIDTH;  // rows
    const Buffers &buffers = task.buffers;
    const F *head = buffers.group(first);
    const float *u = buffers.u();
    F total[WIDTH] = {};
    double energy = 0;
    for (i64 v0 = 0; v0 < buffers.num_rows; v0 += RUN) {
        Squares signal;
        for (i64 v = v0; v < std::min(v0 + RUN, buffers.num_rows); v += TOGETHER) {
            task.fetch(Buffers::GROUP * LANES / 4);
#pragma GCC unroll 4
            for (int i = 0; i < Buffers::GROUP; ++i) {
                const F r = head[v * WIDTH + i];
                total[i % WIDTH] = total[i % WIDTH] + r * u[v + i / WIDTH];
                signal.add(r, i);
            }
        }
        energy += sum(signal.total());
    }
    for (int i = 0; i < WIDTH; ++i) {
        const i64 k = (first + i) * LANES;
        const F exact = total[i] / task.power / task.square;
        const I size = Gain::code_nearest(magnitude(exact) * float(2 * S::N));
        const I codes = size | (exact < 0.0f ? (size > 0) & (1 << Gain::BITS) : I{});
        buffers.gain()[first + i] = S::gain_of(codes);
        pack<S::GAIN_BITS>(task.stored.gain + packed_size<S::GAIN_BITS>(k), codes, task.h.d_k - k);
    }
    return energy;
}

// Subtracts what is predicted, and finds the scales of what is left, stored and in the buffers.
template <int WIDTH, class D, class Q, bool ORDINARY> [[gnu::noinline]] void find_scales(Task<D, Q, ORDINARY> &task, i64 first) {
    const Buffers &buffers = task.buffers;
    F *head = buffers.group(first);
    const float *u = buffers.u();
    F most[WIDTH] = {}, gain[WIDTH];
    for (int i = 0; i < WIDTH; ++i) gain[i] = buffers.gain()[first + i] * task.power;
    for (i64 v = 0; v < buffers.num_rows; ++v) {
        task.fetch(WIDTH * LANES / 4);
        __builtin_prefetch(task.q + v * buffers.q_stride + first * LANES, 1, 2);
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; ++i) {
            const F rest = head[v * WIDTH + i] = multiply_add(all(-u[v]), gain[i], head[v * WIDTH + i]);
            most[i] = largest_of(rest, most[i]);
        }
    }
    for (int i = 0; i < WIDTH; ++i) {
        const i64 k = (first + i) * LANES;
        const I codes = Scale::code_up(most[i] / task.power / float(Q::LEVELS));
        buffers.scale()[first + i] = Scale::value(codes);
        pack<8>(task.stored.scale + k, codes, task.h.d_k - k);
    }
}

// Returns the energy of the error in the rotated basis.
template <int WIDTH, class D, class Q, bool ORDINARY> [[gnu::noinline]] double quantise(Task<D, Q, ORDINARY> &task, i64 first) {
    const Buffers &buffers = task.buffers;
    const F *head = buffers.group(first);
    F inverse[WIDTH];
    for (int i = 0; i < WIDTH; ++i) inverse[i] = 1.0f / buffers.scale()[first + i] / task.power;
    double energy = 0;
    for (i64 v0 = 0; v0 < buffers.num_rows; v0 += RUN) {
        F error[WIDTH] = {};
        for (i64 v = v0; v < std::min(v0 + RUN, buffers.num_rows); ++v) {
            task.fetch(WIDTH * LANES / 2);
            I codes[WIDTH];
            for (int i = 0; i < WIDTH; ++i) {
                const F scaled = head[v * WIDTH + i] * inverse[i];
                codes[i] = nearest(scaled);
                const F rest = scaled - __builtin_convertvector(codes[i], F);
                error[i] = multiply_add(rest, rest, error[i]);
            }
            u8 *q = task.q + v * buffers.q_stride + first * LANES;
            if constexpr (WIDTH == 4) write_four(codes, q, LANES);
            else write_codes(codes[0], q);
        }
        for (int i = 0; i < WIDTH; ++i) {
            const F s = buffers.scale()[first + i] * task.power;
            energy += sum(error[i] * (s * s));
        }
    }
    return energy;
}

// Adds how far a tile in the rotated basis is from the state once it is restored.
template <class D, class Q, bool ORDINARY> struct Measure {
    const Access<D> access;
    const Restore<D, ORDINARY> restore;
    const float unit;

    explicit Measure(const Task<D, Q, ORDINARY> &task)
        : access(task.h), restore(task.buffers, task.stored.power()), unit(task.power / task.stored.power()) {}

    [[gnu::always_inline]] void operator()(i64 v, i64 p, F *row, Squares &error) const {
        restore(v, row);
        access.compare(v, p, row, [&](int i, F x, F y) {
            const F rest = x - Words<D>::template cast<ORDINARY>(y);
            error.add(ORDINARY ? rest : rest * unit, i);
        });
    }
};

// Returns the energy of the error of what will be restored.
template <int WIDTH, class D, class Q, bool ORDINARY>
[[gnu::noinline]] double quantise_and_measure(Task<D, Q, ORDINARY> &task, const Measure<D, Q, ORDINARY> &measure, i64 first) {
    const Buffers &buffers = task.buffers;
    const float *u = buffers.u();
    double energy = 0;
    for (i64 p = first; p < first + WIDTH; ++p) {
        const F *head = buffers.group(first) + (p - first);
        const F s = buffers.scale()[p], gain = buffers.gain()[p], inverse = 1.0f / s / task.power;
        for (i64 v0 = 0; v0 < buffers.num_rows; v0 += RUN) {
            Squares error;
            for (i64 v = v0; v < std::min(v0 + RUN, buffers.num_rows); v += ROWS) {
                F row[ROWS];
                task.fetch(ROWS * LANES / 2);
#pragma GCC unroll 4
                for (int first_row = 0; first_row < ROWS; first_row += 4) {
                    I codes[4];
                    for (int j = 0; j < 4; ++j) {
                        const i64 i = first_row + j;
                        codes[j] = nearest(head[(v + i) * WIDTH] * inverse);
                        row[i] = multiply_add(__builtin_convertvector(codes[j], F), s, gain * u[v + i]);
                    }
                    write_four(codes, task.q + (v + first_row) * buffers.q_stride + p * LANES, buffers.q_stride);
                }
                measure(v, p, row, error);
            }
            energy += sum(error.total());
        }
    }
    return energy;
}

// The same of what was quantised before.
template <class D, class Q, bool ORDINARY>
[[gnu::noinline]] double measure_again(const Task<D, Q, ORDINARY> &task, const Measure<D, Q, ORDINARY> &measure) {
    const Buffers &buffers = task.buffers;
    double energy = 0;
    each_tile(buffers, [&](i64 v, i64 p) {
        F row[ROWS];
        Squares error;
        take_tile(task.q + v * buffers.q_stride + p * LANES, buffers.q_stride, buffers.scale()[p], buffers.gain()[p], buffers.u() + v, row);
        measure(v, p, row, error);
        energy += sum(error.total());
    });
    return energy;
}

template <class D, class Q, bool ORDINARY> void quantise_head(Task<D, Q, ORDINARY> task, Report &report) {
    const Measure<D, Q, ORDINARY> measure(task);
    // A rotation keeps sums of squares, so that the error may be measured before it is undone. What is not known then is how the
    // result will be clamped, and rounded: in float32 that is next to nothing, unless the error itself is, or the elements are few.
    const bool exactly = !std::is_same_v<D, Float32> || !ORDINARY || task.h.d_v * task.h.d_k < 4096;
    each_group(task.buffers, [&](i64 first, auto width) {
        report.signal += find_gains<width>(task, first);
        find_scales<width>(task, first);
        report.error += exactly ? quantise_and_measure<width>(task, measure, first) : quantise<width>(task, first);
    });
    report.unit = measure.unit;
    report.signal *= double(task.buffers.block);
    if (!exactly) report.error *= double(task.buffers.block);
    if (!exactly && report.error <= 1e-6 * report.signal) report.error = measure_again(task, measure);
}

// Rotates the head into the buffers, and returns the largest magnitude in it; by_channel has those of the k-channels.
template <class D> [[gnu::noinline]] float rotate_head(const Access<D> &access, const Buffers &buffers, F *by_channel) {
    const float *sign = buffers.signs();
    const i64 block = buffers.block;
    std::fill_n(by_channel, buffers.count, F{});
    for (i64 v = 0; v < buffers.num_rows; v += ROWS)
        each_group(buffers, [&](i64 first, auto width) {
            for (i64 p = first; p < first + width; ++p) {
                F row[ROWS], most = by_channel[p], *at = buffers.group(first) + v * width + (p - first);
                access.read(v, p, row);
                for (int i = 0; i < ROWS; ++i) row[i] = row[i] * sign[v + i];
                rotate<true>(row, block);
#pragma GCC unroll 16
                for (int i = 0; i < ROWS; ++i) at[i * width] = row[i], most = largest_of(row[i], most);
                by_channel[p] = most;
            }
        });
    return largest_of(by_channel, buffers.count);
}

// Returns false, with nothing of use stored, if an element is NaN or infinite.
template <class D, class Q> bool compress_pivot_head(const Job &job, const Head<D> &h, const Buffers &buffers, Report &report) {
    const Stored<D, Q> stored(job, h.stored);
    const float most = rotate_head(Access<D>(h), buffers, buffers.gain());
    if (!std::isfinite(most)) return false;

    const float *by_channel = reinterpret_cast<const float *>(buffers.gain());
    const i64 pivot = std::find(by_channel, by_channel + h.d_k, most) - by_channel;
    *stored.exponent = u8(std::clamp(bits(most) >> 23, 1u, 253u));
    const float unit = from_bits((254u - *stored.exponent) << 23);
    const float square = find_pivot(stored, buffers, h.d_v, pivot, most, unit);
    u8 *q = Q::target(job, h.stored, buffers);
    if (ordinary(stored.power())) {
        quantise_head(Task<D, Q, true>(h, buffers, stored, square, q), report);
    } else {
        for (i64 i = 0; i < buffers.num_rows * buffers.count; ++i) buffers.group(0)[i] *= unit;
        quantise_head(Task<D, Q, false>(h, buffers, stored, square, q), report);
    }
    Q::put(job, h.stored, buffers);
    return true;
}

template <class D, class Q> void compress_pivot(const Job &job) {
    compress_heads<D>(job, [&](const Head<D> &h, const Buffers &buffers, Report &report) {
        return compress_pivot_head<D, Q>(job, h, buffers, report);
    });
}

constexpr i64 AHEAD = 4096;  // how far before its use q is fetched, in bytes

template <class D, bool ORDINARY> [[gnu::noinline]] void restore_tiles(const Head<D> &h, const Buffers &buffers, const u8 *q, float power) {
    const Restore<D, ORDINARY> restore(buffers, power);
    Access<D> access(h);
    Ahead<D> ahead(h);
    const i64 q_stride = buffers.q_stride;
    each_tile(buffers, [&](i64 v, i64 p) {
        F row[ROWS];
        take_tile(q + v * q_stride + p * LANES, q_stride, buffers.scale()[p], buffers.gain()[p], buffers.u() + v, row);
        restore(v, row);
        if (!access.streams) ahead.template fetch<true>(ROWS * LANES * sizeof(typename D::Word));
        for (i64 i = 0; i < ROWS * LANES; i += LINE) __builtin_prefetch(q + v * q_stride + p * ROWS * LANES + i + AHEAD);
        access.template write<ORDINARY>(v, p, row);
    });
}

template <class D, class Q> void restore_pivot(const Job &job) {
    using S = Stored<D, Q>;
    each_head<D, Buffers>(job, [&](const Head<D> &h, const Buffers &buffers, double *) {
        const S stored(job, h.stored);
        for (i64 v = 0; v < buffers.num_rows; v += LANES) {
            const i64 count = h.d_v - v;
            buffers.pivot()[v / LANES] = S::u_of(unpack<S::PIVOT_BITS>(stored.pivot + packed_size<S::PIVOT_BITS>(v), count), count);
        }
        for (i64 p = 0; p < buffers.count; ++p) {
            const i64 k = p * LANES, count = h.d_k - k;
            buffers.gain()[p] = S::gain_of(unpack<S::GAIN_BITS>(stored.gain + packed_size<S::GAIN_BITS>(k), count));
            buffers.scale()[p] = Scale::value(unpack<8>(stored.scale + k, count));
        }
        const u8 *q = Q::take(job, h.stored, buffers);
        const auto tiles = ordinary(stored.power()) ? restore_tiles<D, true> : restore_tiles<D, false>;
        tiles(h, buffers, q, stored.power());
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
