/* The causal convolution of recurrent layers on a CPU, as an XLA custom call: rows of any lengths and phases.
 *
 * XLA would copy all states of a layer to change those of a batch. The arguments are those of causal_convolution.py:
 * x [T, C]; weight [W, C], the newest token's row last; bias [C] or [0]; row_start [R + 1] and state_of_row [R] int32;
 * starts [R], one byte each; kept [T] int32 or [0]; and the states [n_states, 1, W - 1, C], the inputs before a
 * row's first token, which are changed in place. The result is [T, C]. All numbers are float32.
 */

#include <stdint.h>

#include "xla_call.h"

#define PARTS 4 /* of a row's channels, per thread */

/* Elements of x below which another thread costs more than it saves. */
#define WORTH_A_THREAD (1 << 15)

typedef struct {
  Work work;
  const float *x, *weight, *bias; /* no bias: NULL */
  const int32_t *row_start, *state_of_row, *kept; /* no kept without drafts */
  const uint8_t *starts;
  float *states, *y;
  size_t n_states, n_kept, n_channels, n_parts; /* W - 1 inputs kept, C, parts of each row */
} Convolution;

/* The inputs of some channels of a row: those before its first token, then its tokens'. */
typedef struct {
  const float *before, *tokens; /* before: NULL where the request starts */
  size_t n_kept, n_channels;    /* inputs before the first token, and the distance between inputs */
} Inputs;

/* Input `i` of a row, counted from the oldest that is kept; NULL for zeros. */
static const float *input(const Inputs *row, size_t i) {
  if (i >= row->n_kept) return row->tokens + (i - row->n_kept) * row->n_channels;
  return row->before ? row->before + i * row->n_channels : NULL;
}

/* Writes the state after `n` tokens. It may replace the inputs before the first: an input moves only forward. */
static void write_state(const Inputs *row, size_t n, float *to, size_t width) {
  for (size_t i = 0; i < row->n_kept; i++, to += row->n_channels) {
    const float *from = input(row, n + i);
    if (from) memmove(to, from, width * sizeof *to);
    else memset(to, 0, width * sizeof *to);
  }
}

static void convolve(const Convolution *c, const Inputs *row, size_t token, size_t channel, size_t width, float *y) {
  for (size_t j = 0; j < width; j++) y[j] = 0;
  for (size_t back = 0; back <= c->n_kept; back++) { /* the newest first, as in model/causal_convolution.py */
    const float *x = input(row, token + c->n_kept - back);
    const float *weight = c->weight + (c->n_kept - back) * c->n_channels + channel;
    for (size_t j = 0; x && j < width; j++) y[j] += weight[j] * x[j];
  }
  for (size_t j = 0; c->bias && j < width; j++) y[j] += c->bias[channel + j];
}

static void do_item(Work *work, int item) {
  const Convolution *c = (const Convolution *)work;
  const size_t number = item / c->n_parts, part = item % c->n_parts, of_row = c->state_of_row[number];
  const size_t first = c->row_start[number], n_tokens = c->row_start[number + 1] - first;
  const size_t channel = c->n_channels * part / c->n_parts, width = c->n_channels * (part + 1) / c->n_parts - channel;
  if (!n_tokens) return;
  const bool is_padding = of_row >= c->n_states;
  float *own = c->states + (is_padding ? 0 : of_row) * c->n_kept * c->n_channels + channel;
  const Inputs row = {.before = is_padding || c->starts[number] ? NULL : own,
                      .tokens = c->x + first * c->n_channels + channel,
                      .n_kept = c->n_kept,
                      .n_channels = c->n_channels};
  for (size_t token = 0; token < n_tokens; token++) {
    convolve(c, &row, token, channel, width, c->y + (first + token) * c->n_channels + channel);
    const size_t kept = c->kept ? (size_t)c->kept[first + token] : c->n_states;
    if (kept >= c->n_states) continue;
    write_state(&row, token + 1, c->states + kept * c->n_kept * c->n_channels + channel, width);
  }
  if (!is_padding) write_state(&row, n_tokens, own, width);
}

XLA_FFI_Error *causal_convolution(XLA_FFI_CallFrame *frame) {
  if (asked_what_it_is(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *bias = argument(frame, 2), *rows = argument(frame, 4);
  const XLA_FFI_Buffer *kept = argument(frame, 6), *states = result(frame, 1);
  Convolution *c = malloc(sizeof *c);
  if (!c) return no_memory(frame);
  *c = (Convolution){.work = {.do_item = do_item},
                     .x = x->data,
                     .weight = argument(frame, 1)->data,
                     .bias = bias->dims[0] ? bias->data : NULL,
                     .row_start = argument(frame, 3)->data,
                     .state_of_row = rows->data,
                     .starts = argument(frame, 5)->data,
                     .kept = kept->dims[0] ? kept->data : NULL,
                     .states = states->data,
                     .y = result(frame, 0)->data,
                     .n_states = states->dims[0],
                     .n_kept = states->dims[2],
                     .n_channels = x->dims[1]};
  const size_t n_rows = rows->dims[0], n_real = c->row_start[n_rows], n_threads = count_threads(frame);
  memset(c->y + n_real * c->n_channels, 0, (x->dims[0] - n_real) * c->n_channels * sizeof *c->y);
  c->n_parts = PARTS * n_threads;
  c->work.n_items = n_rows * c->n_parts;
  const double worth = (double)n_real * c->n_channels / WORTH_A_THREAD;
  return do_all(&c->work, frame, worth < n_threads ? worth : n_threads);
}
