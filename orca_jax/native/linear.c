/* The product of a linear layer on a CPU, in float32: an XLA custom call (ORCA 3.2: all tokens at once).
 *
 * x [T, I] times weight [O, I] gives y [T, O] of the first n_tokens [1] int32, and zeros behind them. Both are
 * read where they lie; XLA's own library packs the weight before each product, which counts where tokens are few.
 *
 * FEW tokens or less: vectors go along the sum, and a strip of outputs passes over all tokens while its
 * weights are in the first cache. More: vectors go across the tokens of a panel, whose x each thread transposes
 * for itself, and each weight meets all tokens of the panel at once. What a token gets depends on whether there
 * are FEW or more, and on nothing else of its batch.
 *
 * I is a multiple of LANES, O at least LANES.
 */

#include "vectors.h"
#include "xla_call.h"

/* Sums that fill the 32 registers beside what they are made of. */
#define AT_ONCE 4      /* tokens that a few are cut into, for FEW_OUTPUTS */
#define MOST_VECTORS 3 /* of tokens, in a panel, for ROWS outputs */
#define ROWS 8

#define FEW (2 * AT_ONCE)
#define FEW_OUTPUTS 4 /* that leave together */
#define STRIP LANES   /* likewise, of more tokens */
#define DEPTH 256     /* terms that are summed before the sum joins the others: shorter sums err less */
#define CHUNK 96      /* outputs of an item, at least: whole strips */

/* Items for each thread, so that none waits long for another. */
#define ITEMS 8

/* A thread's start against what a core does meanwhile: bytes of weights that it reads, products. */
#define BYTES_WORTH_A_THREAD (1 << 18)
#define PRODUCTS_WORTH_A_THREAD (1 << 20)

typedef struct {
  Work work;
  const float *x, *weight;
  float *y;
  size_t n_tokens, n_in, n_out;
  size_t n_panels, n_chunks; /* of tokens, of outputs */
  unsigned long number;      /* of this product */
} Linear;

/* The panel's x that a thread has transposed. It keeps the room for the next. */
typedef struct {
  float *columns;
  size_t size;
  unsigned long number;
  size_t panel;
} Packed;

static _Thread_local Packed packed;
static atomic_ulong n_products;

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* ---- a few tokens ---- */

/* FEW_OUTPUTS of `n` tokens from `token` on; `ahead`: the next strip's weights, or NULL. The compiler knows n. */
INLINE void few_at_once(const Linear *l, size_t token, size_t out, const float *ahead, const int n) {
  const size_t n_in = l->n_in;
  const float *x = l->x + token * n_in, *w = l->weight + out * n_in;
  vec sums[AT_ONCE][FEW_OUTPUTS];
  UNROLL for (int t = 0; t < n; t++)
    UNROLL for (int i = 0; i < FEW_OUTPUTS; i++) sums[t][i] = all(0);
  for (size_t k = 0; k < n_in; k += LANES) {
    vec xs[AT_ONCE];
    UNROLL for (int t = 0; t < n; t++) xs[t] = load(x + t * n_in + k);
    UNROLL for (int i = 0; i < FEW_OUTPUTS; i++) {
      if (ahead) __builtin_prefetch(ahead + i * n_in + k, 0, 2);
      const vec weights = load(w + i * n_in + k);
      UNROLL for (int t = 0; t < n; t++) sums[t][i] += weights * xs[t];
    }
  }
  UNROLL for (int t = 0; t < n; t++)
    store4(l->y + (token + t) * l->n_out + out, sum4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]));
}

static void few(const Linear *l, size_t out, const float *ahead) {
  size_t token = 0;
  for (; token + AT_ONCE <= l->n_tokens; token += AT_ONCE, ahead = NULL) few_at_once(l, token, out, ahead, AT_ONCE);
  switch (l->n_tokens - token) {
    case 1: few_at_once(l, token, out, ahead, 1); break;
    case 2: few_at_once(l, token, out, ahead, 2); break;
    case 3: few_at_once(l, token, out, ahead, 3); break;
  }
}

/* ---- more tokens ---- */

/* Where a panel's tokens begin, in vectors: all have MOST_VECTORS or one less. */
static inline size_t panel_start(const Linear *l, size_t panel) {
  return (l->n_tokens + LANES - 1) / LANES * panel / l->n_panels;
}

/* A panel's x, transposed by this thread: columns [I][tokens], with zeros behind the last token. NULL without
 * memory. */
static const float *columns_of(const Linear *l, size_t panel) {
  if (packed.number == l->number && packed.panel == panel) return packed.columns;
  const size_t first = panel_start(l, panel) * LANES, width = panel_start(l, panel + 1) * LANES - first;
  if (packed.size < width * l->n_in) {
    free(packed.columns);
    packed.columns = aligned_alloc(64, width * l->n_in * sizeof(float));
    packed.size = packed.columns ? width * l->n_in : 0;
    if (!packed.columns) return NULL;
  }
  packed.number = l->number;
  packed.panel = panel;
  for (size_t at = 0; at < width; at += LANES)
    for (size_t k = 0; k < l->n_in; k += LANES) {
      vec tile[LANES];
      UNROLL for (int i = 0; i < LANES; i++) {
        const size_t token = first + at + i;
        tile[i] = token < l->n_tokens ? load(l->x + token * l->n_in + k) : all(0);
      }
      transpose(tile);
      UNROLL for (int i = 0; i < LANES; i++) store(packed.columns + (k + i) * width + at, tile[i]);
    }
  return packed.columns;
}

/* `n_terms` of the sums of `rows` outputs and `vectors` of tokens, both of which the compiler knows. They are
 * added to sums [rows][vectors] if there is `more` there. */
INLINE void add_terms(const float *w, const float *ahead, size_t n_in, size_t n_terms, const float *columns,
                      bool more, vec *sums, const int rows, const int vectors) {
  vec terms[LANES][MOST_VECTORS];
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int g = 0; g < vectors; g++) terms[i][g] = all(0);
  for (size_t k = 0; k < n_terms; k += LANES) {
    UNROLL for (int i = 0; i < rows; i++) __builtin_prefetch(ahead + i * n_in + k, 0, 2);
    for (int lane = 0; lane < LANES; lane++) {
      vec xs[MOST_VECTORS];
      UNROLL for (int g = 0; g < vectors; g++) xs[g] = load(columns + ((k + lane) * vectors + g) * LANES);
      UNROLL for (int i = 0; i < rows; i++) {
        const vec weight = all(w[i * n_in + k + lane]);
        UNROLL for (int g = 0; g < vectors; g++) terms[i][g] += weight * xs[g];
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int g = 0; g < vectors; g++) {
      vec *to = sums + i * vectors + g;
      *to = more ? *to + terms[i][g] : terms[i][g];
    }
}

/* Not inlined: the compiler would keep `sums` in the registers that the terms need. */
#define ADD_TERMS(VECTORS)                                                                                        \
  static __attribute__((noinline)) void add_terms_##VECTORS(const float *w, const float *ahead, size_t n_in,     \
                                                            size_t n_terms, const float *columns, bool more,     \
                                                            vec *sums) {                                         \
    add_terms(w, ahead, n_in, n_terms, columns, more, sums, ROWS, VECTORS);                                      \
  }
ADD_TERMS(1)
ADD_TERMS(2)
ADD_TERMS(3)

static void (*const add_terms_of[])(const float *, const float *, size_t, size_t, const float *, bool, vec *) = {
    NULL, add_terms_1, add_terms_2, add_terms_3};

/* STRIP outputs of a panel's tokens. */
static void strip(const Linear *l, size_t out, size_t panel, const float *columns) {
  const size_t n_in = l->n_in, n_out = l->n_out;
  const size_t first = panel_start(l, panel) * LANES, vectors = panel_start(l, panel + 1) - first / LANES;
  const size_t n = least(vectors * LANES, l->n_tokens - first);
  float *y = l->y + first * n_out + out;
  vec sums[STRIP * MOST_VECTORS];
  for (size_t row = 0; row < STRIP; row += ROWS) {
    const float *w = l->weight + (out + row) * n_in;
    const float *ahead = out + row + 2 * ROWS <= n_out ? w + ROWS * n_in : w;
    for (size_t i = row ? n / 2 : 0; i < (row ? n : n / 2); i++) __builtin_prefetch(y + i * n_out, 1, 3);
    for (size_t k = 0; k < n_in; k += DEPTH)
      add_terms_of[vectors](w + k, ahead + k, n_in, least(DEPTH, n_in - k), columns + k * vectors * LANES, k > 0,
                            sums + row * vectors);
  }
  for (size_t g = 0; g < vectors; g++) {
    vec tile[LANES];
    UNROLL for (int i = 0; i < STRIP; i++) tile[i] = sums[i * vectors + g];
    transpose(tile);
    for (size_t i = g * LANES; i < least(n, (g + 1) * LANES); i++) store(y + i * n_out, tile[i % LANES]);
  }
}

/* ---- */

/* A chunk of outputs, of all tokens if they are few, else of a panel. The last strip does anew what would be too
 * little for one. */
static void do_item(Work *work, int item) {
  const Linear *l = (const Linear *)work;
  const size_t panel = item / l->n_chunks, chunk = item % l->n_chunks, n_strips = l->n_out / STRIP;
  const size_t start = n_strips * chunk / l->n_chunks * STRIP;
  const size_t end = chunk + 1 < l->n_chunks ? n_strips * (chunk + 1) / l->n_chunks * STRIP : l->n_out;
  if (l->n_tokens <= FEW) {
    for (size_t out = start; out < end; out += FEW_OUTPUTS) {
      const size_t here = least(out, end - FEW_OUTPUTS), next = here + FEW_OUTPUTS;
      few(l, here, next + FEW_OUTPUTS <= l->n_out ? l->weight + next * l->n_in : NULL);
    }
    return;
  }
  const float *columns = columns_of(l, panel);
  if (!columns) {
    work->failed = true;
    return;
  }
  for (size_t out = start; out < end; out += STRIP) strip(l, least(out, end - STRIP), panel, columns);
}

XLA_FFI_Error *linear(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *weight = argument(frame, 1);
  const size_t most_tokens = x->dims[0], n_out = weight->dims[0], n_real = *(const int32_t *)argument(frame, 2)->data;
  const size_t n_tokens = least(n_real, most_tokens);
  float *y = result(frame, 0)->data;
  memset(y + n_tokens * n_out, 0, (most_tokens - n_tokens) * n_out * sizeof(float));
  if (!n_tokens) return NULL;
  Linear *l = calloc(1, sizeof *l);
  if (!l) return no_memory(frame);
  l->work.do_item = do_item;
  l->x = x->data;
  l->weight = weight->data;
  l->y = y;
  l->n_tokens = n_tokens;
  l->n_in = x->dims[1];
  l->n_out = n_out;
  l->number = atomic_fetch_add(&n_products, 1) + 1;
  l->n_panels = ((n_tokens + LANES - 1) / LANES + MOST_VECTORS - 1) / MOST_VECTORS;
  const size_t n_threads = count_threads(frame), most = n_out < CHUNK ? 1 : n_out / CHUNK;
  if (n_tokens <= FEW) l->n_panels = 1;
  l->n_chunks = least(most, (ITEMS * n_threads + l->n_panels - 1) / l->n_panels);
  l->work.n_items = l->n_panels * l->n_chunks;
  const double n_weights = (double)l->n_in * n_out;
  const double by_bytes = n_weights * sizeof(float) / BYTES_WORTH_A_THREAD;
  const double by_products = n_weights * n_tokens / PRODUCTS_WORTH_A_THREAD;
  const double worth = by_bytes > by_products ? by_bytes : by_products;
  return do_all(&l->work, frame, worth < n_threads ? worth : n_threads);
}
