/* Chooses next tokens and computes log-probabilities on a CPU, as an XLA custom call.
 *
 * For R rows of V logits the results are a token each, and words [R, 2 + 2 N] int32: the token, its log-probability,
 * and ids and log-probabilities of the N most likely tokens. A row's logits are read from memory once, in groups of
 * GROUP: for each group the largest logit, and sums of exponentials relative to it. From these follows the group that
 * a draw is in, and only that group is read again. A log-probability needs the sums of a draw at temperature 1.
 *
 * A NaN counts as -inf. If the largest logit is not finite, no token has a probability: log-probabilities are -inf,
 * and the token is the first of the largest. A row's result depends on the row alone.
 */

#include <float.h>
#include <math.h>

#include "vectors.h"
#include "xla_call.h"

#define GROUP 256
#define LOGITS_FOR_A_THREAD 16384

typedef struct {
  Work work;
  const float *logits, *raw; /* [R, V] for the choice, and for log-probabilities; may be the same array */
  const int32_t *known;      /* [R] the row's token; if negative, it is chosen */
  const float *temperature;  /* [R] 0 for the first of the largest logits, else a token is drawn */
  const float *min_p;        /* [R] the least weight that can be drawn; the largest is 1 */
  const float *uniform;      /* [R] in [0, 1): the place of a draw in the running sum of weights */
  const int32_t *n_top;      /* [R] number of the most likely tokens to report; negative for no log-probability */
  int32_t *tokens, *words;
  size_t vocab, max_top;
} Choice;

/* One row of logits, and numbers of each group in arrays whose length is a multiple of LANES. */
typedef struct {
  const float *logits;
  size_t vocab, n_groups, n_padded;
  float largest;
  float *tops, *sums;    /* the largest logit, and the sum of e^(x - top) */
  float *from, *weights; /* an origin, and the sum of e^(rate (x - from)) */
  float *scaled;         /* sums or weights, relative to the row's largest logit */
} Row;

/* A group's logits; the last group's are copied and filled up with -inf. */
INLINE const float *group_of(const Row *row, size_t group, float filled[GROUP]) {
  const size_t start = group * GROUP, n = row->vocab - start;
  if (n >= GROUP) return row->logits + start;
  for (size_t i = 0; i < GROUP; i++) filled[i] = i < n ? row->logits[start + i] : -INFINITY;
  return filled;
}

INLINE float top_of(const float *x) {
  vec most[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
  UNROLL for (int i = 0; i < GROUP / LANES; i++) most[i % 4] = larger(load(x + i * LANES), most[i % 4]);
  const vec lanes = larger(larger(most[0], most[1]), larger(most[2], most[3]));
  float top = lanes[0];
  UNROLL for (int i = 1; i < LANES; i++) top = lanes[i] > top ? lanes[i] : top;
  return top;
}

INLINE vec weight_of(vec x, float from, float rate, float least) {
  const vec e = exponential((x - all(from)) * all(rate));
  return least > 0 ? choose(e >= all(least), e, all(0)) : e;
}

INLINE float sum_of(const float *x, float from, float rate, float least) {
  vec sums[4] = {all(0), all(0), all(0), all(0)};
  for (int i = 0; i < GROUP / LANES; i += 4)
    UNROLL for (int j = 0; j < 4; j++) sums[j] += weight_of(load(x + (i + j) * LANES), from, rate, least);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* Reads the logits once, or twice if weights below `least` are cut, since these are relative to the largest logit. */
static void read_row(Row *row, bool reports, bool draws, float rate, float least) {
  const bool cuts = draws && least > 0, shares = draws && !cuts && rate == 1, weighs = draws && !cuts && !shares;
  float filled[GROUP];
  row->largest = -INFINITY;
  for (size_t i = 0; i < row->n_groups; i++) {
    const float *x = group_of(row, i, filled), top = row->tops[i] = row->from[i] = top_of(x);
    if (top > row->largest) row->largest = top;
    if (reports || shares) row->sums[i] = sum_of(x, top, 1, 0);
    if (weighs) row->weights[i] = sum_of(x, top, rate, 0);
  }
  for (size_t i = row->n_groups; i < row->n_padded; i++)
    row->tops[i] = row->from[i] = -INFINITY, row->sums[i] = row->weights[i] = 0;
  if (shares) memcpy(row->weights, row->sums, row->n_groups * sizeof(float));
  for (size_t i = 0; cuts && i < row->n_groups; i++) {
    row->from[i] = row->largest;
    row->weights[i] = sum_of(group_of(row, i, filled), row->largest, rate, least);
  }
}

/* scaled[i] = sums[i] e^(rate (from[i] - largest)) */
static void scale(const Row *row, const float *sums, const float *from, float rate) {
  for (size_t i = 0; i < row->n_padded; i += LANES)
    store(row->scaled + i, load(sums + i) * weight_of(load(from + i), row->largest, rate, 0));
}

static size_t first_of_the_largest(const Row *row) {
  size_t i = 0;
  while (i < row->n_groups - 1 && row->tops[i] != row->largest) i++;
  for (i *= GROUP; i < row->vocab; i++)
    if (row->logits[i] == row->largest) return i;
  return row->vocab - 1;
}

/* The index at which the running sum of n weights passes the target, which becomes its remainder. If rounding puts the
 * target after all weights, this is the last one that is not 0. */
static size_t place_of(double *target, const float *weights, size_t n) {
  size_t last = 0;
  for (size_t i = 0; i < n; i++) {
    if (!(weights[i] > 0)) continue;
    if (*target < weights[i]) return i;
    *target -= weights[i];
    last = i;
  }
  return last;
}

static size_t draw(const Row *row, float rate, float least, float uniform) {
  scale(row, row->weights, row->from, rate);
  double target = 0;
  for (size_t i = 0; i < row->n_groups; i++) target += row->scaled[i];
  target *= uniform;
  const size_t group = place_of(&target, row->scaled, row->n_groups);
  target *= row->weights[group] / row->scaled[group];
  float filled[GROUP], weights[GROUP];
  const float *x = group_of(row, group, filled);
  for (int i = 0; i < GROUP; i += LANES) store(weights + i, weight_of(load(x + i), row->from[group], rate, least));
  return group * GROUP + place_of(&target, weights, GROUP);
}

typedef struct {
  float value;
  size_t id;
} Likely;

INLINE bool is_before(Likely one, Likely other) {
  return one.value > other.value || (one.value == other.value && one.id < other.id);
}

/* Keeps the n most likely in order, the first of equal ones; returns the number kept. */
INLINE size_t insert(Likely *likely, size_t n_kept, size_t n, Likely one) {
  if (!(one.value > -INFINITY) || (n_kept == n && !is_before(one, likely[n - 1]))) return n_kept;
  size_t i = n_kept < n ? n_kept++ : n - 1;
  for (; i > 0 && is_before(one, likely[i - 1]); i--) likely[i] = likely[i - 1];
  likely[i] = one;
  return n_kept;
}

/* Finds the n most likely, which are in the n groups with the largest tops. Returns the number found. */
static size_t most_likely(const Row *row, size_t n, Likely *groups, Likely *likely) {
  size_t n_groups = 0, n_kept = 0;
  for (size_t i = 0; i < row->n_groups; i++) n_groups = insert(groups, n_groups, n, (Likely){row->tops[i], i});
  for (size_t i = 0; i < n_groups; i++) {
    const size_t start = groups[i].id * GROUP, end = start + GROUP < row->vocab ? start + GROUP : row->vocab;
    for (size_t id = start; id < end; id++) n_kept = insert(likely, n_kept, n, (Likely){row->logits[id], id});
  }
  return n_kept;
}

static bool report(const Row *row, int32_t token, size_t n_top, int32_t *words, size_t max_top) {
  float *logprob = (float *)words + 1, *top = (float *)words + 2 + max_top;
  if (!isfinite(row->largest)) return true;
  /* The largest logit, whose weight is 1, is left out of the sum, in which small weights would lose their digits. */
  const size_t best = first_of_the_largest(row), group = best / GROUP;
  scale(row, row->sums, row->tops, 1);
  double others = 0;
  for (size_t i = 0; i < row->n_groups; i++)
    if (i != group) others += row->scaled[i];
  float filled[GROUP], weights[GROUP];
  const float *x = group_of(row, group, filled);
  for (int i = 0; i < GROUP; i += LANES) store(weights + i, weight_of(load(x + i), row->largest, 1, 0));
  weights[best % GROUP] = 0;
  for (int i = 0; i < GROUP; i++) others += weights[i];
  const double log_total = log1p(others), from = row->largest;
  if (token >= 0 && (size_t)token < row->vocab && row->logits[token] > -INFINITY)
    *logprob = row->logits[token] - from - log_total;
  if (n_top > max_top) n_top = max_top;
  if (!n_top) return true;
  Likely *likely = malloc(2 * n_top * sizeof *likely);
  if (!likely) return false;
  const size_t n = most_likely(row, n_top, likely + n_top, likely);
  for (size_t i = 0; i < n; i++) words[2 + i] = likely[i].id, top[i] = likely[i].value - from - log_total;
  free(likely);
  return true;
}

static void do_item(Work *work, int item) {
  const Choice *choice = (const Choice *)work;
  const size_t r = item, max_top = choice->max_top, n_groups = (choice->vocab + GROUP - 1) / GROUP;
  const size_t n_padded = (n_groups + LANES - 1) / LANES * LANES;
  const float temperature = choice->temperature[r], least = choice->min_p[r];
  const float rate = temperature > 0 ? fminf(1 / temperature, FLT_MAX) : 1;
  const bool reports = choice->n_top[r] >= 0, chooses = choice->known[r] < 0, same = choice->logits == choice->raw;
  int32_t token = choice->known[r], *words = choice->words + r * (2 + 2 * max_top);
  float *parts = malloc(5 * n_padded * sizeof(float));
  if (!parts) {
    work->failed = true;
    return;
  }
  Row row = {.logits = choice->logits + r * choice->vocab, .vocab = choice->vocab, .n_groups = n_groups,
             .n_padded = n_padded, .tops = parts, .sums = parts + n_padded, .from = parts + 2 * n_padded,
             .weights = parts + 3 * n_padded, .scaled = parts + 4 * n_padded};
  if (chooses) {
    const bool draws = temperature > 0;
    read_row(&row, reports && same, draws, rate, least);
    const bool drawable = draws && isfinite(row.largest);
    token = drawable ? draw(&row, rate, least, choice->uniform[r]) : first_of_the_largest(&row);
  }
  choice->tokens[r] = words[0] = token;
  float *logprob = (float *)words + 1, *top = logprob + 1 + max_top;
  *logprob = -INFINITY;
  for (size_t i = 0; i < max_top; i++) words[2 + i] = 0, top[i] = -INFINITY;
  if (reports) {
    if (!chooses || !same) {
      row.logits = choice->raw + r * choice->vocab;
      read_row(&row, true, false, 1, 0);
    }
    if (!report(&row, token, choice->n_top[r], words, max_top)) work->failed = true;
  }
  free(parts);
}

XLA_FFI_Error *token_choice(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const size_t n_rows = argument(frame, 0)->dims[0], vocab = argument(frame, 0)->dims[1];
  if (!n_rows) return NULL;
  Choice *choice = malloc(sizeof *choice);
  if (!choice) return no_memory(frame);
  *choice = (Choice){.work = {.do_item = do_item, .n_items = n_rows},
                     .logits = argument(frame, 0)->data,
                     .raw = argument(frame, 1)->data,
                     .known = argument(frame, 2)->data,
                     .temperature = argument(frame, 3)->data,
                     .min_p = argument(frame, 4)->data,
                     .uniform = argument(frame, 5)->data,
                     .n_top = argument(frame, 6)->data,
                     .tokens = result(frame, 0)->data,
                     .words = result(frame, 1)->data,
                     .vocab = vocab,
                     .max_top = (result(frame, 1)->dims[1] - 2) / 2};
  const double n_threads = count_threads(frame), worth = 1 + n_rows * vocab / LOGITS_FOR_A_THREAD;
  return do_all(&choice->work, frame, worth < n_threads ? worth : n_threads);
}
