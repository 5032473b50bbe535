/* Packed weights (families/packed_form.py), and a panel of them, unpacked for a product.
 *
 * A panel has LANES rows of a weight, one a lane, and up to PANEL_INPUTS inputs: eight bits a code, four inputs' codes
 * in a lane's 32 bits, with scales and minima as float32; or with FLOATS up to FLOAT_INPUTS inputs as scaled floats, or
 * with PAIRS as bfloat16 without scales, two inputs in a lane's 32 bits. It stays in the first cache.
 *
 * Macros say what the planes hold:
 *
 *   CODE    4: two codes in a byte; 8: int8, or FP8
 *   FLOATS  1: codes are FP8, e4m3; 0: they are integers
 *   HIGH    further bits of a code: 0, 1 or 2
 *   SCALE   FLOAT16, BFLOAT16, FLOAT32, E8M0, SIX_BITS or Q6_K
 *   MINIMA  what is added to a block's numbers: FIXED: -scale * ZERO; MINS: a plane; ZEROS: -scale * a plane's zero
 *   TABLE   1: codes are places in a table of int8, whose 16 bytes are TABLE_0 to TABLE_3; 0: they are numbers
 */

#ifndef ORCA_PACKED_PANEL_H
#define ORCA_PACKED_PANEL_H

#include <stdbool.h>

#include "vectors.h"

#define FLOAT16 1
#define BFLOAT16 2
#define FLOAT32 3
#define E8M0 4
#define SIX_BITS 5
#define Q6_K 6

#define FIXED 0
#define MINS 1
#define ZEROS 2

/* Tests set this to 0, and LANES to 8. */
#ifndef VNNI
#if LANES == 16 && defined(__AVX512VNNI__) || LANES == 8 && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define VNNI 1
#else
#define VNNI 0
#endif
#endif

/* Whether FP8 codes are multiplied as bfloat16. Tests set this to 0. */
#ifndef PAIRS
#if FLOATS && LANES == 16 && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define PAIRS 1
#else
#define PAIRS 0
#endif
#endif

#if LANES == 16 && !(defined(__AVX512BW__) && defined(__AVX512VL__))
#error "packed weights need a processor with AVX-512 BW and VL, or with AVX2"
#endif

/* Vectors of outputs that are computed together. Two halve the loads of x, where registers have room for their sums. */
#define STRIPS (FLOATS || (TOKEN_SCALE && VNNI && LANES == 16) ? 2 : 1)

#define RUN 32       /* inputs of x with a scale, and those whose nibbles are 16 bytes */
#define SUPER 256    /* inputs with a super scale */
#ifndef PANEL_INPUTS /* a multiple of SUPER; tests set it lower */
#define PANEL_INPUTS (TOKEN_SCALE ? 768 : 1024)
#endif
/* Inputs of a panel of floats or of pairs: two panels, and x of some tokens, stay in the first cache. */
#define FLOAT_INPUTS ((PAIRS ? 4096 : 2048) / LANES)

#if SCALE == Q6_K
#define SCALED 16 /* inputs with a scale in a panel */
#else
#define SCALED 32
#endif

/* Codes that may be negative: int8, and a table's numbers. VNNI takes them as unsigned, with 128 added. */
#define SIGNED ((CODE == 8 && !FLOATS) || TABLE)
/* What an integer product has too much, in sums of x. */
#define EXCESS ((SIGNED && VNNI ? 128 : 0) + (MINIMA == FIXED ? ZERO : 0))
#define HAS_MINS (MINIMA != FIXED)

typedef struct {
  const uint8_t *codes, *high, *scales, *super_scales, *super_mins, *mins, *zeros;
  size_t n_in;
  size_t n_scales; /* of a row; without superblocks */
} Planes;

typedef struct {
#if PAIRS
  ivec pairs[FLOAT_INPUTS / 2 + 2 * LANES] __attribute__((aligned(64)));
  size_t runs_of_scale; /* after which a scale may change */
#elif FLOATS
  vec numbers[FLOAT_INPUTS + 4 * LANES] __attribute__((aligned(64)));
#else
  ivec codes[PANEL_INPUTS / 4 + LANES] __attribute__((aligned(64)));
#endif
  vec scales[PANEL_INPUTS / SCALED + LANES] __attribute__((aligned(64)));
#if HAS_MINS
  vec mins[PANEL_INPUTS / SCALED + LANES] __attribute__((aligned(64)));
#endif
} Panel;

INLINE ivec all_ints(int32_t x) {
#if LANES == 16
  return (ivec)_mm512_set1_epi32(x);
#else
  return (ivec)_mm256_set1_epi32(x);
#endif
}

INLINE vec as_floats(ivec v) { return __builtin_convertvector(v, vec); }

/* ---- rows into lanes ---- */

/* The next LANES dwords; if fewer are `left`, they are filled up with zeros. */
INLINE ivec dwords_at(const uint8_t *from, size_t left) {
#if LANES == 16
  return (ivec)_mm512_maskz_loadu_epi32(left < 16 ? (1u << left) - 1 : 0xffff, from);
#else
  if (left >= 8) return (ivec)_mm256_loadu_si256((const void *)from);
  const __m256i is_there = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return (ivec)_mm256_maskload_epi32((const void *)from, is_there);
#endif
}

/* `row` + `stride`, computed here: GCC would otherwise keep the addresses of all rows, for which it lacks registers. */
INLINE const uint8_t *next_row(const uint8_t *row, size_t stride) {
  row += stride;
  __asm__("" : "+r"(row));
  return row;
}

/* Makes `tile` the dwords `j`, `j` + 1, ... of LANES rows that are `stride` bytes apart and have n dwords; the same
 * dwords of the rows that are unpacked after the panels' products are prefetched. */
INLINE void dwords_of_rows(const uint8_t *from, size_t stride, size_t j, size_t n, vec tile[LANES]) {
  const uint8_t *row = from + 4 * j;
  const size_t ahead = STRIPS * LANES * stride;
  UNROLL for (int i = 0; i < LANES; i++, row = next_row(row, stride)) {
    if (LANES == 16 || j % 16 == 0) __builtin_prefetch(row + ahead, 0, 2);
    tile[i] = (vec)dwords_at(row, n - j);
  }
  transpose(tile);
}

/* to[j] is dword j of LANES rows, for n dwords, then zeros up to a multiple of LANES. */
INLINE void dwords_to_lanes(const uint8_t *from, size_t stride, size_t n, ivec *to) {
  for (size_t j = 0; j < n; j += LANES) {
    vec tile[LANES];
    dwords_of_rows(from, stride, j, n, tile);
    UNROLL for (int i = 0; i < LANES; i++) to[j + i] = (ivec)tile[i];
  }
}

/* ---- numbers of rows into lanes: `left` of a row's next LANES, then zeros ---- */

INLINE vec float32_at(const uint8_t *from, size_t left) { return (vec)dwords_at(from, left); }

#if LANES == 16
INLINE __m256i words_at(const uint8_t *from, size_t left) {
  return _mm256_maskz_loadu_epi16(left < 16 ? (1u << left) - 1 : 0xffff, from);
}
#define WIDENED_INTS _mm512_cvtepu16_epi32
#define WIDENED_FLOATS _mm512_cvtph_ps
#else
/* The `size` bytes of a number. */
INLINE uint64_t number_at(const uint8_t *from, int size) {
  uint64_t number = 0;
  memcpy(&number, from, size);
  return number;
}

/* n bytes, at most 8, then zeros: two loads that may overlap, since a call of memcpy would take longer than the rest. */
INLINE uint64_t few_bytes_at(const uint8_t *from, size_t n) {
  if (n >= 8) return number_at(from, 8);
  if (n >= 4) return number_at(from, 4) | number_at(from + n - 4, 4) << 8 * (n - 4);
  if (n >= 2) return number_at(from, 2) | number_at(from + n - 2, 2) << 8 * (n - 2);
  return n ? *from : 0;
}

INLINE __m128i words_at(const uint8_t *from, size_t left) {
  if (left >= 8) return _mm_loadu_si128((const void *)from);
  return _mm_set_epi64x(left > 4 ? few_bytes_at(from + 8, 2 * left - 8) : 0, few_bytes_at(from, 2 * left));
}
#define WIDENED_INTS _mm256_cvtepu16_epi32
#define WIDENED_FLOATS _mm256_cvtph_ps
#endif

/* 16-bit numbers, as ints. */
INLINE ivec halves_at(const uint8_t *from, size_t left) { return (ivec)WIDENED_INTS(words_at(from, left)); }

INLINE vec bfloat16_at(const uint8_t *from, size_t left) { return (vec)(halves_at(from, left) << 16); }

INLINE vec float16_at(const uint8_t *from, size_t left) { return (vec)WIDENED_FLOATS(words_at(from, left)); }

/* Bytes, with their sign. */
INLINE ivec bytes_at(const uint8_t *from, size_t left) {
#if LANES == 16
  return (ivec)_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(left < 16 ? (1u << left) - 1 : 0xffff, from));
#else
  return (ivec)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(few_bytes_at(from, left)));
#endif
}

INLINE vec int8_at(const uint8_t *from, size_t left) { return as_floats(bytes_at(from, left)); }

/* 2 ^ (e - 128); of 0 and 1 that is subnormal. */
INLINE vec e8m0_at(const uint8_t *from, size_t left) {
  const ivec e = bytes_at(from, left) & 0xff;
  return choose(e < 2, (vec)(all_ints(1 << 21) << e), (vec)((e - 1) << 23));
}

/* to[j] is number `first` + j of rows `out`, `out` + 1, ..., which have n_of_row numbers of `size` bytes, for n numbers;
 * up to a multiple of LANES others may follow. Without masks the last tile starts early enough to be whole. */
INLINE void numbers_to_lanes(const uint8_t *plane, size_t size, size_t n_of_row, size_t out, size_t first, size_t n,
                             vec numbers_at(const uint8_t *, size_t), vec *to) {
  if (n_of_row == 1) {
    to[0] = numbers_at(plane + out * size, LANES);
    return;
  }
  for (size_t j = 0; j < n; j += LANES) {
    const size_t at = LANES == 8 && j + LANES > n && n > LANES ? n - LANES : j;
    vec tile[LANES];
    const uint8_t *row = plane + (out * n_of_row + first + at) * size;
    UNROLL for (int i = 0; i < LANES; i++, row = next_row(row, n_of_row * size)) tile[i] = numbers_at(row, n - at);
    transpose(tile);
    UNROLL for (int i = 0; i < LANES; i++) to[at + i] = tile[i];
  }
}

#if SCALE == FLOAT32
#define SCALE_BYTES 4
#define scale_at float32_at
#elif SCALE == BFLOAT16
#define SCALE_BYTES 2
#define scale_at bfloat16_at
#elif SCALE == E8M0
#define SCALE_BYTES 1
#define scale_at e8m0_at
#else
#define SCALE_BYTES 2
#define scale_at float16_at
#endif

/* ---- codes ---- */

/* The numbers of codes below 16, or below 64 with `high` bits. */
INLINE ivec numbers_of(ivec codes) {
#if !TABLE
  return codes;
#else
  const __m128i table = _mm_xor_si128(_mm_setr_epi32(TABLE_0, TABLE_1, TABLE_2, TABLE_3),
                                      _mm_set1_epi8(VNNI ? -128 : 0)); /* with 128 added */
#if LANES == 16
  return (ivec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#else
  return (ivec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#endif
#endif
}

#if PAIRS
#define SIXTEEN(byte) byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte
#define LOWER_OF_NORMAL 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0

/* The bytes of a code's number in bfloat16, by the code without its sign. The first eight are subnormal in FP8, which
 * shifting would leave subnormal, and so zero to the product. */
static const uint8_t UPPER[128] = {0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c,
                                   0x3c, 0x3c, SIXTEEN(0x3d), SIXTEEN(0x3e), SIXTEEN(0x3f), SIXTEEN(0x40),
                                   SIXTEEN(0x41), SIXTEEN(0x42), SIXTEEN(0x43)};
static const uint8_t LOWER[128] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0,
                                   0xe0, 0xf0, LOWER_OF_NORMAL, LOWER_OF_NORMAL, LOWER_OF_NORMAL, LOWER_OF_NORMAL,
                                   LOWER_OF_NORMAL, LOWER_OF_NORMAL, LOWER_OF_NORMAL};

/* The numbers of four FP8 codes a lane as bfloat16: the first and third, then the second and fourth. */
INLINE void pairs_of(ivec codes, ivec pairs[2]) {
  const __m512i four = (__m512i)codes;
  const __m512i magnitudes =
      _mm512_permutex2var_epi8(_mm512_loadu_si512(UPPER), four, _mm512_loadu_si512(UPPER + 64));
  const __m512i lower = _mm512_permutex2var_epi8(_mm512_loadu_si512(LOWER), four, _mm512_loadu_si512(LOWER + 64));
  const __m512i upper = (__m512i)((ivec)magnitudes | (codes & (int32_t)0x80808080));
  const __mmask64 even = 0x5555555555555555;
  pairs[0] = (ivec)_mm512_mask_mov_epi8(_mm512_slli_epi16(upper, 8), even, lower);
  pairs[1] = (ivec)_mm512_mask_mov_epi8(upper, even, _mm512_srli_epi16(lower, 8));
}
#elif FLOATS
#define MOVED 120 /* a code's bits, where a float has them, are its number times 2^-MOVED; a NaN's are 480's */

/* Number j of four FP8 codes, times 2^-MOVED. */
INLINE vec moved_number(ivec codes, int j) {
  return (vec)((codes << (24 - 8 * j)) >> 4 & (int32_t)0x87f00000);
}
#endif

#if FLOATS
/* The sums of the eight lanes of each of four rows. */
INLINE vec4 sums_of_rows(const vec8 rows[4]) {
  const __m256 pairs[2] = {_mm256_hadd_ps((__m256)rows[0], (__m256)rows[1]),
                           _mm256_hadd_ps((__m256)rows[2], (__m256)rows[3])};
  const __m256 fours = _mm256_hadd_ps(pairs[0], pairs[1]);
  return (vec4)_mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1));
}
#endif

/* Four bits, each the fifth of a byte. */
INLINE ivec spread(ivec bits) { return (bits * 0x00204081 & 0x01010101) << 4; }

/* Unpacks the codes of n inputs from `k` on, of LANES rows from `out` on. With scaled floats the panel's scales are
 * there. */
INLINE void unpack_codes(const Planes *from, size_t out, size_t k, size_t n, Panel *panel) {
#if CODE == 8
  const size_t n_dwords = n / 4;
  for (size_t j = 0; j < n_dwords; j += LANES) {
    vec tile[LANES];
    dwords_of_rows(from->codes + out * from->n_in + k, from->n_in, j, n_dwords, tile);
#if PAIRS
    UNROLL for (int i = 0; i < LANES; i++) pairs_of((ivec)tile[i], panel->pairs + 2 * (j + i));
#elif FLOATS
    UNROLL for (int i = 0; i < LANES; i++) {
      const vec scale = panel->scales[4 * (j + i) / RUN];
      UNROLL for (int c = 0; c < 4; c++)
        panel->numbers[4 * (j + i) + c] = moved_number((ivec)tile[i], c) * all(0x1p120f) * scale;
    }
#else
    UNROLL for (int i = 0; i < LANES; i++)
      panel->codes[j + i] = SIGNED && VNNI ? (ivec)tile[i] ^ (ivec)all_ints(0x80808080) : (ivec)tile[i];
#endif
  }
#else
  const size_t stride = from->n_in / 2, n_dwords = n / 8;
#if HIGH
  const size_t high_stride = from->n_in * HIGH / 8;
  ivec high[PANEL_INPUTS / RUN * HIGH + LANES];
  dwords_to_lanes(from->high + out * high_stride + k * HIGH / 8, high_stride, n * HIGH / RUN, high);
#endif
  for (size_t j = 0; j < n_dwords; j += LANES) {
    vec tile[LANES];
    dwords_of_rows(from->codes + out * stride + k / 2, stride, j, n_dwords, tile);
    UNROLL for (int i = 0; i < LANES; i++) {
      const size_t run = (j + i) / 4, quarter = i % 4;
      ivec low = (ivec)tile[i] & 0x0f0f0f0f, up = (ivec)((uvec)tile[i] >> 4) & 0x0f0f0f0f;
#if HIGH == 1
      low |= spread(high[run] >> 4 * quarter & 15);
      up |= spread(high[run] >> (16 + 4 * quarter) & 15);
#elif HIGH == 2
      const ivec bits = high[2 * run + quarter % 2];
      low |= (bits >> (quarter / 2 * 2) & 0x03030303) << 4;
      up |= (bits >> (4 + quarter / 2 * 2) & 0x03030303) << 4;
#endif
      panel->codes[8 * run + quarter] = numbers_of(low);
      panel->codes[8 * run + 4 + quarter] = numbers_of(up);
    }
  }
#endif
}

/* ---- scales and minima ---- */

#if SCALE == SIX_BITS
INLINE void unpack_scales(const Planes *from, size_t out, size_t k, size_t n, Panel *panel) {
  const size_t n_of_row = from->n_in / SUPER, first = k / SUPER, n_super = n / SUPER;
  ivec bits[PANEL_INPUTS / SUPER * 3 + LANES];
  vec scales[PANEL_INPUTS / SUPER + LANES], mins[PANEL_INPUTS / SUPER + LANES];
  dwords_to_lanes(from->scales + (out * n_of_row + first) * 12, n_of_row * 12, n_super * 3, bits);
  numbers_to_lanes(from->super_scales, 2, n_of_row, out, first, n_super, float16_at, scales);
  numbers_to_lanes(from->super_mins, 2, n_of_row, out, first, n_super, float16_at, mins);
  for (size_t s = 0; s < n_super; s++) {
    /* In the first two dwords' bytes are the lower six bits of scales and minima 0 to 3, and above them the upper two
     * of 4 to 7, whose lower four bits share the third dword's bytes. */
    const ivec a = bits[3 * s], b = bits[3 * s + 1], c = bits[3 * s + 2];
    const ivec six[2][2] = {{a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)},
                            {b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)}};
    UNROLL for (int i = 0; i < 8; i++) {
      panel->scales[8 * s + i] = scales[s] * as_floats(six[0][i / 4] >> 8 * (i % 4) & 0xff);
      panel->mins[8 * s + i] = -mins[s] * as_floats(six[1][i / 4] >> 8 * (i % 4) & 0xff);
    }
  }
}
#elif SCALE == Q6_K
INLINE void unpack_scales(const Planes *from, size_t out, size_t k, size_t n, Panel *panel) {
  const size_t n_of_row = from->n_in / SUPER, first = k / SUPER, n_super = n / SUPER;
  ivec bytes[PANEL_INPUTS / SUPER * 4 + LANES];
  vec scales[PANEL_INPUTS / SUPER + LANES];
  dwords_to_lanes(from->scales + (out * n_of_row + first) * 16, n_of_row * 16, n_super * 4, bytes);
  numbers_to_lanes(from->super_scales, 2, n_of_row, out, first, n_super, float16_at, scales);
  for (size_t s = 0; s < n_super; s++)
    UNROLL for (int i = 0; i < 16; i++)
      panel->scales[16 * s + i] = scales[s] * as_floats(bytes[4 * s + i / 4] << (24 - 8 * (i % 4)) >> 24);
}
#else
INLINE void unpack_scales(const Planes *from, size_t out, size_t k, size_t n, Panel *panel) {
  const size_t n_of_row = from->n_scales, scaled = from->n_in / n_of_row;
  const size_t first = k / scaled, n_scales = (k + n - 1) / scaled + 1 - first;
  numbers_to_lanes(from->scales, SCALE_BYTES, n_of_row, out, first, n_scales, scale_at, panel->scales);
#if MINIMA == MINS
  numbers_to_lanes(from->mins, SCALE_BYTES, n_of_row, out, first, n_scales, scale_at, panel->mins);
#elif MINIMA == ZEROS
  numbers_to_lanes(from->zeros, 1, n_of_row, out, first, n_scales, int8_at, panel->mins);
#endif
#if PAIRS
  const size_t runs = scaled / RUN;
  panel->runs_of_scale = n_of_row == 1 ? n / RUN : runs & -runs; /* panels start at multiples of powers of two */
#endif
  for (size_t run = n / RUN; run-- > 0;) { /* the last first: a scale for several runs is repeated in place */
    const size_t at = (k + RUN * run) / scaled - first;
    const vec scale = panel->scales[at];
#if MINIMA == MINS
    panel->mins[run] = panel->mins[at];
#elif MINIMA == ZEROS
    panel->mins[run] = -scale * panel->mins[at];
#endif
    panel->scales[run] = scale;
  }
}
#endif

#endif
