// One vector of floats per level: what the kernels need and nothing more. Included by the level files alone, within
// their namespace's flags; MLXCEL_LEVEL names the namespace, so that no level's code is linked into another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(MLXCEL_AVX512) || defined(MLXCEL_AVX2)
#include <immintrin.h>
#elif defined(MLXCEL_NEON)
#include <arm_neon.h>
#endif

namespace mlxcel::MLXCEL_LEVEL {

inline uint64_t load_bytes(const uint8_t* from, int count) {
  uint64_t word = 0;
  std::memcpy(&word, from, count);
  return word;
}

inline float float_of_bfloat16(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline float float_of_float16(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16;
  uint32_t rest = bits & 0x7fff;
  uint32_t wide;
  float value;
  if (rest >= 0x7c00) {
    wide = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  if (rest < 0x400) {
    value = float(rest) * 0x1p-24f;
    return sign ? -value : value;
  }
  wide = sign | ((rest << 13) + 0x38000000);
  std::memcpy(&value, &wide, 4);
  return value;
}

// To nearest even, of what is in the type's range or not a number.
inline uint16_t bfloat16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return value == value ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(bits >> 16 | 0x40);
}

inline uint16_t float16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x38800000) return sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  // Below the normal range, a whole number of the smallest steps: adding what leaves no room for a fraction rounds it.
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  return sign | uint16_t((magnitude * 0x1p24f + 12582912.0f) - 12582912.0f);
}

#if defined(MLXCEL_AVX512)

using V = __m512;
constexpr int kLanes = 16;
constexpr int kFewRows = 6;
constexpr int kMoreRows = 12;
constexpr int kTileRows = 6;
constexpr int kAttendRows = 4;

inline V zero() { return _mm512_setzero_ps(); }
inline V load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, V v) { _mm512_storeu_ps(to, v); }
inline V all(float value) { return _mm512_set1_ps(value); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V of_bytes(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline V of_bfloat16(const uint16_t* from) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline V of_float16(const uint16_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
inline V of_bfloat16_part(const uint16_t* from, int count) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((1u << count) - 1, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline V of_float16_part(const uint16_t* from, int count) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((1u << count) - 1, from));
}
inline void store_float16(uint16_t* to, V v) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Where a < b the first, elsewhere the second.
inline V where_less(V a, V b, V first, V second) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), second, first);
}

// 32 weights of 4 bits, the even ones first: a table of the sixteen values is looked up by the low bits of a lane.
inline void of_nibbles(const uint8_t* from, float scale, float bias, V out[2]) {
  V sixteen = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  V table = fma(sixteen, all(scale), all(bias));
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
  out[0] = _mm512_permutexvar_ps(bytes, table);
  out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
}

inline V load_part(const float* from, int count) { return _mm512_maskz_loadu_ps((1u << count) - 1, from); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V round(V a) { return _mm512_roundscale_ps(a, 0); }
// Two to the power of a whole number from -127 (taken for minus infinity) to 127.
inline V two_to(V a) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127)), 23));
}

inline float max_of(V v) { return _mm512_reduce_max_ps(v); }

// The sum of each of four vectors, all by the same tree.
inline void sums(const V v[4], float out[4]) {
  V ab = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44), _mm512_shuffle_f32x4(v[0], v[1], 0xee));
  V cd = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44), _mm512_shuffle_f32x4(v[2], v[3], 0xee));
  V abcd = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  V pairs = _mm512_add_ps(abcd, _mm512_permute_ps(abcd, 0x4e));
  V ones = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
  __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, ones)));
}

#elif defined(MLXCEL_AVX2)

using V = __m256;
constexpr int kLanes = 8;
constexpr int kFewRows = 2;
constexpr int kMoreRows = 4;
constexpr int kTileRows = 3;
constexpr int kAttendRows = 2;

inline V zero() { return _mm256_setzero_ps(); }
inline V load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, V v) { _mm256_storeu_ps(to, v); }
inline V all(float value) { return _mm256_set1_ps(value); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V of_bytes(const uint8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline V of_bfloat16(const uint16_t* from) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline V of_float16(const uint16_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
inline void store_float16(uint16_t* to, V v) {
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline V where_less(V a, V b, V first, V second) {
  return _mm256_blendv_ps(second, first, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

inline void of_nibbles(const uint8_t* from, float scale, float bias, V out[4]) {
  __m256i low = _mm256_set1_epi32(15);
  for (int half = 0; half < 2; half++) {
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * half)));
    out[half] = fma(_mm256_cvtepi32_ps(_mm256_and_si256(bytes, low)), all(scale), all(bias));
    out[2 + half] = fma(_mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4)), all(scale), all(bias));
  }
}

inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }
inline V div(V a, V b) { return _mm256_div_ps(a, b); }
inline V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V two_to(V a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), 23));
}

inline void sums(const V v[4], float out[4]) {
  __m256 ab = _mm256_hadd_ps(v[0], v[1]), cd = _mm256_hadd_ps(v[2], v[3]);
  __m256 abcd = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

#else

#if defined(MLXCEL_NEON)

using V = float32x4_t;
constexpr int kFewRows = 4;
constexpr int kMoreRows = 8;
constexpr int kTileRows = 6;
constexpr int kAttendRows = 4;

inline V load(const float* from) { return vld1q_f32(from); }
inline void store(float* to, V v) { vst1q_f32(to, v); }
inline V all(float value) { return vdupq_n_f32(value); }
inline V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
inline V add(V a, V b) { return vaddq_f32(a, b); }
inline V mul(V a, V b) { return vmulq_f32(a, b); }
inline V max(V a, V b) { return vmaxq_f32(a, b); }
inline V min(V a, V b) { return vminq_f32(a, b); }
inline V div(V a, V b) { return vdivq_f32(a, b); }
inline V round(V a) { return vrndnq_f32(a); }
inline V two_to(V a) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(a), vdupq_n_s32(127)), 23));
}
inline V of_bfloat16(const uint16_t* from) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16)); }
inline V of_float16(const uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
inline void store_float16(uint16_t* to, V v) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
inline V where_less(V a, V b, V first, V second) { return vbslq_f32(vcltq_f32(a, b), first, second); }

#else

using V = float __attribute__((vector_size(16)));
using Whole = int32_t __attribute__((vector_size(16)));
constexpr int kFewRows = 2;
constexpr int kMoreRows = 2;
constexpr int kTileRows = 2;
constexpr int kAttendRows = 2;

inline V load(const float* from) {
  V v;
  std::memcpy(&v, from, 16);
  return v;
}
inline void store(float* to, V v) { std::memcpy(to, &v, 16); }
inline V all(float value) { return V{value, value, value, value}; }
inline V fma(V a, V b, V c) { return a * b + c; }
inline V add(V a, V b) { return a + b; }
inline V mul(V a, V b) { return a * b; }
inline V either(Whole which, V a, V b) { return (V)(((Whole)a & which) | ((Whole)b & ~which)); }
inline V max(V a, V b) { return either(a > b, a, b); }
inline V min(V a, V b) { return either(a < b, a, b); }
inline V div(V a, V b) { return a / b; }
// To the nearest whole number, by the trick of adding what leaves no room for a fraction.
inline V round(V a) {
  V shift = all(12582912.0f);
  return (a + shift) - shift;
}
inline V two_to(V a) { return (V)((__builtin_convertvector(a == a ? a : all(0), Whole) + 127) << 23); }
inline V of_bfloat16(const uint16_t* from) {
  return V{float_of_bfloat16(from[0]), float_of_bfloat16(from[1]), float_of_bfloat16(from[2]),
           float_of_bfloat16(from[3])};
}
inline V of_float16(const uint16_t* from) {
  return V{float_of_float16(from[0]), float_of_float16(from[1]), float_of_float16(from[2]),
           float_of_float16(from[3])};
}
inline void store_float16(uint16_t* to, V v) {
  for (int i = 0; i < 4; i++) to[i] = float16_of(v[i]);
}
inline V where_less(V a, V b, V first, V second) { return either(a < b, first, second); }

#endif

constexpr int kLanes = 4;

inline V zero() { return all(0); }
inline V of_bytes(const uint8_t* from) {
  return V{float(from[0]), float(from[1]), float(from[2]), float(from[3])};
}

inline void of_nibbles(const uint8_t* from, float scale, float bias, V out[8]) {
  uint8_t low[16], high[16];
  for (int i = 0; i < 16; i++) low[i] = from[i] & 15, high[i] = from[i] >> 4;
  for (int i = 0; i < 4; i++) {
    out[i] = fma(of_bytes(low + 4 * i), all(scale), all(bias));
    out[4 + i] = fma(of_bytes(high + 4 * i), all(scale), all(bias));
  }
}

inline void sums(const V v[4], float out[4]) {
  for (int i = 0; i < 4; i++) out[i] = (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
}

#endif

#if !defined(MLXCEL_AVX512)
inline V of_bfloat16_part(const uint16_t* from, int count) {
  uint16_t part[kLanes] = {};
  std::memcpy(part, from, count * sizeof(uint16_t));
  return of_bfloat16(part);
}
inline V of_float16_part(const uint16_t* from, int count) {
  uint16_t part[kLanes] = {};
  std::memcpy(part, from, count * sizeof(uint16_t));
  return of_float16(part);
}
inline float max_of(V v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

inline V load_part(const float* from, int count) {
  float part[kLanes] = {};
  std::memcpy(part, from, count * sizeof(float));
  return load(part);
}
#endif

constexpr float kTaylor[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};

// The exponential between -87 (below it is 0) and 88 (above it stays), within two units in the last place.
// A polynomial of degree 6 over half of ln 2 to either side of 0, with the Taylor series' coefficients.
inline V exp(V x) {
  x = min(all(88.0f), max(all(-88.0f), x));  // in this order what is not a number stays so
  V whole = round(mul(x, all(1.44269504f)));
  V rest = fma(whole, all(-0.693359375f), x);
  rest = fma(whole, all(2.12194440e-4f), rest);
  V sum = all(1.0f / 720);
  for (float c : kTaylor) sum = fma(sum, rest, all(c));
  return mul(sum, two_to(whole));
}

// The hyperbolic tangent, within a few units in the last place: near 0 the Taylor series, elsewhere by the exponential.
inline V tanh(V x) {
  V square = mul(x, x), sum = all(62.0f / 2835);
  for (float c : {-17.0f / 315, 2.0f / 15, -1.0f / 3, 1.0f}) sum = fma(sum, square, all(c));
  V far = add(all(1), div(all(-2), add(all(1), exp(add(x, x)))));
  return where_less(square, all(0.0625f), mul(sum, x), far);
}

inline void store_bfloat16(uint16_t* to, V v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < kLanes; i++) to[i] = bfloat16_of(lanes[i]);
}

inline float sum_of(V v) {
  V four[4] = {v, v, v, v};
  float out[4];
  sums(four, out);
  return out[0];
}

}  // namespace mlxcel::MLXCEL_LEVEL
