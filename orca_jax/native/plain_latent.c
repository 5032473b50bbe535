/* Latent attention in its plain form on a CPU, as an XLA custom call: for rows with many tokens (the initiation, or
 * prefill, phase).
 *
 * The compiler sets Q_BITS and KV_BITS, 32 for float32 and 16 for bfloat16. q [T, N, P + U] has each head's queries,
 * the last U elements rotated; keys [n_blocks, 1, B, C + U] is the cache, with a token's compressed vector and then
 * the rotated part of its key; weight [N, P + W, C] expands a compressed vector to a head's key and value;
 * block_table [R, max_blocks], row_start [R + 1], kv_length [R] int32. The result is [T, N, W]; it and the weight have
 * q's dtype. Padding and rows without a key give zeros. C, U, P and W are multiples of 16.
 *
 * An item is a head and up to PIECE queries of a row. It expands the keys and values of KEYS tokens at a time, and all
 * its queries attend to them, with a running softmax, before the next are expanded. Pieces are cut from the row's
 * first query on, and keys from the context's first token on, so no row's result depends on its neighbours. All
 * products are those of linear layers, in float32.
 */

#define FEW 0 /* all queries take the form for panels: a result must not depend on the number of queries in a tile */
#define REST 0
#include "product.h"
#include "softmax.h"

#ifndef PIECE
#define PIECE 2048 /* queries that share expanded keys and values; a thread has memory for their sums */
#endif
#define KEYS 128 /* tokens whose keys and values are expanded at a time */
#define TILE (MOST_VECTORS * LANES * PANELS) /* queries whose scores are computed at a time */

_Static_assert(KEYS % LANES == 0, "whole vectors");

typedef struct {
  int row, start, n; /* the row, the piece's first query in it, number of queries */
} Piece;

typedef struct {
  Work work;
  const q_type *q, *weight;
  const kv_type *keys;
  const int32_t *block_table, *row_start, *kv_length;
  q_type *out;
  float scale;
  size_t n_heads, rank, rotary, plain, value, block_size, max_blocks; /* N, C, U, P, W, B */
  Piece pieces[];
} Plain;

/* An item's working memory. */
typedef struct {
  float *all;        /* the allocation, of which the others are parts */
  float *weight;     /* [P + W, C] the head's weight, widened */
  float *queries;    /* [n, P + U], scaled */
  float *compressed; /* [KEYS, C] */
  float *made;       /* [KEYS, P] the keys' expanded parts */
  float *keys;       /* [KEYS, P + U] */
  float *values;     /* [W, KEYS] */
  float *scores;     /* [TILE, KEYS] */
  float *added;      /* [TILE, W] these keys' weighted values */
  float *out;        /* [n, W] */
  float *top;        /* [n] each query's greatest score, */
  float *total;      /* [n] and the sum of its weights */
} Room;

static bool make_room(Room *room, const Plain *a, size_t n) {
  const size_t size = a->plain + a->rotary;
  struct {
    float **part;
    size_t n;
  } parts[] = {{&room->weight, Q_BITS == 32 ? 0 : (a->plain + a->value) * a->rank},
               {&room->queries, n * size},
               {&room->compressed, KEYS * a->rank},
               {&room->made, KEYS * a->plain},
               {&room->keys, KEYS * size},
               {&room->values, a->value * KEYS},
               {&room->scores, TILE * KEYS},
               {&room->added, TILE * a->value},
               {&room->out, n * a->value},
               {&room->top, n},
               {&room->total, n}};
  const size_t n_parts = sizeof parts / sizeof *parts;
  size_t n_floats = 0;
  for (size_t i = 0; i < n_parts; i++) n_floats += (parts[i].n + 15) / 16 * 16;
  room->all = aligned_alloc(64, n_floats * sizeof(float));
  if (!room->all) return false;
  n_floats = 0;
  for (size_t i = 0; i < n_parts; i++) {
    *parts[i].part = room->all + n_floats;
    n_floats += (parts[i].n + 15) / 16 * 16;
  }
  return true;
}

/* y [n, n_out] = x [n, n_in] times weight [n_out, n_in]. False if memory runs out. */
static bool multiply(const float *x, size_t n, const float *weight, size_t n_in, size_t n_out, float *y) {
  Product product = {.x = x, .weight = weight, .y = y, .n_tokens = n, .n_in = n_in, .n_out = n_out};
  const size_t n_items = cut(&product, 1, 1);
  take_x(&product, NULL);
  for (size_t item = 0; item < n_items; item++)
    if (!do_part(&product, item)) return false;
  return true;
}

/* The head's weight in float32. */
static const float *widened(const Plain *a, size_t head, float *room) {
  const size_t n = (a->plain + a->value) * a->rank;
  const q_type *weight = a->weight + head * n;
#if Q_BITS == 32
  return weight;
#else
  for (size_t i = 0; i < n; i += LANES) store(room + i, load(weight + i));
  return room;
#endif
}

/* Expands the keys and values of a row's `n` tokens from `base` on, and fills up with zeros. */
static bool make_keys(const Plain *a, const int32_t *table, size_t base, size_t n, const float *weight, Room *room) {
  const size_t rank = a->rank, plain = a->plain, size = plain + a->rotary;
  for (size_t i = 0; i < n; i++) {
    const size_t block = table[(base + i) / a->block_size];
    const kv_type *slot = a->keys + (block * a->block_size + (base + i) % a->block_size) * (rank + a->rotary);
    for (size_t at = 0; at < rank; at += LANES) store(room->compressed + i * rank + at, load(slot + at));
    for (size_t at = 0; at < a->rotary; at += LANES) store(room->keys + i * size + plain + at, load(slot + rank + at));
  }
  memset(room->compressed + n * rank, 0, (KEYS - n) * rank * sizeof(float));
  memset(room->keys + n * size, 0, (KEYS - n) * size * sizeof(float));
  if (!multiply(room->compressed, KEYS, weight, rank, plain, room->made)) return false;
  for (size_t i = 0; i < n; i++) memcpy(room->keys + i * size, room->made + i * plain, plain * sizeof(float));
  return multiply(weight + plain * rank, a->value, room->compressed, rank, KEYS, room->values);
}

/* Attends from a tile's `n` queries from `at` on to the expanded keys. The first query sees `n_seen` of them, none if
 * that is not above 0, and each further query sees one more. */
static bool attend_tile(const Plain *a, const Room *room, size_t at, size_t n, int n_seen) {
  const size_t size = a->plain + a->rotary;
  float shrink[TILE];
  if (!multiply(room->queries + at * size, n, room->keys, size, KEYS, room->scores)) return false;
  for (size_t i = 0; i < n; i++) {
    float *scores = room->scores + i * KEYS;
    const int seen = n_seen + (int)i;
    shrink[i] = 1;
    for (int key = seen > 0 ? seen : 0; key < KEYS; key++) scores[key] = seen > 0 ? NOTHING : 0;
    if (seen > 0) shrink[i] = as_weights(scores, KEYS, room->top + at + i, room->total + at + i);
  }
  if (!multiply(room->scores, n, room->values, KEYS, a->value, room->added)) return false;
  for (size_t i = 0; i < n; i++)
    for (size_t d = 0; d < a->value; d += LANES) {
      float *out = room->out + (at + i) * a->value + d;
      store(out, load(out) * all(shrink[i]) + load(room->added + i * a->value + d));
    }
  return true;
}

static bool attend(const Plain *a, Piece piece, size_t head, Room *room) {
  const size_t size = a->plain + a->rotary, n = piece.n, first = a->row_start[piece.row] + piece.start;
  const int n_tokens = a->row_start[piece.row + 1] - a->row_start[piece.row];
  const int before = a->kv_length[piece.row] - n_tokens + piece.start; /* positions before the piece's first query */
  const int32_t *table = a->block_table + piece.row * a->max_blocks;
  const float *weight = widened(a, head, room->weight);
  for (size_t i = 0; i < n; i++) {
    const q_type *query = a->q + ((first + i) * a->n_heads + head) * size;
    for (size_t d = 0; d < size; d += LANES) store(room->queries + i * size + d, load(query + d) * all(a->scale));
    room->top[i] = NOTHING;
    room->total[i] = 0;
  }
  memset(room->out, 0, n * a->value * sizeof(float));
  for (int base = 0; base < before + (int)n; base += KEYS) {
    if (!make_keys(a, table, base, least(KEYS, before + n - base), weight, room)) return false;
    /* Tiles whose last query is before the first key see none. */
    for (size_t at = base > before ? (base - before) / TILE * TILE : 0; at < n; at += TILE)
      if (!attend_tile(a, room, at, least(TILE, n - at), before + (int)at + 1 - base)) return false;
  }
  for (size_t i = 0; i < n; i++)
    for (size_t d = 0; d < a->value; d += LANES)
      store(a->out + ((first + i) * a->n_heads + head) * a->value + d,
            load(room->out + i * a->value + d) * all(1 / room->total[i]));
  return true;
}

static void do_item(Work *work, int item) {
  const Plain *a = (const Plain *)work;
  const Piece piece = a->pieces[item / a->n_heads];
  Room room;
  const bool has_room = make_room(&room, a, piece.n);
  if (!has_room || !attend(a, piece, item % a->n_heads, &room)) work->failed = true;
  if (has_room) free(room.all);
}

/* Cuts the rows into pieces; those without a key get zeros. */
static size_t cut_rows(Plain *a, int n_rows) {
  const size_t token = a->n_heads * a->value;
  size_t n_pieces = 0;
  for (int row = 0; row < n_rows; row++) {
    const int n = a->row_start[row + 1] - a->row_start[row];
    if (!a->kv_length[row]) memset(a->out + a->row_start[row] * token, 0, n * token * sizeof *a->out);
    else
      for (int at = 0; at < n; at += PIECE) a->pieces[n_pieces++] = (Piece){row, at, least(n - at, PIECE)};
  }
  return n_pieces;
}

XLA_FFI_Error *plain_latent(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *q = argument(frame, 0), *keys = argument(frame, 1), *weight = argument(frame, 2);
  const XLA_FFI_Buffer *block_table = argument(frame, 3), *kv_length = argument(frame, 5), *out = result(frame, 0);
  const size_t n_tokens = q->dims[0], n_rows = kv_length->dims[0];
  Plain *a = malloc(sizeof *a + sizeof(Piece) * (n_tokens / PIECE + n_rows));
  if (!a) return no_memory(frame);
  a->work.do_item = do_item;
  a->q = q->data;
  a->keys = keys->data;
  a->weight = weight->data;
  a->block_table = block_table->data;
  a->row_start = argument(frame, 4)->data;
  a->kv_length = kv_length->data;
  a->out = out->data;
  a->scale = *(const float *)attribute(frame, "scale");
  a->n_heads = q->dims[1];
  a->rank = weight->dims[2];
  a->rotary = keys->dims[3] - a->rank;
  a->plain = q->dims[2] - a->rotary;
  a->value = out->dims[2];
  a->block_size = keys->dims[2];
  a->max_blocks = block_table->dims[1];
  const size_t n_real = a->row_start[n_rows], token = a->n_heads * a->value;
  memset(a->out + n_real * token, 0, (n_tokens - n_real) * token * sizeof *a->out); /* padding */
  a->work.n_items = cut_rows(a, n_rows) * a->n_heads;
  return do_all(&a->work, frame, count_threads(frame));
}
