// int16 of reference.py fused for the CPU: every layer and head of every slot in one call. Built by cpu_build.py.

#include "cpu_tiles.h"

namespace {

// q of a vector of channels, or of those that there are.
inline F read_shorts(const i16 *from, i64 width) {
    Shorts codes = {};
    if (width >= LANES) std::memcpy(&codes, from, sizeof codes);
    else std::memcpy(&codes, from, width * sizeof(i16));
    return __builtin_convertvector(widen(codes), F);
}
inline void write_shorts(I values, i16 *to, i64 width) {
    const Shorts codes = low_shorts(values);
    if (width >= LANES) std::memcpy(to, &codes, sizeof codes);
    else std::memcpy(to, &codes, width * sizeof(i16));
}

// Returns false, with nothing stored, if an element is NaN or infinite.
template <class D> bool compress_int16_head(const Job &job, const Head<D> &h, const Buffers &buffers, Report &report) {
    i16 *q = static_cast<i16 *>(job.stored[0]) + h.stored * h.d_v * h.d_k;
    F *largest = buffers.gain(), *scale = buffers.scale();
    const Access<D> access(h);
    std::fill_n(largest, buffers.count, F{});
    each_tile(buffers, [&](i64 v, i64 p) {
        const i64 apart = buffers.apart(p);
        F row[ROWS], most = largest[p], *at = buffers.part(p) + v * apart;
        access.read(v, p, row);
        for (int i = 0; i < ROWS; ++i) at[i * apart] = row[i], most = largest_of(row[i], most);
        largest[p] = most;
    });
    const float most = largest_of(largest, buffers.count);
    if (!std::isfinite(most)) return false;

    report.unit = unit_of(most);
    for (i64 p = 0; p < buffers.count; ++p)
        scale[p] = smaller(larger(largest[p], all(MIN_AMAX)) / 32767.0f, all(job.largest_scale));
    std::copy_n(reinterpret_cast<const float *>(scale), h.d_k, static_cast<float *>(job.stored[1]) + h.stored * h.d_k);
    Ahead<D> ahead(h);
    each_group(buffers, [&](i64 first, auto width) {
        const F *head = buffers.group(first);
        for (i64 v0 = 0; v0 < h.d_v; v0 += RUN) {
            Squares signal, error;
            for (i64 v = v0; v < std::min(v0 + RUN, h.d_v); ++v) {
                ahead.template fetch<false>(width * LANES * sizeof(typename D::Word));
                for (int i = 0; i < width; ++i) {
                    const i64 k = (first + i) * LANES;
                    const F x = head[v * width + i], s = scale[first + i];
                    const I code = round_to_integer(smaller(larger(x / s, all(-32767.0f)), all(32767.0f)));
                    write_shorts(code, q + v * h.d_k + k, h.d_k - k);
                    signal.add(x * report.unit, i);
                    error.add((x - Words<D>::template cast<false>(__builtin_convertvector(code, F) * s)) * report.unit, i);
                }
            }
            report.signal += sum(signal.total()), report.error += sum(error.total());
        }
    });
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
        Access<D> access(h);
        Ahead<D> ahead(h);
        each_tile(buffers, [&](i64 v, i64 p) {
            F row[ROWS] = {};
            if (!access.streams) ahead.template fetch<true>(ROWS * LANES * sizeof(typename D::Word));
            for (i64 i = 0; i < std::min(h.d_v - v, i64(ROWS)); ++i)
                row[i] = read_shorts(q + (v + i) * h.d_k + p * LANES, h.d_k - p * LANES) * scale[p];
            access.write(v, p, row);
        });
    });
}

}  // namespace

#define EXPORT(name, D)                                                               \
    extern "C" void compress_int16_##name(const Job *job) { compress_int16<D>(*job); } \
    extern "C" void restore_int16_##name(const Job *job) { restore_int16<D>(*job); }

EXPORT(float32, Float32)
EXPORT(bfloat16, BFloat16)
EXPORT(float16, Float16)
