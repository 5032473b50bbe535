/* A product with few tokens: vectors run along the summed axis, and each weight is read once for all tokens, which
 * stay in the L1 cache.
 */

#ifndef ORCA_FEW_TOKENS_H
#define ORCA_FEW_TOKENS_H

#include "product_form.h"

/* With REST 0 and TURNS 1 a token's result depends only on whether there are more than FEW tokens, and with FEW 0 on
 * the token alone. With 8 lanes, 7 or 8 tokens are faster in a panel than here. */
#ifndef FEW
#define FEW (TILES ? 0 : LANES == 16 ? 8 : 6) /* one form with tiles */
#endif
#ifndef REST
#define REST (LANES == 16 && !TILES ? 12 : 0) /* with 8 lanes, a panel's last vector costs no more if it is half full */
#endif
#define FEW_ROOM (FEW > REST ? FEW : REST ? REST : 1)
#define FEW_OUTPUTS 4 /* outputs that are stored together */
#define FEW_BLOCK 64  /* outputs that are computed while the same terms of x are in the L1 cache */
#define FEW_DEPTH 768 /* terms of x that a block takes at a time */
#define FEW_STEP (TERMS * LANES) /* terms that one instruction takes */

/* Tokens whose sums for two outputs fill the registers, 32 or 16, together with the factors. Half of these tokens do
 * so with sums for FEW_OUTPUTS. */
#define AT_ONCE (LANES == 16 ? 8 : 6)

static inline size_t few_of(size_t n_tokens) {
  if (n_tokens <= FEW) return n_tokens;
  return n_tokens > LANES && n_tokens % LANES <= REST ? n_tokens % LANES : 0;
}

/* Adds FEW_STEP terms from `k` on, or `left` if these are fewer, to the sums of `outs` outputs and `n` tokens. */
INLINE void few_terms(const Product *l, const factor_type *x, const weight_type *w, size_t k, size_t left,
                      vec sums[][FEW_OUTPUTS], const int n, const int outs) {
  vec weights[FEW_OUTPUTS];
  UNROLL for (int i = 0; i < outs; i++) weights[i] = kept(terms_at(w + i * l->n_in + k, left));
  UNROLL for (int t = 0; t < n; t++) {
    const vec xs = kept(terms_at(x + t * l->n_in + k, left));
    UNROLL for (int i = 0; i < outs; i++) sums[t][i] = add_products(sums[t][i], weights[i], xs);
  }
}

/* Adds `n_terms` terms from `k` on to the sums of FEW_OUTPUTS outputs, `outs` (4 or 2) at a time, for `n` tokens from
 * `token` on; n and outs are constants to the compiler. `ahead` has the weights to prefetch, or is NULL. */
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

/* Computes outputs [out, end), at most FEW_BLOCK, of the few tokens. `is_new` if the weights are in no cache. */
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

#endif
