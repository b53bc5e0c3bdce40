// int8 fused for the CPU, and the report of none: every layer and head of every slot in one call. Built by cpu_build.py.
//
// A head [d_v, d_k] is read from memory once, for its largest magnitudes. The second sweep, which quantises it and measures the
// error, finds it in the cache, and meanwhile fetches the next head. Results are bit for bit those of reference.py: divisions
// stay divisions, and the compiler may neither contract to fused multiply-adds nor assume that there is no NaN.

#include "cpu_common.h"

namespace {

constexpr int WIDE = 64, NARROW = 16;  // elements worked on together

// One head, and where its bytes and scales are stored.
template <class D> struct Int8Head : Head<D> {
    i8 *q;
    typename D::Scale::Word *scale;

    Int8Head(const Job &job, const Head<D> &head)
        : Head<D>(head), q(static_cast<i8 *>(job.stored[0]) + head.stored * head.d_v * head.d_k),
          scale(static_cast<typename D::Scale::Word *>(job.stored[1]) + head.stored * head.d_k) {}

    // With few channels, several adjacent rows are taken for one: vectors are wide. Channel k then recurs every d_k columns.
    Int8Head folded() const {
        Int8Head wide = *this;
        const i64 rows = WIDE / this->d_k;
        if (this->stride_k != 1 || this->stride_v != this->d_k || WIDE % this->d_k || rows == 0 || this->d_v % rows) return wide;
        wide.d_v /= rows, wide.d_k *= rows, wide.stride_v *= rows;
        return wide;
    }
};

// Buffers of one thread, each as large as a head or its channels can need.
template <class D> struct Scratch {
    using Word = typename D::Word;
    std::unique_ptr<Word[]> packed, magnitude;
    std::unique_ptr<float[]> scale;
    std::unique_ptr<i8[]> turned;

    Scratch(i64 d_v, i64 d_k)
        : packed(new Word[d_v * d_k]), magnitude(new Word[d_k + WIDE]), scale(new float[d_k + WIDE]), turned(new i8[d_v * d_k]) {}
};

typedef i8 Bytes __attribute__((vector_size(16)));

inline void transpose_block(const i8 *from, i64 from_stride, i8 *to, i64 to_stride) {
    Bytes row[16];
    for (int i = 0; i < 16; ++i) std::memcpy(&row[i], from + i * from_stride, 16);
    transpose<16>(row);
    for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &row[i], 16);
}

// from [num_rows, num_columns] to [num_columns, num_rows], both contiguous.
void transpose(const i8 *from, i64 num_rows, i64 num_columns, i8 *to) {
    const i64 rows = num_rows / 16 * 16, columns = num_columns / 16 * 16;
    for (i64 c = 0; c < columns; c += 16)
        for (i64 r = 0; r < rows; r += 16)
            transpose_block(from + r * num_columns + c, num_columns, to + c * num_rows + r, num_rows);
    for (i64 c = 0; c < num_columns; ++c)
        for (i64 r = c < columns ? rows : 0; r < num_rows; ++r) to[c * num_rows + r] = from[r * num_columns + c];
}

template <class D> inline float scale_of(typename D::Word magnitude, float largest_scale) {
    const float rounded = D::Scale::load(D::Scale::store(std::max(D::load(magnitude), MIN_AMAX) / 127.0f));
    return std::min(rounded, largest_scale);
}

// The quantised element in the low byte of what is returned.
template <class D> inline u32 quantise(typename D::Word word, float scale, float unit, float &signal, float &error) {
    const float x = D::load(word);
    const float rounded = std::max(std::min(x / scale, 127.0f), -127.0f) + ROUND;
    const float restored = D::load(D::store((rounded - ROUND) * scale));
    const float s = x * unit, e = (x - restored) * unit;
    signal += s * s;
    error += e * e;
    return bits(rounded);
}

// Calls step(start, width) until count elements are covered. Loops as long as a width that the compiler knows become vectors.
template <class Step> [[gnu::always_inline]] inline void in_steps(i64 count, Step step) {
    i64 start = 0;
    for (; start + WIDE <= count; start += WIDE) step(start, std::integral_constant<int, WIDE>());
    for (; start + NARROW <= count; start += NARROW) step(start, std::integral_constant<int, NARROW>());
    if (start < count) step(start, int(count - start));
}

// Elements that lie side by side, of as many channels (STEP 1) or of one (STEP 0). Two loops: in one, GCC would take all vectors
// as short as those of bytes.
template <class D, int STEP, class Width>
[[gnu::always_inline]] inline void quantise_run(const typename D::Word *__restrict x, const float *__restrict scale, float unit,
                                                Width width, i8 *__restrict q, float *signal, float *error) {
    u32 rounded[WIDE];
    for (int i = 0; i < width; ++i) rounded[i] = quantise<D>(x[i], scale[i * STEP], unit, signal[i], error[i]);
    for (int i = 0; i < width; ++i) q[i] = i8(rounded[i]);
}

// Where d_k is contiguous: some channels at a time.
template <class D> void quantise_rows(const Int8Head<D> &h, const Scratch<D> &scratch, Report &report) {
    in_steps(h.d_k, [&](i64 first_k, auto width) {
        const float *scale = scratch.scale.get() + first_k;
        for (i64 v0 = 0; v0 < h.d_v; v0 += RUN) {
            float signal[WIDE] = {}, error[WIDE] = {};
            for (i64 v = v0; v < std::min(v0 + RUN, h.d_v); ++v) {
                const i64 at = v * h.stride_v + first_k;
                quantise_run<D, 1>(h.state + at, scale, report.unit, width, h.q + v * h.d_k + first_k, signal, error);
                for (int k = 0; k < width; k += 64 / sizeof(*h.next)) __builtin_prefetch(h.next + at + k, 0, 2);
            }
            report.add(signal, error, width);
        }
    });
}

// Where d_v is contiguous: channel by channel, and the bytes are turned at the end.
template <class D> void quantise_columns(const Int8Head<D> &h, const Scratch<D> &scratch, Report &report) {
    for (i64 k0 = 0; k0 < h.d_k; k0 += NARROW) {
        float signal[WIDE] = {}, error[WIDE] = {};
        for (i64 k = k0; k < std::min(k0 + NARROW, h.d_k); ++k) {
            in_steps(h.d_v, [&](i64 first_v, auto width) {
                const i64 at = k * h.stride_k + first_v;
                i8 *q = scratch.turned.get() + k * h.d_v + first_v;
                quantise_run<D, 0>(h.state + at, &scratch.scale[k], report.unit, width, q, signal, error);
                for (int v = 0; v < width; v += 64 / sizeof(*h.next)) __builtin_prefetch(h.next + at + v, 0, 2);
            });
        }
        report.add(signal, error, WIDE);
    }
    transpose(scratch.turned.get(), h.d_k, h.d_v, h.q);
}

// The largest magnitude of every channel; returns the largest of all. Floats of one sign are ordered as their bits are.
template <class D> typename D::Word find_magnitudes(const Int8Head<D> &h, typename D::Word *__restrict magnitude) {
    using Word = typename D::Word;
    std::fill_n(magnitude, h.d_k, Word(0));
    if (h.stride_k == 1)
        for (i64 v = 0; v < h.d_v; ++v)
            in_steps(h.d_k, [&](i64 k, auto width) {
                const Word *__restrict x = h.state + v * h.stride_v + k;
                for (int i = 0; i < width; ++i) magnitude[k + i] = std::max(magnitude[k + i], Word(x[i] & D::MAGNITUDE));
            });
    else
        for (i64 k = 0; k < h.d_k; ++k) {
            const Word *__restrict x = h.state + k * h.stride_k;
            Word largest = 0;
            for (i64 v = 0; v < h.d_v; ++v) largest = std::max(largest, Word(x[v] & D::MAGNITUDE));
            magnitude[k] = largest;
        }
    Word largest = 0;
    for (i64 k = 0; k < h.d_k; ++k) largest = std::max(largest, magnitude[k]);
    return largest;
}

// Returns false, with nothing stored, if neither axis is contiguous or an element is NaN or infinite.
template <class D> bool compress_head(const Int8Head<D> &h, const Scratch<D> &scratch, float largest_scale, Report &report) {
    if (h.stride_k != 1 && h.stride_v != 1) return false;
    const Int8Head<D> wide = h.folded();
    typename D::Word *magnitude = scratch.magnitude.get();
    const typename D::Word largest = find_magnitudes(wide, magnitude);
    if (largest >= D::NON_FINITE) return false;
    report.unit = unit_of(D::load(largest));
    for (i64 k = h.d_k; k < wide.d_k; ++k) magnitude[k % h.d_k] = std::max(magnitude[k % h.d_k], magnitude[k]);
    for (i64 k = 0; k < h.d_k; ++k) {
        scratch.scale[k] = scale_of<D>(magnitude[k], largest_scale);
        h.scale[k] = D::Scale::store(scratch.scale[k]);
    }
    for (i64 k = h.d_k; k < wide.d_k; ++k) scratch.scale[k] = scratch.scale[k - h.d_k];
    if (h.stride_k == 1) quantise_rows(wide, scratch, report);
    else quantise_columns(h, scratch, report);
    return true;
}

// What compress_head leaves: an ordinary copy of the head, with zeros for what is not finite, is compressed.
template <class D> void compress_packed(Int8Head<D> h, const Scratch<D> &scratch, float largest_scale, Report &report) {
    typename D::Word *packed = scratch.packed.get();
    for (i64 v = 0; v < h.d_v; ++v)
        for (i64 k = 0; k < h.d_k; ++k) {
            const typename D::Word word = h.state[v * h.stride_v + k * h.stride_k];
            const bool finite = (word & D::MAGNITUDE) < D::NON_FINITE;
            packed[v * h.d_k + k] = finite ? word : 0;
            report.non_finite += !finite;
        }
    h.state = packed, h.stride_v = h.d_k, h.stride_k = 1;
    compress_head(h, scratch, largest_scale, report);
}

template <class D> void compress(const Job &job) {
    each_head<D, Scratch<D>>(job, [&](const Head<D> &head, const Scratch<D> &scratch, double *out) {
        const Int8Head<D> h(job, head);
        Report report;
        if (!compress_head(h, scratch, job.largest_scale, report)) compress_packed(h, scratch, job.largest_scale, report);
        report.write(out);
    });
}

template <class D> void restore_rows(const Int8Head<D> &h, const Scratch<D> &scratch) {
    const Int8Head<D> wide = h.folded();
    for (i64 k = 0; k < h.d_k; ++k) scratch.scale[k] = D::Scale::load(h.scale[k]);
    for (i64 k = h.d_k; k < wide.d_k; ++k) scratch.scale[k] = scratch.scale[k - h.d_k];
    // Rows of 16 bits gain nothing by it: they are written in order, so that the processor fetches them ahead.
    const bool streams = std::is_same_v<D, Float32> && streamable(wide.state, wide.stride_v);
    for (i64 v = 0; v < wide.d_v; ++v)
        in_steps(wide.d_k, [&](i64 first_k, auto width) {
            const float *__restrict scale = scratch.scale.get() + first_k;
            typename D::Word *__restrict x = wide.state + v * wide.stride_v + first_k;
            const i8 *__restrict q = wide.q + v * wide.d_k + first_k;
            if (streams && width == WIDE) {
                typename D::Word lines[WIDE];
                for (int k = 0; k < WIDE; ++k) lines[k] = D::store(float(q[k]) * scale[k]);
                for (int k = 0; k < WIDE; k += LINE / sizeof(*x)) stream_line(lines + k, x + k);
            } else {
                for (int k = 0; k < width; ++k) x[k] = D::store(float(q[k]) * scale[k]);
            }
        });
}

template <class D> void restore_columns(const Int8Head<D> &h, const Scratch<D> &scratch) {
    transpose(h.q, h.d_v, h.d_k, scratch.turned.get());
    for (i64 k = 0; k < h.d_k; ++k) {
        typename D::Word *__restrict x = h.state + k * h.stride_k;
        const i8 *__restrict q = scratch.turned.get() + k * h.d_v;
        const float scale = D::Scale::load(h.scale[k]);
        for (i64 v = 0; v < h.d_v; ++v) x[v] = D::store(float(q[v]) * scale);
    }
}

template <class D> void restore_packed(const Int8Head<D> &h, const Scratch<D> &scratch) {
    Int8Head<D> packed = h;
    packed.state = scratch.packed.get(), packed.stride_v = h.d_k, packed.stride_k = 1;
    restore_rows(packed, scratch);
    for (i64 v = 0; v < h.d_v; ++v)
        for (i64 k = 0; k < h.d_k; ++k) h.state[v * h.stride_v + k * h.stride_k] = packed.state[v * h.d_k + k];
}

template <class D> void restore(const Job &job) {
    each_head<D, Scratch<D>>(job, [&](const Head<D> &head, const Scratch<D> &scratch, double *) {
        const Int8Head<D> h(job, head);
        if (h.stride_k == 1) restore_rows(h, scratch);
        else if (h.stride_v == 1) restore_columns(h, scratch);
        else restore_packed(h, scratch);
    });
}

// The report of a codec that stores a state as it is: its energy and what is non-finite in it.
template <class D> void measure(const Job &job) {
    const i64 num_tasks = job.num_slots * job.num_layers * job.num_heads;
#pragma omp parallel for num_threads(int(job.num_threads)) schedule(dynamic, 4)
    for (i64 task = 0; task < num_tasks; ++task) {
        const Head<D> h(job, task);
        const bool turned = h.stride_v < h.stride_k;
        const i64 rows = turned ? h.d_k : h.d_v, columns = turned ? h.d_v : h.d_k;
        const i64 row_stride = turned ? h.stride_k : h.stride_v, stride = turned ? h.stride_v : h.stride_k;
        double signal = 0;
        i64 non_finite = 0;
        for (i64 r = 0; r < rows; ++r)
#pragma omp simd reduction(+ : signal, non_finite)
            for (i64 c = 0; c < columns; ++c) {
                const typename D::Word word = h.state[r * row_stride + c * stride];
                const bool finite = (word & D::MAGNITUDE) < D::NON_FINITE;
                const double x = D::load(finite ? word : typename D::Word(0));
                signal += x * x;
                non_finite += !finite;
            }
        double *out = job.report + task * 3;
        out[0] = signal, out[1] = 0, out[2] = double(non_finite);
    }
}

}  // namespace

#define EXPORT(name, D)                                                    \
    extern "C" void compress_int8_##name(const Job *job) { compress<D>(*job); } \
    extern "C" void restore_int8_##name(const Job *job) { restore<D>(*job); }   \
    extern "C" void compress_none_##name(const Job *job) { measure<D>(*job); }

EXPORT(float32, Float32)
EXPORT(bfloat16, BFloat16)
EXPORT(float16, Float16)
