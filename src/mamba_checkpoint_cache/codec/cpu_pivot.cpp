// The formats of pivot.py fused for the CPU: every layer and head of every slot in one call. Built by cpu_build.py.
//
// A tile is rotated as it is read, and the head kept in float32. Once its pivot is known, gains and scales are found for a few columns
// of tiles at a time, and the tiles quantised. Results are bit for bit those of the definition: sums run in its order, and the
// compiler may neither contract to fused multiply-adds nor assume that there is no NaN. Loops have functions of their own where a
// compiler would otherwise run out of registers.

#include "cpu_pivot_fields.h"

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

// A tile of what was stored, in the rotated basis. Products are exact: they have few bits.
inline void take_tile(const u8 *q, i64 q_stride, F scale, F gain, const float *u, F *row) {
    asm("" : "+r"(q_stride));  // else compilers keep 16 pointers, for which there are no registers
    for (int i = 0; i < ROWS; ++i, q += q_stride) row[i] = multiply_add(read_codes(q), scale, gain * u[i]);
}

// Whether a head is so near 1 that its numbers and their squares stay normal, in units of its power or not. What the definition has in
// those units may then be worked out as it is: a power of two changes no digit, and what it makes subnormal is too small to be stored.
inline bool ordinary(float power) { return power >= 0x1p-40f && power <= 0x1p40f; }

// From the rotated basis, in units of power, to a tile as it is restored.
template <class D, bool ORDINARY> struct Restore {
    // In units of power, all sums of scales and gains are multiples of 2^-34, and none reaches 2^20: what is restored of an ordinary
    // head is neither subnormal nor, in the wider dtypes, beyond the limit.
    static constexpr bool NEAR_LIMIT = !ORDINARY || std::is_same_v<D, Float16>;
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
    // A loop of its own: vectors of what was just stored an element at a time would have to wait for it. Rows beyond d_v remain 0.
    float *rows = reinterpret_cast<float *>(buffers.pivot());
    for (i64 v = 0; v < buffers.num_rows; ++v) rows[v] = channel[v * apart * LANES];
    I squares = {};
    for (i64 v = 0; v < d_v; v += LANES) {
        const i64 count = std::min(d_v - v, i64(LANES));
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
    const float square, power;  // sum of the pivot's squares; the unit of the definition in units of the buffers
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
                codes[i] = round_to_integer(scaled);
                const F rest = scaled - __builtin_convertvector(codes[i], F);
                error[i] = multiply_add(rest, rest, error[i]);
            }
            u8 *q = task.q + v * buffers.q_stride + first * LANES;
            if constexpr (WIDTH == 4) write_four(codes, q, LANES);
            else
                for (int i = 0; i < WIDTH; ++i) write_codes(codes[i], q + i * LANES);
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
                        codes[j] = round_to_integer(head[(v + i) * WIDTH] * inverse);
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
