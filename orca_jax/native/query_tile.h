/* Split attention for a tile of several queries of a row (the initiation, or prefill, phase, and large groups).
 *
 * Vectors run across the queries for the scores, and along the head for the sums of values. Queries are numbered
 * token by token, and by group within a token, so the queries of a group share each read of a key and a value.
 */

#ifndef ORCA_QUERY_TILE_H
#define ORCA_QUERY_TILE_H

#include "attention.h"

/* Numbers of sums that fill the registers, 32 or 16, together with the factors. */
#if LANES == 16
#define TILE 32       /* queries: two vectors */
#define STRIP 8       /* keys of one block whose scores are computed together */
#define PANEL 4       /* queries, */
#define PANEL_PARTS 4 /* and parts of the head, whose values are summed together */
#else
#define TILE 24
#define STRIP 4
#define PANEL 6
#define PANEL_PARTS 2
#endif

_Static_assert(HEAD_SIZE % 16 == 0 && VALUE_SIZE % 16 == 0 && BLOCK_SIZE % STRIP == 0, "unsupported() in split_attention.py refuses these");
_Static_assert(TILE % LANES == 0 && TILE % PANEL == 0 && CHUNK % STRIP == 0, "whole vectors, panels and strips");

/* The keys that a tile's queries see. */
typedef struct {
  int32_t first[TILE], last[TILE]; /* each query's first and last key */
  float slopes[TILE];
  int first_any, last_any, first_all, last_all; /* the keys that any query sees, and that all queries see */
  int position;          /* the tile's first query's */
  const float *relative; /* the head's relative bias, or NULL */
} Seen;

/* Computes the scores of a strip of keys from `position` on, for `vectors` of a tile's queries, a constant to the
 * compiler. Keys of eight bits have `scales`. */
INLINE void score_strip(const Attention *a, const float *key, const float *scales, float q[HEAD_SIZE][TILE],
                        const Seen *seen, int position, float weights[STRIP][TILE], const int vectors) {
  vec scores[STRIP][TILE / LANES];
  UNROLL for (int i = 0; i < STRIP; i++)
    UNROLL for (int g = 0; g < vectors; g++) scores[i][g] = all(0);
  for (int d = 0; d < HEAD_SIZE; d++) {
    vec queries[TILE / LANES];
    UNROLL for (int g = 0; g < vectors; g++) queries[g] = kept(load(&q[d][g * LANES]));
    UNROLL for (int i = 0; i < STRIP; i++) {
      const vec element = all(key[i * HEAD_SIZE + d]);
      UNROLL for (int g = 0; g < vectors; g++) scores[i][g] += element * queries[g];
    }
  }
#if KV_BITS == 8
  UNROLL for (int i = 0; i < STRIP; i++)
    UNROLL for (int g = 0; g < vectors; g++) scores[i][g] *= all(scales[i] * KV_UNIT);
#endif
  UNROLL for (int i = 0; i < STRIP; i++)
    UNROLL for (int g = 0; g < vectors; g++) store(&weights[i][g * LANES], scores[i][g]);
  if (a->soft_cap)
    for (int i = 0; i < STRIP; i++)
      for (int g = 0; g < vectors; g++) {
        float *score = &weights[i][g * LANES];
        store(score, capped(load(score), a->soft_cap));
      }
  if (a->slopes)
    for (int i = 0; i < STRIP; i++)
      for (int g = 0; g < vectors; g++) {
        float *score = &weights[i][g * LANES];
        const ivec distance = position + i - *(const ivec *)&seen->last[g * LANES];
        store(score, load(score) + load(&seen->slopes[g * LANES]) * __builtin_convertvector(distance, vec));
      }
  if (seen->relative) /* then G is 1, and queries are at adjacent positions */
    for (int i = 0; i < STRIP; i++)
      for (int g = 0; g < vectors; g++) {
        float *score = &weights[i][g * LANES];
        const int furthest_query = seen->position + (g + 1) * LANES - 1;
        store(score, load(score) + reversed(relative_bias(seen->relative, a->furthest, position + i - furthest_query)));
      }
  if (position >= seen->first_all && position + STRIP - 1 <= seen->last_all) return;
  for (int i = 0; i < STRIP; i++)
    for (int g = 0; g < vectors; g++) {
      float *score = &weights[i][g * LANES];
      const ivec first = *(const ivec *)&seen->first[g * LANES], last = *(const ivec *)&seen->last[g * LANES];
      /* Slots outside may hold another row's NaN, which choosing drops and arithmetic would not. */
      store(score, choose((first <= position + i) & (last >= position + i), load(score), all(NOTHING)));
    }
}

/* Adds the values of a chunk for PANEL queries and `parts` parts of the head, a constant to the compiler. */
INLINE void add_panel(const kv_type *const *slots, int skip, int n, float weights[][TILE], const float *shrink,
                      float out[][VALUE_SIZE], int m, int part, const int parts) {
  vec sums[PANEL][PANEL_PARTS];
  UNROLL for (int i = 0; i < PANEL; i++)
    UNROLL for (int d = 0; d < parts; d++) sums[i][d] = load(&out[m + i][(part + d) * LANES]) * all(shrink[m + i]);
  for (int c = skip; c < n; c++) {
    const kv_type *value = slots[c - skip] + part * LANES;
    vec values[PANEL_PARTS];
    UNROLL for (int d = 0; d < parts; d++) values[d] = kept(load(value + d * LANES));
    UNROLL for (int i = 0; i < PANEL; i++) {
      const vec weight = all(weights[c][m + i]);
      UNROLL for (int d = 0; d < parts; d++) sums[i][d] += weight * values[d];
    }
  }
  UNROLL for (int i = 0; i < PANEL; i++)
    UNROLL for (int d = 0; d < parts; d++) store(&out[m + i][(part + d) * LANES], sums[i][d]);
}

/* Computes a tile of at most `vectors` vectors of queries, a constant to the compiler. */
INLINE void attend_vectors(const Attention *a, Tile tile, int head, const int vectors) {
  const int begin = a->row_start[tile.row], length = a->kv_length[tile.row], group = a->group;
  const int before = length - (a->row_start[tile.row + 1] - begin); /* positions before the row's first token */
  const int32_t *table = a->block_table + (size_t)tile.row * a->max_blocks;
  float q[HEAD_SIZE][TILE], weights[CHUNK][TILE], out[TILE][VALUE_SIZE], shrink[TILE], tops[TILE], totals[TILE];
  Seen seen;
  memset(weights, 0, sizeof weights);
  memset(shrink, 0, sizeof shrink);
  memset(out, 0, sizeof out);
  const q_type *queries[TILE];
  for (int m = 0; m < vectors * LANES; m++) {
    const int number = tile.start + lesser(m, tile.n - 1), token = number / group, g = number % group;
    queries[m] = query(a, begin + token, g, head);
    seen.last[m] = a->causal ? before + token : length - 1;
    seen.first[m] = first_key(a, seen.last[m]);
    seen.slopes[m] = slope(a, g, head);
    tops[m] = first_score(a, g, head, &totals[m]);
  }
  for (int g = 0; g < vectors; g++)
    for (int i = 0; i < PARTS; i++) {
      vec part[LANES];
      UNROLL for (int m = 0; m < LANES; m++) part[m] = load(queries[g * LANES + m] + i * LANES) * all(a->scale);
      transpose(part);
      UNROLL for (int d = 0; d < LANES; d++) store(&q[i * LANES + d][g * LANES], part[d]);
    }
  seen.first_any = seen.first[0];
  seen.last_any = seen.last[tile.n - 1];
  seen.first_all = seen.first[tile.n - 1];
  seen.last_all = seen.last[0];
  seen.position = before + tile.start; /* with a relative bias G is 1 */
  seen.relative = relative_of(a, head);
  vec top[TILE / LANES], total[TILE / LANES];
  for (int g = 0; g < vectors; g++) {
    top[g] = load(&tops[g * LANES]);
    total[g] = load(&totals[g * LANES]);
  }
  /* Chunks start at fixed positions, so that a query's result does not depend on where its tile starts. With a short
   * window a query may see no key of the first chunks. Its largest score is then NOTHING, and its sums are wrong until
   * it sees a key: then they are multiplied by e^NOTHING, which is 0. */
  for (int base = seen.first_any / CHUNK * CHUNK; base <= seen.last_any; base += CHUNK) {
    const int n = lesser(seen.last_any + 1 - base, CHUNK), skip = greater(0, seen.first_any - base);
    const kv_type *values[CHUNK];
    find(a, a->values, table, head, base + skip, n - skip, values);
    const float *key_scales = NULL;
#if KV_BITS == 8
    float value_scales[CHUNK];
    find_scales(a, a->value_scales, table, head, base + skip, n - skip, value_scales);
#endif
    for (int c = skip / STRIP * STRIP; c < n; c += STRIP) { /* a block holds whole strips */
      const kv_type *slots = slot(a, a->keys, table, head, base + c);
      for (int i = 0; i < STRIP; i++) fetch(values[greater(0, c + i - skip)]);
#if KV_BITS == 8
      key_scales = a->key_scales + place_of(a, table, head, base + c);
#endif
#if KV_BITS == 32
      const float *key = slots;
#else
      float key[STRIP * HEAD_SIZE];
      for (int i = 0; i < STRIP * HEAD_SIZE; i += LANES) store(key + i, load(slots + i));
#endif
      score_strip(a, key, key_scales, q, &seen, base + c, &weights[c], vectors);
    }
    for (int g = 0; g < vectors; g++) {
      vec new_top = top[g], sums = all(0);
      for (int c = skip; c < n; c++) new_top = larger(new_top, load(&weights[c][g * LANES]));
      for (int c = skip; c < n; c++) {
        const vec weight = exponential(load(&weights[c][g * LANES]) - new_top);
        sums += weight;
#if KV_BITS == 8
        store(&weights[c][g * LANES], weight * all(value_scales[c - skip]));
#else
        store(&weights[c][g * LANES], weight);
#endif
      }
      const vec shrunk = exponential(top[g] - new_top);
      store(&shrink[g * LANES], shrunk);
      total[g] = total[g] * shrunk + sums;
      top[g] = new_top;
    }
    for (int m = 0; m < tile.n; m += PANEL) {
      int part = 0;
      for (; part + PANEL_PARTS <= VALUE_PARTS; part += PANEL_PARTS)
        add_panel(values, skip, n, weights, shrink, out, m, part, PANEL_PARTS);
      if (VALUE_PARTS % PANEL_PARTS)
        add_panel(values, skip, n, weights, shrink, out, m, part, VALUE_PARTS % PANEL_PARTS);
    }
  }
  for (int g = 0; g < vectors; g++) store(&totals[g * LANES], total[g]);
  for (int m = 0; m < tile.n; m++) {
    const int number = tile.start + m;
    q_type *to = result_of(a, begin + number / group, number % group, head);
    for (int d = 0; d < VALUE_PARTS; d++) store(to + d * LANES, load(&out[m][d * LANES]) * all(1 / totals[m]));
  }
}

/* Not inlined, so that each form has the registers and the stack to itself. */
#define ATTEND_MANY(VECTORS)                                                                                     \
  static __attribute__((noinline)) void attend_many_##VECTORS(const Attention *a, Tile tile, int head) {         \
    attend_vectors(a, tile, head, VECTORS);                                                                      \
  }
ATTEND_MANY(1)
ATTEND_MANY(2)
#if TILE / LANES == 3
ATTEND_MANY(3)
static void (*const attend_many[])(const Attention *, Tile, int) = {NULL, attend_many_1, attend_many_2, attend_many_3};
#else
static void (*const attend_many[])(const Attention *, Tile, int) = {NULL, attend_many_1, attend_many_2};
#endif

#endif
