/* The frame of an XLA custom call on a CPU: its arguments, and threads for its work. */

#ifndef ORCA_XLA_CALL_H
#define ORCA_XLA_CALL_H

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

/* Work cut into items, which threads take in turn. It is the first member of what an operation allocates with malloc;
 * the last thread that lets go of it frees the memory. */
typedef struct Work {
  void (*do_item)(struct Work *, int item);
  int n_items;
  atomic_bool failed;
  atomic_int next, done, holders; /* items taken, items finished, threads that may still read this */
} Work;

/* XLA's first call asks for the API version and has no arguments: this answers it and returns true. */
static inline bool asked_what_it_is(XLA_FFI_CallFrame *frame) {
  /* The name of an extension's type differs between versions of jaxlib. */
  for (__typeof__(frame->extension_start) asked = frame->extension_start; asked; asked = asked->next)
    if (asked->type == XLA_FFI_Extension_Metadata) {
      XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)asked)->metadata;
      metadata->api_version.major_version = XLA_FFI_API_MAJOR;
      metadata->api_version.minor_version = XLA_FFI_API_MINOR;
      return true;
    }
  return false;
}

static inline XLA_FFI_Buffer *argument(const XLA_FFI_CallFrame *frame, int i) { return frame->args.args[i]; }
static inline XLA_FFI_Buffer *result(const XLA_FFI_CallFrame *frame, int i) { return frame->rets.rets[i]; }

/* The value of the scalar attribute `name`, which must exist. */
static inline const void *attribute(const XLA_FFI_CallFrame *frame, const char *name) {
  const XLA_FFI_Attrs *attrs = &frame->attrs;
  int64_t i = 0;
  while (attrs->names[i]->len != strlen(name) || memcmp(attrs->names[i]->ptr, name, strlen(name))) i++;
  return ((const XLA_FFI_Scalar *)attrs->attrs[i])->value;
}

static inline XLA_FFI_Error *no_memory(const XLA_FFI_CallFrame *frame) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, "no memory is left on the host",
                                    XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  return frame->api->XLA_FFI_Error_Create(&args);
}

static inline void forget(const XLA_FFI_CallFrame *frame, XLA_FFI_Error *error) {
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&args);
}

/* The number of XLA's threads, including this one. */
static inline int count_threads(const XLA_FFI_CallFrame *frame) {
  int64_t n = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &n};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (!error) return n;
  forget(frame, error); /* there is no pool */
  return 1;
}

static inline void take_items(Work *work) {
  for (;;) {
    const int item = atomic_fetch_add(&work->next, 1);
    if (item >= work->n_items) return;
    work->do_item(work, item);
    atomic_fetch_add(&work->done, 1);
  }
}

static inline void let_go(Work *work) {
  if (atomic_fetch_sub(&work->holders, 1) == 1) free(work);
}

static void help(void *work) {
  take_items(work);
  let_go(work);
}

/* Does all items with at most `n_threads` threads, and lets go of the work. Threads that come late find no items, so
 * this waits for items under way, never for a thread to start. */
static inline XLA_FFI_Error *do_all(Work *work, const XLA_FFI_CallFrame *frame, double n_threads) {
  const int n_items = work->n_items;
  atomic_init(&work->failed, false);
  atomic_init(&work->next, 0);
  atomic_init(&work->done, 0);
  atomic_init(&work->holders, 1);
  for (int i = 1; i < n_threads && i < n_items; i++) {
    XLA_FFI_ThreadPool_Schedule_Args task = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help,
                                             work};
    atomic_fetch_add(&work->holders, 1);
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&task);
    if (!error) continue;
    forget(frame, error);
    let_go(work); /* the threads that have started do it all */
    break;
  }
  take_items(work);
  while (atomic_load(&work->done) < n_items) sched_yield(); /* other threads compute the last items */
  const bool failed = atomic_load(&work->failed);
  let_go(work);
  return failed ? no_memory(frame) : NULL;
}

#endif
