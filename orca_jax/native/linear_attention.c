/* Linear attention on a CPU, as an XLA custom call: rows of any lengths and phases, each head a token at a time.
 *
 * For each token with a query q and key k [K], a value v [V] and a decay a <= 0, a head computes
 *
 *   gated delta rule:  S <- exp(a) S;  S <- S + k (beta (v - k S));  result q S
 *   state space:       S <- exp(a) S + k v;                          result q S
 *
 * The arguments are those of linear_attention.py, all float32 or int32: q, k [T, N, K]; v [T, N G, V]; decay [T, N G];
 * beta [T, N G], or [0, N G] in a state space; row_start [R + 1]; state_of_row [R]; starts [R], one byte each; kept
 * [T] or [0]; and the states [n_states, N G, K, V], which are changed in place. The result is [T, N G, V].
 *
 * Columns of a state do not depend on one another. A thread takes some of them into its nearest cache, and keeps them
 * there for all the row's tokens: what a token costs is then far less than the products around this layer, so that
 * prompts need no matrix form. A row's result depends on the row alone, to the bit.
 */

#include <math.h>

#include "vectors.h"
#include "xla_call.h"

#define WIDTH 32 /* columns at a time */
#define N_VECS (WIDTH / LANES)
#define MOST_KEYS 256
#define PARTS 4 /* of a row, per thread */

/* Elements of states times tokens below which another thread costs more than it saves. */
#define WORTH_A_THREAD (1 << 16)

typedef struct {
  Work work;
  const float *q, *k, *v, *decay, *beta; /* no beta in a state space */
  const int32_t *row_start, *state_of_row, *kept; /* no kept without drafts */
  const uint8_t *starts;
  float *states, *out;
  size_t n_states, n_heads, group, key_size, value_size; /* N G, G, K, V */
  size_t n_parts;                                        /* of each row */
} Walk;

/* The sum of keys times rows of the state [n, WIDTH]. Even and odd rows are added up apart, as sums wait for one
 * another. */
INLINE void weighted_sum(const float *keys, const float *state, size_t n, vec sum[N_VECS]) {
  vec odd[N_VECS];
  UNROLL for (int j = 0; j < N_VECS; j++) sum[j] = odd[j] = all(0);
  size_t i = 0;
  for (; i + 1 < n; i += 2)
    UNROLL for (int j = 0; j < N_VECS; j++) {
      sum[j] += all(keys[i]) * load(state + i * WIDTH + j * LANES);
      odd[j] += all(keys[i + 1]) * load(state + (i + 1) * WIDTH + j * LANES);
    }
  UNROLL for (int j = 0; j < N_VECS; j++) {
    if (i < n) sum[j] += all(keys[i]) * load(state + i * WIDTH + j * LANES);
    sum[j] += odd[j];
  }
}

INLINE void take_in(float *row, float key, vec decay, const vec taken[N_VECS], float query, vec sum[N_VECS]) {
  UNROLL for (int j = 0; j < N_VECS; j++) {
    const vec new = decay * load(row + j * LANES) + all(key) * taken[j];
    store(row + j * LANES, new);
    sum[j] += all(query) * new;
  }
}

/* One token of a head: changes `state` [K, WIDTH], and replaces `value` [WIDTH] by the result. */
static void step(const Walk *w, size_t token, size_t head, float *state, float *value) {
  const size_t n = w->key_size, at = token * w->n_heads + head;
  const float *q = w->q + at / w->group * n, *k = w->k + at / w->group * n;
  const vec decay = all(expf(w->decay[at]));
  vec taken[N_VECS], even[N_VECS], odd[N_VECS];
  if (w->beta) {
    weighted_sum(k, state, n, taken);
    UNROLL for (int j = 0; j < N_VECS; j++)
      taken[j] = all(w->beta[at]) * (load(value + j * LANES) - decay * taken[j]);
  } else {
    UNROLL for (int j = 0; j < N_VECS; j++) taken[j] = load(value + j * LANES);
  }
  UNROLL for (int j = 0; j < N_VECS; j++) even[j] = odd[j] = all(0);
  size_t i = 0;
  for (; i + 1 < n; i += 2) {
    take_in(state + i * WIDTH, k[i], decay, taken, q[i], even);
    take_in(state + (i + 1) * WIDTH, k[i + 1], decay, taken, q[i + 1], odd);
  }
  if (i < n) take_in(state + i * WIDTH, k[i], decay, taken, q[i], even);
  UNROLL for (int j = 0; j < N_VECS; j++) store(value + j * LANES, even[j] + odd[j]);
}

/* Columns of a head's state in the pool. */
static float *columns(const Walk *w, size_t state, size_t head, size_t column) {
  return w->states + (state * w->n_heads + head) * w->key_size * w->value_size + column;
}

/* Copies `n` columns of a matrix of K rows; a call of memcpy for each row would take longer than the copy. */
static void copy(const Walk *w, float *to, size_t to_width, const float *from, size_t from_width, size_t n) {
  for (size_t i = 0; i < w->key_size; i++, to += to_width, from += from_width) {
    if (n == WIDTH) {
      UNROLL for (int j = 0; j < N_VECS; j++) store(to + j * LANES, load(from + j * LANES));
    } else {
      memcpy(to, from, n * sizeof *to);
    }
  }
}

/* All tokens of a row, in some columns of a head. */
static void walk(const Walk *w, size_t row, size_t head, size_t column) {
  float state[MOST_KEYS * WIDTH], value[WIDTH] = {0};
  const size_t left = w->value_size - column, n = left < WIDTH ? left : WIDTH, of_row = w->state_of_row[row];
  float *own = columns(w, of_row, head, column);
  if (n < WIDTH || w->starts[row]) memset(state, 0, w->key_size * WIDTH * sizeof *state);
  if (!w->starts[row]) copy(w, state, WIDTH, own, w->value_size, n);
  for (size_t token = w->row_start[row], end = w->row_start[row + 1]; token < end; token++) {
    const size_t at = (token * w->n_heads + head) * w->value_size + column;
    memcpy(value, w->v + at, n * sizeof *value);
    step(w, token, head, state, value);
    memcpy(w->out + at, value, n * sizeof *value);
    memset(value + n, 0, (WIDTH - n) * sizeof *value);
    const size_t kept = w->kept ? (size_t)w->kept[token] : w->n_states;
    if (kept < w->n_states) copy(w, columns(w, kept, head, column), w->value_size, state, WIDTH, n);
  }
  copy(w, own, w->value_size, state, WIDTH, n);
}

static void do_item(Work *work, int item) {
  const Walk *w = (const Walk *)work;
  const size_t row = item / w->n_parts, part = item % w->n_parts;
  const size_t first = w->row_start[row], n_tokens = w->row_start[row + 1] - first, width = w->n_heads * w->value_size;
  if (!n_tokens) return;
  if ((size_t)w->state_of_row[row] >= w->n_states) { /* padding */
    if (!part) memset(w->out + first * width, 0, n_tokens * width * sizeof *w->out);
    return;
  }
  const size_t n_blocks = (w->value_size + WIDTH - 1) / WIDTH, n_units = w->n_heads * n_blocks;
  const size_t end = n_units * (part + 1) / w->n_parts;
  for (size_t unit = n_units * part / w->n_parts; unit < end; unit++)
    walk(w, row, unit / n_blocks, unit % n_blocks * WIDTH);
}

XLA_FFI_Error *linear_attention(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *q = argument(frame, 0), *v = argument(frame, 2), *beta = argument(frame, 4);
  const XLA_FFI_Buffer *rows = argument(frame, 6), *kept = argument(frame, 8), *states = result(frame, 1);
  Walk *w = malloc(sizeof *w);
  if (!w) return no_memory(frame);
  *w = (Walk){.work = {.do_item = do_item},
              .q = q->data,
              .k = argument(frame, 1)->data,
              .v = v->data,
              .decay = argument(frame, 3)->data,
              .beta = beta->dims[0] ? beta->data : NULL,
              .row_start = argument(frame, 5)->data,
              .state_of_row = rows->data,
              .starts = argument(frame, 7)->data,
              .kept = kept->dims[0] ? kept->data : NULL,
              .states = states->data,
              .out = result(frame, 0)->data,
              .n_states = states->dims[0],
              .n_heads = v->dims[1],
              .group = v->dims[1] / q->dims[1],
              .key_size = q->dims[2],
              .value_size = v->dims[2]};
  const size_t n_tokens = v->dims[0], n_rows = rows->dims[0], n_real = w->row_start[n_rows];
  const size_t n_threads = count_threads(frame), width = w->n_heads * w->value_size;
  memset(w->out + n_real * width, 0, (n_tokens - n_real) * width * sizeof *w->out);
  w->n_parts = w->n_heads < PARTS * n_threads ? w->n_heads : PARTS * n_threads;
  w->work.n_items = n_rows * w->n_parts;
  const double worth = (double)n_real * width * w->key_size / WORTH_A_THREAD;
  return do_all(&w->work, frame, worth < n_threads ? worth : n_threads);
}
