// Causal attention of one level, with an online softmax over blocks of keys.
// Source of the softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); of its parts,
// which are merged afterwards: Dao and others, "Flash-Decoding for long-context inference" (2023).
//
// Parts and blocks begin at multiples of their size in the row's positions. A query meets those that hold a key it
// sees in the order of their positions, each part from nothing, and merges them in that order. What else is in the
// call, which task does it, how the prompt was cut and where storage begins leave no trace in its bits.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "vec.h"

namespace mlxcel::MLXCEL_LEVEL {

constexpr int64_t kKeys = 32;
constexpr int kKeyVectors = kKeys / kLanes;
constexpr int64_t kScores = 48;  // room for a block's scores and what lies behind the last four
constexpr float kNever = -3.0e38f;

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

inline V wide(const float* from) { return load(from); }
inline V wide(const Half* from) { return of_float16(&from->bits); }
inline V wide(const Brain* from) { return of_bfloat16(&from->bits); }
inline void narrow(float* to, V v) { store(to, v); }
inline void narrow(Half* to, V v) { store_float16(&to->bits, min(all(65504.0f), max(all(-65504.0f), v))); }
inline void narrow(Brain* to, V v) {
  constexpr float kMost = 0x1.fep127f;
  store_bfloat16(&to->bits, min(all(kMost), max(all(-kMost), v)));
}

// Stored keys or values, [key heads, ...], of one key head.
template <class T>
struct Stored {
  T* data;
  const int32_t* table;
  int64_t head, dim, base, capacity;

  // The keys from `position` on, until the next multiple of kPage at least.
  T* at(int64_t position) const {
    int64_t place = position - base;
    if (table) place = table[place / kPage] * kPage + place % kPage;
    return data + (head * capacity + place) * dim;
  }
};

template <class T>
Stored<T> stored_keys(const Attention& call, const Span& span, int64_t head) {
  return {(T*)span.keys, span.table, head, call.key_dim, span.base, span.capacity};
}

template <class T>
Stored<T> stored_values(const Attention& call, const Span& span, int64_t head) {
  return {(T*)span.values, span.table, head, call.value_dim, span.base, span.capacity};
}

template <class T>
void put(const float* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    int64_t left = count - i;
    if (left >= kLanes) {
      narrow(to + i, load(from + i));
    } else {
      T part[kLanes];
      narrow(part, load_part(from + i, int(left)));
      std::memcpy(to + i, part, left * sizeof(T));
    }
  }
}

template <class T>
void append_as(const Attention& call, const Span& span, int64_t head, int64_t first, int64_t last) {
  Stored<T> keys = stored_keys<T>(call, span, head), values = stored_values<T>(call, span, head);
  for (int64_t i = first; i < last; i++) {
    put(call.keys.at(span.start + i, head), call.key_dim, keys.at(span.position + i));
    put(call.values.at(span.start + i, head), call.value_dim, values.at(span.position + i));
  }
}

inline void append(const Attention& call, const Span& span, int64_t head, int64_t first, int64_t last) {
  auto run = call.type == Type::float32 ? append_as<float> : call.type == Type::float16 ? append_as<Half> : append_as<Brain>;
  run(call, span, head, first, last);
}

// The keys or values of one block, as two runs, for a page may hold no more of them.
template <class T>
struct Lines {
  const T* halves[2];
  int64_t stride;
};
static_assert(kKeys == 2 * kPage);

// How many vectors a row of keys or values has: known beforehand, or not.
template <int64_t fixed>
struct Length {
  int64_t padded;
  int64_t vectors() const { return fixed ? fixed / kLanes : padded / kLanes; }
};

// The range of a block's keys that a query sees.
struct Range {
  int64_t from, until;
  bool empty() const { return from >= until; }
  Range half(int64_t i) const { return {std::max(from, i * kPage), std::min(until, i * kPage + kPage)}; }
};

// Products of `rows` queries, each `length.padded` behind the other, with the keys of `range`.
template <int rows, int64_t fixed, class T>
void score(const float* queries, Length<fixed> length, const Lines<T>& keys, Range whole, float scores[][kScores]) {
  for (int half = 0; half < 2; half++) {
    Range range = whole.half(half);
    if (range.empty()) continue;
    const T* line = keys.halves[half] + (range.from - half * kPage) * keys.stride;
    for (int64_t key = range.from; key < range.until; key += 4, line += 4 * keys.stride) {
      V dots[rows][4];
      const T* lines[4];
      for (int k = 0; k < 4; k++) {
        lines[k] = line + std::min<int64_t>(k, range.until - 1 - key) * keys.stride;
        for (int r = 0; r < rows; r++) dots[r][k] = zero();
      }
      for (int64_t i = 0; i < length.vectors(); i++) {
        V part[4];
        for (int k = 0; k < 4; k++) part[k] = wide(lines[k] + i * kLanes);
        for (int r = 0; r < rows; r++) {
          V query = load(queries + r * length.padded + i * kLanes);
          for (int k = 0; k < 4; k++) dots[r][k] = fma(query, part[k], dots[r][k]);
        }
      }
      for (int r = 0; r < rows; r++) sums(dots[r], scores[r] + key);
    }
  }
}

// Adds the values of `whole`, each times its weight, to `rows` sums.
template <int rows, int vectors, class T>
void weigh_some(float* sum, int64_t padded, const Lines<T>& values, Range whole, const float weights[][kScores],
                int64_t at) {
  V sums[rows][vectors];
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < vectors; i++) sums[r][i] = load(sum + r * padded + at + i * kLanes);
  for (int half = 0; half < 2; half++) {
    Range range = whole.half(half);
    if (range.empty()) continue;
    const T* line = values.halves[half] + (range.from - half * kPage) * values.stride + at;
    for (int64_t key = range.from; key < range.until; key++, line += values.stride) {
      V value[vectors];
      for (int i = 0; i < vectors; i++) value[i] = wide(line + i * kLanes);
      for (int r = 0; r < rows; r++) {
        V weight = all(weights[r][key]);
        for (int i = 0; i < vectors; i++) sums[r][i] = fma(weight, value[i], sums[r][i]);
      }
    }
  }
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < vectors; i++) store(sum + r * padded + at + i * kLanes, sums[r][i]);
}

template <int rows, int64_t fixed, class T>
void weigh(float* sum, Length<fixed> length, const Lines<T>& values, Range range, const float weights[][kScores]) {
  if (range.empty()) return;
  int64_t i = 0, vectors = length.vectors();
  for (; i + 4 <= vectors; i += 4) weigh_some<rows, 4>(sum, length.padded, values, range, weights, i * kLanes);
  for (; i < vectors; i++) weigh_some<rows, 1>(sum, length.padded, values, range, weights, i * kLanes);
}

// An online softmax: the largest score so far, and the sum of the others' exponentials by it.
struct Softmax {
  float largest, total;

  // Scores to weights. Returns what the sum over values so far must shrink by.
  float take(float* scores, Range range, float softcap) {
    if (softcap) {
      V cap = all(softcap), inverse = all(1.0f / softcap);
      for (int v = 0; v < kKeyVectors; v++)
        store(scores + v * kLanes, mul(cap, tanh(mul(load(scores + v * kLanes), inverse))));
    }
    for (int64_t i = 0; i < range.from; i++) scores[i] = kNever;
    for (int64_t i = range.until; i < kKeys; i++) scores[i] = kNever;
    V most = load(scores);
    for (int v = 1; v < kKeyVectors; v++) most = max(most, load(scores + v * kLanes));
    float highest = max_of(most), shrink = 1;
    if (highest > largest) {
      shrink = exp_of(largest - highest);
      total *= shrink;
      largest = highest;
    }
    V part = zero();
    for (int v = 0; v < kKeyVectors; v++) {
      V weight = exp(add(load(scores + v * kLanes), all(-largest)));
      store(scores + v * kLanes, weight);
      part = add(part, weight);
    }
    total += sum_of(part);
    return shrink;
  }

  static float exp_of(float x) {
    float lanes[kLanes];
    store(lanes, exp(all(x)));
    return lanes[0];
  }
};

inline void scale_row(float* row, float factor, int64_t length) {
  for (int64_t i = 0; i < length; i += kLanes) store(row + i, mul(load(row + i), all(factor)));
}

// Puts a later part's result behind those merged so far. Nothing is what a query that saw no key of a part has.
inline void merge_part(float* sum, Softmax& merged, const float* part_sum, Softmax part, int64_t length) {
  if (part.total == 0) return;
  if (merged.total == 0) {
    merged = part;
    for (int64_t i = 0; i < length; i += kLanes) store(sum + i, load(part_sum + i));
    return;
  }
  float largest = part.largest > merged.largest ? part.largest : merged.largest;
  float before = Softmax::exp_of(merged.largest - largest), behind = Softmax::exp_of(part.largest - largest);
  for (int64_t i = 0; i < length; i += kLanes)
    store(sum + i, fma(load(part_sum + i), all(behind), mul(load(sum + i), all(before))));
  merged = {largest, merged.total * before + part.total * behind};
}

// One task at work: `rows` queries, the heads of a group next to each other, token after token.
template <class T, int64_t fixed>
class Worker {
 public:
  Worker(const Attention& call, const AttendTask& task, float* scratch)
      : call_(call), task_(task), span_(*task.span), group_(call.num_heads / call.num_key_heads),
        rows_((task.last - task.first) * group_), key_{padded(call.key_dim)}, value_{padded(call.value_dim)},
        keys_(stored_keys<T>(call, span_, task.key_head)), values_(stored_values<T>(call, span_, task.key_head)),
        widens_(fixed == 0 || (sizeof(T) < 4 && rows_ > kAttendRows)) {
    auto take = [&](int64_t count) {
      float* taken = scratch;
      scratch += count;
      return taken;
    };
    queries_ = take(rows_ * key_.padded);
    sums_ = take(rows_ * value_.padded);
    merged_ = take(rows_ * value_.padded);
    wide_keys_ = take(kKeys * key_.padded);
    wide_values_ = take(kKeys * value_.padded);
    softmax_ = (Softmax*)take(2 * rows_);
    merged_softmax_ = (Softmax*)take(2 * rows_);
  }

  void run() {
    for (int64_t row = 0; row < rows_; row++) {
      const float* query = call_.queries.at(span_.start + token(row), head(row));
      float* to = queries_ + row * key_.padded;
      for (int64_t i = 0; i < key_.padded; i++) to[i] = i < call_.key_dim ? query[i] * call_.scale : 0;
      merged_softmax_[row] = {kNever, 0};
    }
    for (int64_t part = task_.first_part; part <= task_.last_part; part++) {
      run_part(part);
      if (task_.partial) return leave_partial();
      if (task_.first_part == task_.last_part) {
        std::swap(sums_, merged_);
        std::swap(softmax_, merged_softmax_);
        break;
      }
      for (int64_t row = 0; row < rows_; row++)
        merge_part(merged_ + row * value_.padded, merged_softmax_[row], sums_ + row * value_.padded, softmax_[row],
                   value_.padded);
    }
    for (int64_t row = 0; row < rows_; row++)
      finish(call_, merged_ + row * value_.padded, merged_softmax_[row], span_.start + token(row), head(row));
  }

  static void finish(const Attention& call, const float* sum, Softmax softmax, int64_t token, int64_t head) {
    float norm = 1.0f / softmax.total;
    float* out = call.out + (token * call.num_heads + head) * call.value_dim;
    for (int64_t i = 0; i < call.value_dim; i++) out[i] = sum[i] * norm;
  }

 private:
  int64_t token(int64_t row) const { return task_.first + row / group_; }
  int64_t head(int64_t row) const { return task_.key_head * group_ + row % group_; }
  int64_t position(int64_t row) const { return span_.position + token(row); }

  Range seen(int64_t row, int64_t from, int64_t until) const {
    int64_t last = position(row);
    return {std::max(from, call_.first_key(last)), std::min(until, last + 1)};
  }

  void run_part(int64_t part) {
    int64_t from = part * kPartKeys, until = from + kPartKeys;
    for (int64_t row = 0; row < rows_; row++) {
      bool sinks = call_.sinks && call_.first_key(position(row)) / kPartKeys == part;
      softmax_[row] = sinks ? Softmax{call_.sinks[head(row)], 1} : Softmax{kNever, 0};
      std::memset(sums_ + row * value_.padded, 0, value_.padded * sizeof(float));
    }
    from = seen(0, from, until).from;
    until = seen(rows_ - 1, from, until).until;
    for (int64_t block = from / kKeys * kKeys; block < until; block += kKeys) {
      Range range{std::max<int64_t>(0, from - block), std::min(kKeys, until - block)};
      if constexpr (fixed != 0) {
        if (!widens_) {
          run_block(block, lines(keys_, block, range), lines(values_, block, range));
          continue;
        }
      }
      widen(lines(keys_, block, range), range, call_.key_dim, key_.padded, wide_keys_);
      widen(lines(values_, block, range), range, call_.value_dim, value_.padded, wide_values_);
      run_block(block, whole(wide_keys_, key_.padded), whole(wide_values_, value_.padded));
    }
  }

  static Lines<T> lines(const Stored<T>& stored, int64_t block, Range range) {
    int64_t first = range.from / kPage, last = (range.until - 1) / kPage;
    Lines<T> lines{{nullptr, nullptr}, stored.dim};
    for (int64_t half = first; half <= last; half++) {
      int64_t from = std::max(range.from, half * kPage);
      lines.halves[half] = stored.at(block + from) - (from - half * kPage) * stored.dim;
    }
    return lines;
  }

  static Lines<float> whole(const float* from, int64_t stride) { return {{from, from + kPage * stride}, stride}; }

  static void widen(const Lines<T>& lines, Range range, int64_t dim, int64_t padded, float* to) {
    for (int64_t key = range.from; key < range.until; key++) {
      const T* line = lines.halves[key / kPage] + key % kPage * lines.stride;
      for (int64_t i = 0; i < padded; i += kLanes) {
        int64_t left = dim - i;
        if (left >= kLanes) {
          store(to + key * padded + i, wide(line + i));
        } else {
          T part[kLanes] = {};
          if (left > 0) std::memcpy(part, line + i, left * sizeof(T));
          store(to + key * padded + i, wide(part));
        }
      }
    }
  }

  template <class U>
  void run_block(int64_t block, const Lines<U>& keys, const Lines<U>& values) {
    for (int64_t row = 0; row < rows_; row += kAttendRows) {
      switch (std::min<int64_t>(rows_ - row, kAttendRows)) {
        case 1: run_tile<1>(block, row, keys, values); break;
        case 2: run_tile<2>(block, row, keys, values); break;
        case 3: run_tile<std::min(3, kAttendRows)>(block, row, keys, values); break;
        default: run_tile<std::min(4, kAttendRows)>(block, row, keys, values);
      }
    }
  }

  template <int rows, class U>
  void run_tile(int64_t block, int64_t row, const Lines<U>& keys, const Lines<U>& values) {
    Range ranges[rows], any{kKeys, 0}, every{0, kKeys};
    for (int r = 0; r < rows; r++) {
      Range range = seen(row + r, block, block + kKeys);
      ranges[r] = range = {range.from - block, range.until - block};
      every = {std::max(every.from, range.from), std::min(every.until, range.until)};
      if (!range.empty()) any = {std::min(any.from, range.from), std::max(any.until, range.until)};
    }
    if (any.empty()) return;
    alignas(64) float scores[rows][kScores];
    score<rows>(queries_ + row * key_.padded, key_, keys, any, scores);
    for (int r = 0; r < rows; r++) {
      if (ranges[r].empty()) continue;
      float shrink = softmax_[row + r].take(scores[r], ranges[r], call_.softcap);
      if (shrink != 1) scale_row(sums_ + (row + r) * value_.padded, shrink, value_.padded);
    }
    // A value that a query does not see may be anything, so that it must not even be weighed with 0.
    float* sum = sums_ + row * value_.padded;
    if (every.empty()) every = {kKeys, kKeys};
    for (int r = 0; r < rows; r++)
      weigh<1>(sum + r * value_.padded, value_, values, {ranges[r].from, std::min(ranges[r].until, every.from)},
               scores + r);
    weigh<rows>(sum, value_, values, every, scores);
    for (int r = 0; r < rows; r++)
      weigh<1>(sum + r * value_.padded, value_, values, {every.until, ranges[r].until}, scores + r);
  }

  void leave_partial() {
    for (int64_t row = 0; row < rows_; row++) {
      float* to = task_.partial + row * partial_floats(call_);
      std::memcpy(to, softmax_ + row, sizeof(Softmax));
      std::memcpy(to + 2, sums_ + row * value_.padded, value_.padded * sizeof(float));
    }
  }

  const Attention& call_;
  const AttendTask& task_;
  const Span& span_;
  int64_t group_, rows_;
  Length<fixed> key_, value_;
  Stored<T> keys_, values_;
  bool widens_;
  float *queries_, *sums_, *merged_, *wide_keys_, *wide_values_;
  Softmax *softmax_, *merged_softmax_;
};

template <class T>
void attend_as(const Attention& call, const AttendTask& task, float* scratch) {
  int64_t dim = call.key_dim == call.value_dim ? call.key_dim : 0;
  switch (dim) {
    case 64: return Worker<T, 64>(call, task, scratch).run();
    case 128: return Worker<T, 128>(call, task, scratch).run();
    case 256: return Worker<T, 256>(call, task, scratch).run();
    default: return Worker<T, 0>(call, task, scratch).run();
  }
}

inline void attend(const Attention& call, const AttendTask& task, float* scratch) {
  scratch = (float*)(((uintptr_t)scratch + 63) / 64 * 64);
  auto run = call.type == Type::float32 ? attend_as<float> : call.type == Type::float16 ? attend_as<Half> : attend_as<Brain>;
  run(call, task, scratch);
}

inline void merge(const Attention& call, const AttendTask& task, float* scratch) {
  scratch = (float*)(((uintptr_t)scratch + 63) / 64 * 64);
  int64_t group = call.num_heads / call.num_key_heads, rows = (task.last - task.first) * group;
  int64_t stride = partial_floats(call), length = padded(call.value_dim);
  for (int64_t row = 0; row < rows; row++) {
    Softmax merged{kNever, 0};
    const float* partial = task.partial + row * stride;
    for (int64_t part = task.first_part; part <= task.last_part; part++, partial += rows * stride) {
      Softmax one;
      std::memcpy(&one, partial, sizeof(one));
      merge_part(scratch, merged, partial + 2, one, length);
    }
    Worker<float, 0>::finish(call, scratch, merged, task.span->start + task.first + row / group,
                             task.key_head * group + row % group);
  }
}

}  // namespace mlxcel::MLXCEL_LEVEL
