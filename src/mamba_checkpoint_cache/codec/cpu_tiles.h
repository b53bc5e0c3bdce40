// A head in tiles of 16 rows in float32: a vector holds one row of a tile, and a tile fits the registers, or nearly. Whatever dtype a
// state has and however it lies in memory, from there on all is the same.

#pragma once

#include "cpu_vectors.h"

namespace {

constexpr int ROWS = 16;  // of a tile: as many as are rotated together at most

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

// Fetches the next head while this one is worked on: a few bytes at a time, as only so many lines can be under way, in their order in
// memory, for which it is built, and no nearer than the second cache, as the first holds what is worked on.
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
        if (end - at < count) return fetch_slowly<WRITE>(count);
        for (int i = 0; i < count; i += LINE) __builtin_prefetch(at + i, WRITE, 2);
        at += count;
    }

private:
    template <bool WRITE> [[gnu::noinline]] void fetch_slowly(int count) {
        for (; count > 0 && rows > 0; count -= LINE) {
            __builtin_prefetch(at, WRITE, 2);
            if ((at += std::min(i64(count), LINE)) >= end) --rows, at = row += apart, end = at + bytes;
        }
    }
};

// Reads and writes tiles of a head. Part p of a row is a vector; rows beyond d_v and channels beyond d_k are zeros.
template <class D> class Access {
    using Word = typename D::Word;
    static constexpr int LINE_LENGTH = LINE / sizeof(Word);
    const Head<D> &h;
    alignas(LINE) Word lines[ROWS][LINE_LENGTH];  // what is written of lines that aren't complete

public:
    const bool streams;  // so that write() need not find in the cache what it will overwrite

    explicit Access(const Head<D> &head)
        : h(head), streams(h.stride_k == 1 && h.d_k % LINE_LENGTH == 0 && streamable(h.state, h.stride_v)) {}

    // ROWS rows from v on.
    [[gnu::always_inline]] void read(i64 v, i64 p, F *x) const {
        Word copy[ROWS * LANES];
        const Tile tile = at(v, p, copy);
        if (tile.copied) gather(v, p, copy);
        F found[ROWS];
        for (int i = 0; i < ROWS; ++i) found[i] = Words<D>::read(tile.vector(i));
        tile.turn(found, x);
    }
    // Calls body(i, x, y) with the vectors of the state and what y, a tile, has in the same places.
    template <class Body> [[gnu::always_inline]] void compare(i64 v, i64 p, const F *y, Body body) const {
        Word copy[ROWS * LANES];
        const Tile tile = at(v, p, copy);
        if (tile.copied) gather(v, p, copy);
        F turned[ROWS];
        tile.turn(y, turned);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) body(i, Words<D>::read(tile.vector(i)), turned[i]);
    }
    // Tiles of the same rows must follow one another.
    template <bool NORMAL = false> [[gnu::always_inline]] void write(i64 v, i64 p, const F *tile_rows) {
        Word copy[ROWS * LANES];
        const Tile tile = at(v, p, copy);
        F x[ROWS];
        tile.turn(tile_rows, x);
        if (streams && !tile.copied) return stream<NORMAL>(p, x, tile);
        for (int i = 0; i < ROWS; i += 2) Words<D>::template write_two<NORMAL>(x[i], x[i + 1], tile.vector(i), tile.vector(i + 1));
        if (tile.copied) scatter(v, p, copy);
    }

private:
    // Where the vectors of a tile lie: in a copy of it, unless it is whole and one of its axes contiguous. In a turned one, LANES vectors
    // hold the channels of as many rows.
    struct Tile {
        Word *words;
        i64 apart, squares_apart;
        bool turned, copied;

        Word *vector(int i) const { return words + i % LANES * apart + i / LANES * squares_apart; }
        // From rows to vectors as they lie here, or back. What is transposed is a copy: it is kept in memory, and the rest need not be.
        [[gnu::always_inline]] void turn(const F *from, F *to) const {
            if (turned) {
                F mixed[ROWS];
                for (int i = 0; i < ROWS; ++i) mixed[i] = from[i];
                for (int i = 0; i < ROWS; i += LANES) transpose<LANES>(mixed + i);
                for (int i = 0; i < ROWS; ++i) to[i] = mixed[i];
            } else {
                for (int i = 0; i < ROWS; ++i) to[i] = from[i];
            }
        }
    };

    Tile at(i64 v, i64 p, Word *copy) const {
        const i64 k = p * LANES;
        if (v + ROWS > h.d_v || k + LANES > h.d_k || (h.stride_k != 1 && h.stride_v != 1))
            return {copy, LANES, LANES * LANES, false, true};
        Word *words = h.state + v * h.stride_v + k * h.stride_k;
        if (h.stride_k == 1) return {words, h.stride_v, LANES * h.stride_v, false, false};
        return {words, h.stride_k, LANES, true, false};
    }
    template <bool NORMAL> [[gnu::always_inline]] void stream(i64 p, const F *x, const Tile &tile) {
        const i64 start = p * LANES % LINE_LENGTH;
        for (int i = 0; i < ROWS; i += 2) Words<D>::template write_two<NORMAL>(x[i], x[i + 1], &lines[i][start], &lines[i + 1][start]);
        if (start + LANES == LINE_LENGTH)
            for (int i = 0; i < ROWS; ++i) stream_line(lines[i], tile.vector(i) - start);
    }
    [[gnu::noinline]] void gather(i64 v, i64 p, Word *copy) const {
        std::fill_n(copy, ROWS * LANES, Word(0));
        each_element(v, p, copy, [](Word &mine, const Word &theirs) { mine = theirs; });
    }
    [[gnu::noinline]] void scatter(i64 v, i64 p, Word *copy) const {
        each_element(v, p, copy, [](const Word &mine, Word &theirs) { theirs = mine; });
    }
    template <class Body> void each_element(i64 v, i64 p, Word *copy, Body body) const {
        const i64 k = p * LANES, rows = std::min(h.d_v - v, i64(ROWS)), channels = std::min(h.d_k - k, i64(LANES));
        for (i64 i = 0; i < rows; ++i)
            for (i64 j = 0; j < channels; ++j) body(copy[i * LANES + j], h.state[(v + i) * h.stride_v + (k + j) * h.stride_k]);
    }
};

// Rows that are rotated together.
inline i64 block_of(i64 d_v) { return std::min(d_v & -d_v, i64(ROWS)); }

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
        : num_rows((d_v + ROWS - 1) / ROWS * ROWS), count((d_k + LANES - 1) / LANES), q_stride(count * LANES),
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
    for (i64 v = 0; v < buffers.num_rows; v += ROWS)
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
