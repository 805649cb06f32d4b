// x·Wᵀ for one level. Every output is one vector of partial sums, fed block by block from input 0 and summed up by
// one tree: so few rows (weights decoded on the way) and many (decoded once into a panel) give the same bits.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace mlxcel::MLXCEL_LEVEL {

constexpr int kVectors = kBlock / kLanes;
constexpr int kColumns = 4;

// Eight fields of `bits` bits, spread to one byte each.
template <int bits>
inline uint64_t spread(uint64_t packed) {
  constexpr uint64_t one = (1u << bits) - 1, two = one | one << bits, four = two | two << 2 * bits;
  uint64_t halves = (packed & four) | (packed >> 4 * bits & four) << 32;
  uint64_t quarters = (halves & (two | two << 32)) | (halves >> 2 * bits & (two | two << 32)) << 16;
  constexpr uint64_t ends = one | one << 16 | one << 32 | one << 48;
  return (quarters & ends) | (quarters >> bits & ends) << 8;
}

// `count` halves or floats from element `at` on, as floats: where they lie, or in `to`, which has room for whole vectors.
inline const float* floats(const void* from, Type type, int64_t at, int64_t count, float* to) {
  if (type == Type::float32) return (const float*)from + at;
  const uint16_t* half = (const uint16_t*)from + at;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store(to + i, type == Type::bfloat16 ? of_bfloat16(half + i) : of_float16(half + i));
  int left = int(count - i);
  if (left) store(to + i, type == Type::bfloat16 ? of_bfloat16_part(half + i, left) : of_float16_part(half + i, left));
  return to;
}

// The weights of some columns that lie one behind the other; `decode` gives one block of one of them.
template <int bits>
struct Packed {
  static constexpr int64_t kBytes = 4 * bits;  // of one block
  const uint8_t* weight;
  const float* scales;
  const float* biases;
  int64_t row_bytes, groups;  // from one column to the next; 0: the columns are all the same
  int shift;                  // a block's number to its group's

  static Packed at(const Linear& call, int64_t column, int count, float* scratch) {
    int64_t groups = call.num_inputs / call.group_size, row_bytes = call.num_inputs * bits / 8;
    return {(const uint8_t*)call.weight + column * row_bytes,
            floats(call.scales, call.scale_type, column * groups, count * groups, scratch),
            floats(call.biases, call.scale_type, column * groups, count * groups, scratch + count * groups + kLanes),
            count > 1 ? row_bytes : 0, count > 1 ? groups : 0,
            call.group_size == 32 ? 0 : call.group_size == 64 ? 1 : 2};
  }

  inline void decode(int64_t block, int column, V out[kVectors]) const {
    const uint8_t* from = weight + column * row_bytes + kBytes * block;
    int64_t group = column * groups + (block >> shift);
    float scale = scales[group], bias = biases[group];
    if constexpr (bits == 4) {
      of_nibbles(from, scale, bias, out);
      return;
    }
    uint8_t spread_out[kBlock];
    const uint8_t* bytes = bits == 8 ? from : spread_out;
    if constexpr (bits != 8) {
      for (int i = 0; i < 4; i++) {
        uint64_t eight = spread<bits>(load_bytes(from + bits * i, bits));
        std::memcpy(spread_out + 8 * i, &eight, 8);
      }
    }
    for (int v = 0; v < kVectors; v++) out[v] = fma(of_bytes(bytes + kLanes * v), all(scale), all(bias));
  }

  void tail(int64_t, int64_t, float*) const {}  // groups are whole blocks
};

template <Type type>
struct Plain {
  static constexpr int64_t kBytes = kBlock * (type == Type::float32 ? 4 : 2);
  const void* weight;
  int64_t row;  // elements from one column to the next; 0: the columns are all the same

  static Plain at(const Linear& call, int64_t column, int count, float*) {
    return {(const char*)call.weight + column * call.num_inputs * (type == Type::float32 ? 4 : 2),
            count > 1 ? call.num_inputs : 0};
  }

  void tail(int64_t from, int64_t until, float* to) const {
    for (int64_t i = from; i < until; i++) {
      if constexpr (type == Type::float32) to[i] = ((const float*)weight)[i];
      if constexpr (type == Type::bfloat16) to[i] = float_of_bfloat16(((const uint16_t*)weight)[i]);
      if constexpr (type == Type::float16) to[i] = float_of_float16(((const uint16_t*)weight)[i]);
    }
  }

  inline void decode(int64_t block, int column, V out[kVectors]) const {
    for (int v = 0; v < kVectors; v++) {
      int64_t at = column * row + kBlock * block + kLanes * v;
      if constexpr (type == Type::float32) out[v] = load((const float*)weight + at);
      if constexpr (type == Type::bfloat16) out[v] = of_bfloat16((const uint16_t*)weight + at);
      if constexpr (type == Type::float16) out[v] = of_float16((const uint16_t*)weight + at);
    }
  }
};

template <int rows, int wide>
inline void write(const Linear& call, const V sum[rows][wide], int64_t row, int64_t column, int count) {
  constexpr int together = 4 / wide;  // rows that one call of `sums` serves
  for (int r = 0; r < rows; r += together) {
    V four[4];
    for (int i = 0; i < 4; i++) four[i] = r + i / wide < rows ? sum[r + i / wide][i % wide] : zero();
    float out[4];
    sums(four, out);
    for (int t = 0; t < together && r + t < rows; t++) {
      int64_t place = call.places ? call.places[row + r + t] : row + r + t;
      float* y = call.y + place * call.num_columns + column;
      for (int c = 0; c < count; c++) y[c] = call.bias ? out[t * wide + c] + call.bias[column + c] : out[t * wide + c];
    }
  }
}

// Fetches what will be decoded some blocks later: the columns lie one behind the other, so that the next ones' weights
// follow, but each is too short for the processor to foresee it.
constexpr int64_t kAhead = 4096;

template <int count, class Columns>
[[gnu::always_inline]] inline void fetch(const Columns& columns, int64_t block) {
  const char* weight = (const char*)columns.weight + kAhead + block * count * Columns::kBytes;
  for (int64_t at = 0; at < count * Columns::kBytes; at += 64) __builtin_prefetch(weight + at);
}

// `rows` rows times `wide` columns, decoded on the way.
template <class Columns, int rows, int wide>
void few(const Linear& call, const Columns& columns, int64_t column, int count) {
  V sum[rows][wide];
  for (auto& row : sum)
    for (V& v : row) v = zero();
  int64_t blocks = call.num_blocks();
  const float* x = call.x;
  for (int64_t block = 0; block < blocks; block++, x += rows * kBlock) {
    fetch<wide>(columns, block);
    for (int c = 0; c < wide; c++) {
      V w[kVectors];
      columns.decode(block, c, w);
#pragma GCC unroll 16
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; v++)
          sum[r][c] = fma(load(x + r * kBlock + kLanes * v), w[v], sum[r][c]);
    }
  }
  write<rows, wide>(call, sum, 0, column, count);
}

// `rows` rows times four columns of a panel.
template <int rows>
void tile(const Linear& call, const float* panel, int64_t row, int64_t column, int count) {
  V sum[rows][kColumns];
  for (auto& line : sum)
    for (V& v : line) v = zero();
  int64_t length = call.num_blocks() * kBlock;
  const float* x = call.x + row * call.row_stride;
  for (int64_t at = 0; at < length; at += kLanes) {
    V w[kColumns];
    for (int c = 0; c < kColumns; c++) w[c] = load(panel + c * length + at);
    for (int r = 0; r < rows; r++) {
      V value = load(x + r * call.row_stride + at);
      for (int c = 0; c < kColumns; c++) sum[r][c] = fma(value, w[c], sum[r][c]);
    }
  }
  write<rows, kColumns>(call, sum, row, column, count);
}

template <int most>
void some(const Linear& call, int rows, const float* panel, int64_t row, int64_t column, int count) {
  if (rows == most) return tile<most>(call, panel, row, column, count);
  if constexpr (most > 1) some<most - 1>(call, rows, panel, row, column, count);
}

// A column's weights as floats, zero-padded to whole blocks.
template <class Columns>
inline void fill(const Linear& call, const Columns& column, float* to) {
  int64_t whole = call.num_inputs / kBlock;
  for (int64_t block = 0; block < whole; block++) {
    V w[kVectors];
    fetch<1>(column, block);
    column.decode(block, 0, w);
    for (int v = 0; v < kVectors; v++) store(to + kBlock * block + kLanes * v, w[v]);
  }
  if (whole < call.num_blocks()) {
    std::memset(to + kBlock * whole, 0, kBlock * sizeof(float));
    column.tail(kBlock * whole, call.num_inputs, to);
  }
}

// As many rows as the registers hold sums of, times four columns or two.
constexpr int wide_of(int rows) { return rows <= kFewRows ? kColumns : 2; }

template <class Columns, int most>
void some_few(const Linear& call, const Columns& columns, int64_t column, int count) {
  if (call.num_rows == most) return few<Columns, most, wide_of(most)>(call, columns, column, count);
  if constexpr (most > 1) some_few<Columns, most - 1>(call, columns, column, count);
}

template <class Columns>
void few_rows(const Linear& call, int64_t first, int64_t last, float* scratch) {
  // Columns that do not fill a tile are taken one by one.
  int wide = wide_of(int(call.num_rows));
  for (int64_t column = first; column < last;) {
    int count = last - column < wide ? 1 : wide;
    some_few<Columns, kMoreRows>(call, Columns::at(call, column, count, scratch), column, count);
    column += count;
  }
}

// A panel of columns stays in the second cache while all rows pass, a tile of rows in the first.
constexpr int64_t kPanelFloats = 64 * 1024;

template <class Columns>
void many_rows(const Linear& call, int64_t first, int64_t last, float* scratch) {
  int64_t length = call.num_blocks() * kBlock;
  int64_t width = kPanelFloats / length / kColumns * kColumns;
  width = width < kColumns ? kColumns : width > kPanelColumns ? kPanelColumns : width;
  float* scales = scratch + kPanelColumns * length;
  for (int64_t start = first; start < last; start += width) {
    int64_t stop = start + width < last ? start + width : last;
    for (int64_t column = start; column < stop; column++)
      fill(call, Columns::at(call, column, 1, scales), scratch + (column - start) * length);
    for (int64_t row = 0, tiles = (call.num_rows + kTileRows - 1) / kTileRows; tiles > 0; tiles--) {
      int64_t rows = (call.num_rows - row + tiles - 1) / tiles;  // all of about one height
      for (int64_t column = start; column < stop; column += kColumns) {
        int count = stop - column < kColumns ? int(stop - column) : kColumns;
        some<kTileRows>(call, int(rows), scratch + (column - start) * length, row, column, count);
      }
      row += rows;
    }
  }
}

template <class Columns>
void columns(const Linear& call, int64_t first, int64_t last, float* scratch) {
  if (call.num_rows <= kMoreRows && call.num_inputs % kBlock == 0)
    few_rows<Columns>(call, first, last, scratch);
  else
    many_rows<Columns>(call, first, last, scratch);
}

inline void linear(const Linear& call, int64_t first, int64_t last, float* scratch) {
  switch (call.bits) {
    case 2: return columns<Packed<2>>(call, first, last, scratch);
    case 3: return columns<Packed<3>>(call, first, last, scratch);
    case 4: return columns<Packed<4>>(call, first, last, scratch);
    case 5: return columns<Packed<5>>(call, first, last, scratch);
    case 6: return columns<Packed<6>>(call, first, last, scratch);
    case 8: return columns<Packed<8>>(call, first, last, scratch);
  }
  switch (call.weight_type) {
    case Type::float32: return columns<Plain<Type::float32>>(call, first, last, scratch);
    case Type::float16: return columns<Plain<Type::float16>>(call, first, last, scratch);
    case Type::bfloat16: return columns<Plain<Type::bfloat16>>(call, first, last, scratch);
  }
}

}  // namespace mlxcel::MLXCEL_LEVEL
