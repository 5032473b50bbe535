/* The matrix product y [T, O] = x [T, I] times weight [O, I], cut into items for threads.
 *
 * X_BITS and WEIGHT_BITS are 32 for float32 and 16 for bfloat16; y has the dtype of x. Products and sums are
 * float32. bfloat16 is widened as it is read, except where both are bfloat16 and the processor has AVX512-BF16:
 * then a lane takes PAIRS of terms, which halves the instructions and the columns. It takes subnormal numbers for
 * zero, as XLA's threads do.
 *
 * FEW tokens or less: vectors run along the sum, and all weights pass once over the tokens, which stay in the first
 * cache. More: vectors run across the tokens of a panel, whose x each thread transposes for itself, and each weight
 * meets all tokens of the panel at once. The last REST tokens or less, which would fill no vector, are again few. A
 * token's result depends on whether it is one of a few, and on nothing else of its batch.
 *
 * I is a multiple of 16, and O is at least 16.
 */

#ifndef ORCA_PRODUCT_H
#define ORCA_PRODUCT_H

#include "vectors.h"
#include "xla_call.h"

#ifndef X_BITS
#define X_BITS 32
#endif
#ifndef WEIGHT_BITS
#define WEIGHT_BITS 32
#endif

typedef ELEMENT(X_BITS) x_type;
typedef ELEMENT(WEIGHT_BITS) weight_type;

/* Whether lanes take pairs of terms. It may be set to 0, to test the other form. */
#ifndef PAIRS
#if X_BITS == 16 && WEIGHT_BITS == 16 && LANES == 16 && defined(__AVX512BF16__)
#define PAIRS 1
#else
#define PAIRS 0
#endif
#endif

/* A lane takes TERMS factors at once, in 32 bits. */
#if PAIRS
#define TERMS 2
typedef bfloat16 factor_type;
#else
#define TERMS 1
typedef float factor_type;
#endif

/* With REST 0 and TURNS 1 a token's result depends on whether there are more than FEW, and with FEW 0 on nothing but
 * itself. With 8 lanes a panel takes 7 or 8 tokens faster than vectors along the sum do. */
#ifndef FEW
#define FEW (LANES == 16 ? 8 : 6)
#endif
#ifndef REST
#define REST (LANES == 16 ? 12 : 0) /* with 8 lanes a last vector that is half full costs no more */
#endif
#define FEW_ROOM (FEW > REST ? FEW : REST ? REST : 1)
#define FEW_OUTPUTS 4 /* outputs that are stored together */
#define FEW_BLOCK 64  /* outputs whose weights pass while the same terms of x are in the first cache */
#define FEW_DEPTH 768 /* terms that a block adds up before the next ones */
#define FEW_STEP (TERMS * LANES) /* terms that one instruction takes */
#define MOST_VECTORS 3 /* of tokens, in a panel */

/* Sums that fill the registers, 32 or 16, together with their factors. */
#if LANES == 16
#define AT_ONCE 8 /* tokens of a few, for two outputs, or half of them for FEW_OUTPUTS */
#define ROWS 8    /* outputs, for MOST_VECTORS */
#define PANELS 1  /* that an item works on at most, each strip of weights in turn */
#else
#define AT_ONCE 6
#define ROWS 4
#define PANELS 2
#endif

/* Sums that an output's terms join in turn, in a panel of one vector: ROWS sums would wait for their last terms. */
#ifndef TURNS
#define TURNS (ROWS < 8 ? 2 : 1)
#endif

#define STRIP LANES                       /* outputs that are stored together, of more tokens */
#define DEPTH 256                         /* terms summed before the sum joins the others: shorter sums err less */
#define CHUNK 96                          /* outputs of an item, at least: whole strips */
#define LINE (64 / sizeof(weight_type))   /* weights of a cache line */

/* Bytes of a panel's columns after the last term: of pairs, the last tile may be half full. */
#define UNUSED ((TERMS - 1) * MOST_VECTORS * LANES * LANES / 2 * sizeof(float))

/* Bytes of the columns of an item's panels, at most, if there are several: the second cache keeps them. */
#define BYTES_OF_PANELS (1 << 18)

/* Items for each thread, so that none waits long for another. */
#define ITEMS 8

/* What a core does in the time that starting a thread takes: bytes of weights read, multiplications. */
#define BYTES_WORTH_A_THREAD (1 << 18)
#define PRODUCTS_WORTH_A_THREAD (1 << 20)

typedef struct {
  const x_type *x;
  const factor_type *few_x; /* x of the few tokens: as float32, or in pairs as it is */
  const weight_type *weight;
  x_type *y;
  size_t n_tokens, n_in, n_out;
  size_t n_few;              /* the last tokens; the others are in panels */
  size_t n_panels, n_chunks; /* of tokens, of outputs */
  size_t at_once;            /* panels of an item */
  unsigned long number;      /* of this product */
} Product;

/* The x of panels that a thread has transposed. It keeps the memory for its next products. */
typedef struct {
  float *columns;
  size_t size;
  unsigned long number;
  size_t panel;
} Packed;

static _Thread_local Packed packed[PANELS];
static atomic_ulong n_products;

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

static inline size_t few_of(size_t n_tokens) {
  if (n_tokens <= FEW) return n_tokens;
  return n_tokens > LANES && n_tokens % LANES <= REST ? n_tokens % LANES : 0;
}

/* ---- TERMS at a time ---- */

/* The next TERMS * LANES terms, or those that are left and zeros. */
#if PAIRS
INLINE vec terms_at(const bfloat16 *from, size_t left) {
  return (vec)_mm512_maskz_loadu_epi32(left < TERMS * LANES ? 0xff : 0xffff, from); /* 16 are left, at least */
}
#else
#define terms_at(from, left) load(from)
#endif

INLINE vec add_products(vec sums, vec a, vec b) {
#if PAIRS
  return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
  return sums + a * b;
#endif
}

/* ---- a few tokens ---- */

/* Adds terms from `k` on to `sums`, of `outs` outputs and `n` tokens: FEW_STEP, or the `left` that are fewer. */
INLINE void few_terms(const Product *l, const factor_type *x, const weight_type *w, size_t k, size_t left,
                      vec sums[][FEW_OUTPUTS], const int n, const int outs) {
  vec weights[FEW_OUTPUTS];
  UNROLL for (int i = 0; i < outs; i++) weights[i] = kept(terms_at(w + i * l->n_in + k, left));
  UNROLL for (int t = 0; t < n; t++) {
    const vec xs = kept(terms_at(x + t * l->n_in + k, left));
    UNROLL for (int i = 0; i < outs; i++) sums[t][i] = add_products(sums[t][i], weights[i], xs);
  }
}

/* Adds `n_terms` terms from `k` on to the sums of FEW_OUTPUTS, `outs` of them (4 or 2) at a time, for `n` tokens from
 * `token` on; the compiler knows n and outs. `ahead`: the next strip's weights, or NULL. */
INLINE void few_at_once(const Product *l, size_t token, size_t out, size_t k, size_t n_terms, const weight_type *ahead,
                        vec4 *totals, const int n, const int outs) {
  const size_t end = k + n_terms;
  const factor_type *x = l->few_x + token * l->n_in;
  for (int first = 0; first < FEW_OUTPUTS; first += outs) {
    const weight_type *w = l->weight + (out + first) * l->n_in;
    vec sums[AT_ONCE][FEW_OUTPUTS];
    UNROLL for (int t = 0; t < n; t++)
      UNROLL for (int i = 0; i < outs; i++) sums[t][i] = all(0);
    size_t at = k;
    _Pragma("GCC unroll 4") for (; at + FEW_STEP <= end; at += FEW_STEP) {
      if (ahead && (LINE <= FEW_STEP || at % LINE == 0))
        UNROLL for (int i = 0; i < outs; i++) __builtin_prefetch(ahead + (first + i) * l->n_in + at, 0, 2);
      few_terms(l, x, w, at, FEW_STEP, sums, n, outs);
    }
    if (at < end) few_terms(l, x, w, at, end - at, sums, n, outs);
    if (outs == 4)
      UNROLL for (int t = 0; t < n; t++) totals[token + t] += sum4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
    else
      UNROLL for (int t = 0; t < n; t += 2) {
        const int u = t + 1 < n ? t + 1 : t;
        const vec4 both = sum4(sums[t][0], sums[t][1], sums[u][0], sums[u][1]);
        UNROLL for (int i = 0; i < 2; i++) totals[token + t][first + i] += both[i];
        if (u != t)
          UNROLL for (int i = 0; i < 2; i++) totals[token + u][first + i] += both[2 + i];
      }
  }
}

/* Outputs from `out` to before `end`, a FEW_BLOCK at most, of the few tokens. `is_new`: no cache has the weights. */
static void few(const Product *l, size_t out, size_t end, bool is_new) {
  const size_t at_once = is_new && l->n_few <= AT_ONCE ? AT_ONCE : AT_ONCE / 2;
  vec4 totals[FEW_BLOCK / FEW_OUTPUTS][FEW_ROOM];
  memset(totals, 0, sizeof totals);
  for (size_t k = 0, n_terms; k < l->n_in; k += n_terms) {
    n_terms = least(FEW_DEPTH, l->n_in - k);
    for (size_t i = 0; out + i * FEW_OUTPUTS < end; i++) {
      const size_t here = least(out + i * FEW_OUTPUTS, end - FEW_OUTPUTS), next = here + FEW_OUTPUTS;
      const weight_type *ahead = NULL;
      if (is_new && k + n_terms < l->n_in && next >= end) ahead = l->weight + out * l->n_in + n_terms;
      else if (is_new && next + FEW_OUTPUTS <= l->n_out) ahead = l->weight + next * l->n_in;
      for (size_t token = 0; token < l->n_few; token += at_once, ahead = NULL)
        switch (least(at_once, l->n_few - token)) {
#define FEW_CASE(N) \
  case N: few_at_once(l, token, here, k, n_terms, ahead, totals[i], N, N > AT_ONCE / 2 ? 2 : 4); break
          FEW_CASE(1); FEW_CASE(2); FEW_CASE(3); FEW_CASE(4); FEW_CASE(5); FEW_CASE(6);
#if AT_ONCE > 6
          FEW_CASE(7); FEW_CASE(8);
#endif
#undef FEW_CASE
        }
    }
  }
  for (size_t i = 0; out + i * FEW_OUTPUTS < end; i++) {
    x_type *y = l->y + (l->n_tokens - l->n_few) * l->n_out + least(out + i * FEW_OUTPUTS, end - FEW_OUTPUTS);
    for (size_t token = 0; token < l->n_few; token++) store4(y + token * l->n_out, totals[i][token]);
  }
}

/* ---- more tokens ---- */

/* The terms of one lane, in all lanes. */
INLINE vec all_of(const factor_type *from) {
  float word;
  memcpy(&word, from, sizeof word);
  return all(word);
}

/* The tokens in panels. */
static inline size_t n_paneled(const Product *l) { return l->n_tokens - l->n_few; }

/* The vector of tokens that a panel starts with. Each panel has MOST_VECTORS or one less. */
static inline size_t panel_start(const Product *l, size_t panel) {
  return (n_paneled(l) + LANES - 1) / LANES * panel / l->n_panels;
}

/* A panel's x, transposed by this thread: columns [I / TERMS][tokens] of TERMS, with zeros after the last token.
 * NULL if memory runs out. */
static const float *columns_of(const Product *l, size_t panel) {
  Packed *own = &packed[panel % PANELS];
  if (own->number == l->number && own->panel == panel) return own->columns;
  const size_t first = panel_start(l, panel) * LANES, width = panel_start(l, panel + 1) * LANES - first;
  if (own->size < width * l->n_in) {
    free(own->columns);
    own->columns = aligned_alloc(64, width * l->n_in * sizeof(factor_type) + UNUSED);
    own->size = own->columns ? width * l->n_in : 0;
    if (!own->columns) return NULL;
  }
  own->number = l->number;
  own->panel = panel;
  for (size_t at = 0; at < width; at += LANES)
    for (size_t k = 0; k < l->n_in; k += TERMS * LANES) {
      vec tile[LANES];
      UNROLL for (int i = 0; i < LANES; i++) {
        const size_t token = first + at + i;
        tile[i] = token < n_paneled(l) ? terms_at(l->x + token * l->n_in + k, l->n_in - k) : all(0);
      }
      transpose(tile);
      UNROLL for (int i = 0; i < LANES; i++) store(own->columns + (k / TERMS + i) * width + at, tile[i]);
    }
  return own->columns;
}

/* `n_terms` of the sums of `rows` outputs and `vectors` of tokens, both of which the compiler knows. The weights
 * w are `stride` apart; `ahead`: later ones, n_in apart. With `more`, sums [rows][vectors] has the terms so far. */
INLINE void add_terms(const factor_type *w, size_t stride, const weight_type *ahead, size_t n_in, size_t n_terms,
                      const float *columns, bool more, vec *sums, const int rows, const int vectors) {
  const int n_turns = vectors == 1 ? TURNS : 1;
  vec terms[TURNS][ROWS][MOST_VECTORS];
  UNROLL for (int turn = 0; turn < n_turns; turn++)
    UNROLL for (int i = 0; i < rows; i++)
      UNROLL for (int g = 0; g < vectors; g++) terms[turn][i][g] = all(0);
  for (size_t k = 0; k < n_terms; k += LANES) {
    if (LINE <= LANES || k % LINE == 0)
      UNROLL for (int i = 0; i < rows; i++) __builtin_prefetch(ahead + i * n_in + k, 0, 2);
    UNROLL for (int at = 0; at < LANES; at += TERMS) {
      vec(*into)[MOST_VECTORS] = terms[at / TERMS % n_turns];
      vec xs[MOST_VECTORS];
      UNROLL for (int g = 0; g < vectors; g++) xs[g] = kept(load(columns + ((k + at) / TERMS * vectors + g) * LANES));
      UNROLL for (int i = 0; i < rows; i++) {
        const vec weight = all_of(w + i * stride + k + at);
        UNROLL for (int g = 0; g < vectors; g++) into[i][g] = add_products(into[i][g], weight, xs[g]);
      }
    }
  }
  UNROLL for (int i = 0; i < rows; i++)
    UNROLL for (int g = 0; g < vectors; g++) {
      vec *to = sums + i * vectors + g, sum = terms[0][i][g];
      UNROLL for (int turn = 1; turn < n_turns; turn++) sum += terms[turn][i][g];
      *to = more ? *to + sum : sum;
    }
}

/* Not inlined: otherwise the compiler keeps `sums` in the registers that the terms need. */
#define ADD_TERMS(VECTORS)                                                                                   \
  static __attribute__((noinline)) void add_terms_##VECTORS(const factor_type *w, size_t stride,             \
                                                            const weight_type *ahead, size_t n_in,           \
                                                            size_t n_terms, const float *columns, bool more, \
                                                            vec *sums) {                                     \
    add_terms(w, stride, ahead, n_in, n_terms, columns, more, sums, ROWS, VECTORS);                          \
  }
ADD_TERMS(1)
ADD_TERMS(2)
ADD_TERMS(3)

static void (*const add_terms_of[])(const factor_type *, size_t, const weight_type *, size_t, size_t,
                                    const float *, bool, vec *) = {NULL, add_terms_1, add_terms_2, add_terms_3};

/* STRIP outputs of a panel's tokens. */
static void strip(const Product *l, size_t out, size_t panel, const float *columns) {
  const size_t n_in = l->n_in, n_out = l->n_out;
  const size_t first = panel_start(l, panel) * LANES, vectors = panel_start(l, panel + 1) - first / LANES;
  const size_t n = least(vectors * LANES, n_paneled(l) - first);
  x_type *y = l->y + first * n_out + out;
  vec sums[STRIP * MOST_VECTORS];
  for (size_t row = 0; row < STRIP; row += ROWS) {
    const weight_type *w = l->weight + (out + row) * n_in;
    const weight_type *ahead = out + row + 2 * ROWS <= n_out ? w + ROWS * n_in : w;
    for (size_t i = row ? n / 2 : 0; i < (row ? n : n / 2); i++) __builtin_prefetch(y + i * n_out, 1, 3);
    for (size_t k = 0; k < n_in; k += DEPTH) {
      const size_t n_terms = least(DEPTH, n_in - k);
#if WEIGHT_BITS == 32 || PAIRS
      const factor_type *factors = w + k;
      const size_t stride = n_in;
#else
      float factors[ROWS * DEPTH];
      const size_t stride = DEPTH;
      for (int i = 0; i < ROWS; i++)
        for (size_t at = 0; at < n_terms; at += LANES) store(factors + i * DEPTH + at, load(w + i * n_in + k + at));
#endif
      add_terms_of[vectors](factors, stride, ahead + k, n_in, n_terms, columns + k / TERMS * vectors * LANES, k > 0,
                            sums + row * vectors);
    }
  }
  for (size_t g = 0; g < vectors; g++) {
    vec tile[LANES];
    UNROLL for (int i = 0; i < STRIP; i++) tile[i] = sums[i * vectors + g];
    transpose(tile);
    for (size_t i = g * LANES; i < least(n, (g + 1) * LANES); i++) store(y + i * n_out, tile[i % LANES]);
  }
}

/* ---- */

/* What an item computes: outputs from `start` to before `end`, of the tokens of panels and, with the last of
 * these, of the few. */
typedef struct {
  size_t start, end, panel, n_panels, first_token, end_token;
} Part;

static inline Part part_of(const Product *l, size_t item) {
  const size_t chunk = item % l->n_chunks, n_strips = l->n_out / STRIP, panel = item / l->n_chunks * l->at_once;
  const size_t n_panels = least(l->at_once, l->n_panels - panel);
  const bool is_last = panel + n_panels == l->n_panels;
  return (Part){.start = n_strips * chunk / l->n_chunks * STRIP,
                .end = chunk + 1 < l->n_chunks ? n_strips * (chunk + 1) / l->n_chunks * STRIP : l->n_out,
                .panel = panel,
                .n_panels = n_panels,
                .first_token = panel ? panel_start(l, panel) * LANES : 0,
                .end_token = is_last ? l->n_tokens : panel_start(l, panel + n_panels) * LANES};
}

/* Computes an item. The last strip starts early enough to be whole, and so computes some outputs twice. False if
 * memory runs out. */
static bool do_part(const Product *l, size_t item) {
  const Part part = part_of(l, item);
  const size_t n_few = part.end_token == l->n_tokens ? l->n_few : 0;
  const float *columns[PANELS];
  for (size_t i = 0; i < part.n_panels; i++) {
    columns[i] = columns_of(l, part.panel + i);
    if (!columns[i]) return false;
  }
  if (!part.n_panels) {
    for (size_t out = part.start; out < part.end; out += FEW_BLOCK)
      few(l, least(out, part.end - FEW_OUTPUTS), least(out + FEW_BLOCK, part.end), true);
    return true;
  }
  for (size_t out = part.start; out < part.end; out += STRIP) {
    const size_t here = least(out, part.end - STRIP);
    for (size_t i = 0; i < part.n_panels; i++) strip(l, here, part.panel + i, columns[i]);
    if (n_few) few(l, here, here + STRIP, false);
  }
  return true;
}

/* Elements of `widened` that `take_x` needs: room for the few tokens as float32. */
static inline size_t n_widened(size_t n_tokens, size_t n_in) {
  return X_BITS == 16 && !PAIRS ? few_of(n_tokens) * n_in : 0;
}

/* About `wanted` chunks, at most `most`, so that all groups' are a multiple of `n_threads`: else threads would wait for
 * the last one. `wanted` if that cannot be. */
static inline size_t whole_rounds(size_t n_groups, size_t wanted, size_t most, size_t n_threads) {
  for (size_t i = 0; i < n_threads; i++) {
    if (wanted + i <= most && n_groups * (wanted + i) % n_threads == 0) return wanted + i;
    if (wanted > i && n_groups * (wanted - i) % n_threads == 0) return wanted - i;
  }
  return wanted;
}

/* Cuts a product whose sizes are set into about `n_wanted` items for `n_threads`. Returns their number. */
static inline size_t cut(Product *l, size_t n_wanted, size_t n_threads) {
  l->number = atomic_fetch_add(&n_products, 1) + 1;
  l->n_few = few_of(l->n_tokens);
  l->n_panels = ((n_paneled(l) + LANES - 1) / LANES + MOST_VECTORS - 1) / MOST_VECTORS;
  l->at_once = PANELS * MOST_VECTORS * LANES * l->n_in * sizeof(factor_type) <= BYTES_OF_PANELS ? PANELS : 1;
  const size_t n_groups = l->n_panels ? (l->n_panels + l->at_once - 1) / l->at_once : 1;
  const size_t most = l->n_out < CHUNK ? 1 : l->n_out / CHUNK;
  l->n_chunks = whole_rounds(n_groups, least(most, (n_wanted + n_groups - 1) / n_groups), most, n_threads);
  return n_groups * l->n_chunks;
}

/* Takes the x that is there now, before the first item. */
static inline void take_x(Product *l, float *widened) {
  const x_type *x = l->x + n_paneled(l) * l->n_in;
#if X_BITS == 32 || PAIRS
  l->few_x = x;
#else
  l->few_x = widened;
  for (size_t i = 0; i < l->n_few * l->n_in; i += LANES) store(widened + i, load(x + i));
#endif
}

/* How many threads it is worth. */
static inline double threads_worth(const Product *l) {
  const double n_weights = (double)l->n_in * l->n_out;
  const double by_bytes = n_weights * sizeof(weight_type) / BYTES_WORTH_A_THREAD;
  const double by_products = n_weights * l->n_tokens / PRODUCTS_WORTH_A_THREAD;
  return by_bytes > by_products ? by_bytes : by_products;
}

#endif
