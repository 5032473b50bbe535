/* Split attention for a row of one token (the increment, or decode, phase).
 *
 * Vectors run along the head. The queries of a group share each read of a key and a value.
 */

#ifndef ORCA_ONE_TOKEN_H
#define ORCA_ONE_TOKEN_H

#include "attention.h"

#define MOST_SHARING 12 /* queries in a group; larger groups are tiles of queries (query_tile.h) */
#define HEADS_AT_ONCE 4 /* key/value heads in an item */
#define KEYS_AT_ONCE 4  /* keys whose scores are computed together */

/* Numbers of sums that fill the registers, 32 or 16, together with the factors. */
#if LANES == 16
#define SCORE_QUERIES 4 /* for KEYS_AT_ONCE */
#define VALUE_SUMS 16   /* queries x parts of the head */
#else
#define SCORE_QUERIES 2
#define VALUE_SUMS 8
#endif

_Static_assert(CHUNK % LANES == 0 && CHUNK % KEYS_AT_ONCE == 0, "whole vectors");

/* A query's softmax over the chunks so far. */
typedef struct {
  vec q[PARTS], out[VALUE_PARTS];
  float top, total, slope;
  const float *relative; /* the head's relative bias, or NULL */
} Running;

/* Computes the scores of KEYS_AT_ONCE keys for `n` queries; n is a constant to the compiler. */
INLINE void score_keys(const kv_type *const *keys, const Running *queries, float *weights, const int n) {
  vec sums[SCORE_QUERIES][KEYS_AT_ONCE];
  UNROLL for (int g = 0; g < n; g++)
    UNROLL for (int c = 0; c < KEYS_AT_ONCE; c++) sums[g][c] = all(0);
  _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++) {
    UNROLL for (int c = 0; c < KEYS_AT_ONCE; c++) {
      const vec key = kept(load(keys[c] + i * LANES));
      UNROLL for (int g = 0; g < n; g++) sums[g][c] += queries[g].q[i] * key;
    }
  }
  UNROLL for (int g = 0; g < n; g++)
    store4(weights + g * CHUNK, sum4(sums[g][0], sums[g][1], sums[g][2], sums[g][3]));
}

/* The scales of a chunk's keys and values of eight bits. */
typedef struct {
#if KV_BITS == 8
  float keys[CHUNK], values[CHUNK];
#endif
} Scales;

static inline void find_chunk_scales(const Attention *a, const int32_t *table, int head, int base, int n, Scales *scales) {
#if KV_BITS == 8
  find_scales(a, a->key_scales, table, head, base, n, scales->keys);
  find_scales(a, a->value_scales, table, head, base, n, scales->values);
#endif
}

/* Turns the scores [CHUNK] of `n` keys from `base` on into weights, and updates the query's top and total. Returns
 * the factor for the values summed so far. */
static inline float soften(const Attention *a, float *weights, int base, int n, int position, const Scales *scales,
                           Running *running) {
#if KV_BITS == 8
  for (int c = 0; c < n; c += LANES) store(weights + c, load(weights + c) * load(scales->keys + c));
#endif
  if (a->soft_cap)
    for (int c = 0; c < n; c += LANES) store(weights + c, capped(load(weights + c), a->soft_cap));
  if (running->slope)
    for (int c = 0; c < n; c += LANES)
      store(weights + c, load(weights + c) + all(running->slope) * (all(base + c - position) + counted()));
  if (running->relative)
    for (int c = 0; c < n; c += LANES)
      store(weights + c, load(weights + c) + relative_bias(running->relative, a->furthest, base + c - position));
  for (int c = n; c % LANES; c++) weights[c] = NOTHING;
  const float shrink = as_weights(weights, n, &running->top, &running->total);
#if KV_BITS == 8
  for (int c = 0; c < n; c += LANES) store(weights + c, load(weights + c) * load(scales->values + c));
#endif
  return shrink;
}

/* Adds the values of `n_keys` keys, times the weights of `n` queries, to `parts` parts of the head from `part` on, and
 * prefetches the next keys meanwhile. n and parts are constants to the compiler. */
INLINE void add_values(const kv_type *const *values, int n_keys, const float *weights, const float *shrink,
                       Running *queries, const kv_type *const *next, int part, const int n, const int parts) {
  vec sums[SCORE_QUERIES][VALUE_SUMS];
  UNROLL for (int g = 0; g < n; g++)
    UNROLL for (int i = 0; i < parts; i++) sums[g][i] = queries[g].out[part + i] * all(shrink[g]);
  for (int c = 0; c < n_keys; c++) {
    if (next) fetch(next[c]);
    vec factors[SCORE_QUERIES];
    UNROLL for (int g = 0; g < n; g++) factors[g] = kept(all(weights[g * CHUNK + c]));
    UNROLL for (int i = 0; i < parts; i++) {
      const vec value = kept(load(values[c] + (part + i) * LANES));
      UNROLL for (int g = 0; g < n; g++) sums[g][i] += factors[g] * value;
    }
  }
  UNROLL for (int g = 0; g < n; g++)
    UNROLL for (int i = 0; i < parts; i++) queries[g].out[part + i] = sums[g][i];
}

/* Adds values to all parts of the head, as many at a time as the registers hold. */
INLINE void add_all_values(const kv_type *const *values, int n_keys, const float *weights, const float *shrink,
                           Running *queries, const kv_type *const *next, const int n) {
  const int parts = lesser(VALUE_SUMS / n, VALUE_PARTS), rest = VALUE_PARTS % parts;
  for (int part = 0; part + parts <= VALUE_PARTS; part += parts, next = NULL)
    add_values(values, n_keys, weights, shrink, queries, next, part, n, parts);
  if (rest) add_values(values, n_keys, weights, shrink, queries, next, VALUE_PARTS - rest, n, rest);
}

/* Attends to a chunk of a head's keys, `n` from `base` on, for all queries of the group, which are at `position`.
 * Prefetches the values while it computes scores, and the `next` keys while it adds values. */
static inline void attend_chunk(const Attention *a, const kv_type *const *keys, const kv_type *const *values,
                                const kv_type *const *next, const Scales *scales, int base, int n, int position,
                                Running *queries) {
  float weights[MOST_SHARING * CHUNK], shrink[MOST_SHARING]; /* weights [G][CHUNK], at first the scores */
  const int group = a->group;
  for (int c = 0; c < n; c += KEYS_AT_ONCE) {
    UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) fetch(values[c + i]);
    int g = 0;
    for (; g + SCORE_QUERIES <= group; g += SCORE_QUERIES)
      score_keys(keys + c, queries + g, weights + g * CHUNK + c, SCORE_QUERIES);
    switch (group - g) {
#if SCORE_QUERIES > 2
      case 3: score_keys(keys + c, queries + g, weights + g * CHUNK + c, 3); break;
      case 2: score_keys(keys + c, queries + g, weights + g * CHUNK + c, 2); break;
#endif
      case 1: score_keys(keys + c, queries + g, weights + g * CHUNK + c, 1); break;
    }
  }
  for (int g = 0; g < group; g++)
    shrink[g] = soften(a, weights + g * CHUNK, base, n, position, scales, queries + g);
  int g = 0;
  for (; g + SCORE_QUERIES <= group; g += SCORE_QUERIES, next = NULL)
    add_all_values(values, n, weights + g * CHUNK, shrink + g, queries + g, next, SCORE_QUERIES);
  switch (group - g) {
#if SCORE_QUERIES > 2
    case 3: add_all_values(values, n, weights + g * CHUNK, shrink + g, queries + g, next, 3); break;
    case 2: add_all_values(values, n, weights + g * CHUNK, shrink + g, queries + g, next, 2); break;
#endif
    case 1: add_all_values(values, n, weights + g * CHUNK, shrink + g, queries + g, next, 1); break;
  }
}

/* Computes a row of one token for `n_heads` key/value heads, which alternate at each chunk. */
static void attend_one(const Attention *a, int row, int first, int n_heads) {
  const int length = a->kv_length[row], token = a->row_start[row], group = a->group;
  const int32_t *table = a->block_table + (size_t)row * a->max_blocks;
  Running heads[HEADS_AT_ONCE][MOST_SHARING];
  for (int h = 0; h < n_heads; h++)
    for (int g = 0; g < group; g++) {
      Running *running = &heads[h][g];
      running->top = first_score(a, g, first + h, &running->total);
      running->slope = slope(a, g, first + h);
      running->relative = relative_of(a, first + h);
      const q_type *q = query(a, token, g, first + h);
      for (int i = 0; i < PARTS; i++) running->q[i] = load(q + i * LANES) * all(a->scale);
      for (int i = 0; i < VALUE_PARTS; i++) running->out[i] = all(0);
    }
  int base = first_key(a, length - 1), n = lesser(length - base, CHUNK), h = 0;
  const kv_type *values[CHUNK], *keys[2][CHUNK]; /* this step's keys and the next step's */
  Scales scales;
  find(a, a->keys, table, first, base, n, keys[0]);
  for (int step = 0; n > 0; step++) {
    const int last = h + 1 == n_heads, next_h = last ? 0 : h + 1, next_base = last ? base + n : base;
    const int next_n = lesser(length - next_base, CHUNK);
    find(a, a->values, table, first + h, base, n, values);
    find_chunk_scales(a, table, first + h, base, n, &scales);
    if (next_n > 0) find(a, a->keys, table, first + next_h, next_base, next_n, keys[(step + 1) % 2]);
    attend_chunk(a, keys[step % 2], values, next_n > 0 ? keys[(step + 1) % 2] : NULL, &scales, base, n, length - 1,
                 heads[h]);
    h = next_h;
    base = next_base;
    n = next_n;
  }
  for (int h = 0; h < n_heads; h++)
    for (int g = 0; g < group; g++) {
      q_type *to = result_of(a, token, g, first + h);
      for (int i = 0; i < VALUE_PARTS; i++) store(to + i * LANES, heads[h][g].out[i] * all(1 / heads[h][g].total));
    }
}

#endif
