// Writes a model in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing.
//
// Spans are complete events ("X"). On each track they are nested or do not overlap, as both programs require.

import { DECODE } from "./model.js";
import { stageSpans } from "./times.js";
import { inShort, summedReasons } from "./why.js";

const ITERATIONS = 1;
const STAGES = 2;
const REQUESTS = 3;
const MEMORY = 4;
const PHASES = ["prefill", "prefill, later chunk", "decode"];

/** The trace, as an object to write as JSON. */
export function traceOf(model) {
  const origin = model.origin ?? 0;
  const events = [
    ...names(ITERATIONS, "iterations"),
    ...names(STAGES, "stages"),
    ...names(REQUESTS, "requests"),
    ...names(MEMORY, "slots and queue"),
    ...iterations(model),
    ...stages(model),
    ...requests(model),
    ...counters(model),
    ...moments(model),
  ].map((event) => inMicroseconds(event, origin));
  return { displayTimeUnit: "ms", otherData: { source: "orca_jax /live", ...text(model.sizes) }, traceEvents: events };
}

function* iterations(model) {
  const tracks = new Tracks();
  for (const one of model.iterations) {
    const nDecode = one.phases.filter((phase) => phase === DECODE).length;
    const args = {
      rows: one.requests.length,
      prefill: one.requests.length - nDecode,
      decode: nDecode,
      tokens: one.nTokens,
      bucket: one.bucket,
      waiting: one.waiting,
      requests: one.requests.map((request, i) => `#${request}: ${one.tokens[i]}`).join(", "),
    };
    const tid = tracks.place(one.issued, one.returned);
    yield span(ITERATIONS, tid, `iteration ${one.number}`, one.issued, one.returned, args);
  }
  yield* tracks.names(ITERATIONS, (i) => `in flight ${i}`);
}

function* stages(model) {
  const seen = new Set();
  for (const { number, stage, from, to } of stageSpans(model)) {
    seen.add(stage);
    yield span(STAGES, stage + 1, number === null ? "iteration" : `iteration ${number}`, from, to, {});
  }
  for (const stage of seen) yield name(STAGES, stage + 1, `stage ${stage + 1}`);
}

function* requests(model) {
  const tracks = new Tracks();
  const all = [...model.requests.values()].sort((a, b) => a.arrived - b.arrived || a.number - b.number);
  for (const request of all) {
    const to = request.finished ?? Math.max(model.last, request.arrived);
    const tid = tracks.place(request.arrived, to);
    const args = {
      id: request.id,
      input: request.nInput,
      cached: request.nCached,
      output: request.nOutput,
      priority: request.priority,
      end: request.reason ?? "live",
    };
    yield span(REQUESTS, tid, `#${request.number}`, request.arrived, to, args);
    for (const part of parts(model, request, to)) yield span(REQUESTS, tid, part.name, part.from, part.to, {});
  }
  yield* tracks.names(REQUESTS, (i) => `requests ${i}`);
}

// A request's waits and phases, one after the other.
function parts(model, request, end) {
  const found = [];
  for (const [from, to] of request.waits)
    for (const part of summedReasons(model, request, from, to ?? end))
      found.push({ name: `waits: ${inShort(model, request, part)}`, from: part.from, to: part.to });
  let last = null;
  for (const row of request.rows) {
    const name = PHASES[request.phaseIn(row)];
    const isNew = last === null || last.name !== name || request.waits.some(([from]) => from > last.from && from <= row.issued);
    if (isNew) found.push((last = { name, from: row.issued, to: row.returned }));
    else last.to = row.returned;
  }
  found.sort((a, b) => a.from - b.from);
  let free = request.arrived;
  for (const part of found) {
    part.from = Math.max(part.from, free);
    part.to = Math.min(part.to, end);
    free = Math.max(free, part.to);
  }
  return found.filter((part) => part.to > part.from);
}

function* counters(model) {
  for (const { issued, slots, waiting } of model.iterations) {
    const [reserved, used, cached] = slots;
    const values = { used, "reserved, not used": reserved - used, cached };
    yield { ph: "C", pid: MEMORY, tid: 0, name: "slots", from: issued, args: values };
    yield { ph: "C", pid: MEMORY, tid: 0, name: "waiting requests", from: issued, args: { waiting } };
  }
}

function* moments(model) {
  const mark = (from, name) => ({ ph: "i", s: "g", pid: ITERATIONS, tid: 0, name, from, args: {} });
  for (const { time, phase, reason } of model.moments) yield mark(time, reason ? `${phase}: ${reason}` : phase);
  for (const { from, n, why } of model.gaps) yield mark(from, `${n} iterations ${why}`);
}

// Tracks for spans: spans that overlap get different ones.
class Tracks {
  #ends = [];

  place(from, to) {
    let i = this.#ends.findIndex((end) => end <= from);
    if (i < 0) i = this.#ends.length;
    this.#ends[i] = to;
    return i + 1;
  }

  *names(pid, naming) {
    for (let i = 1; i <= this.#ends.length; i++) yield name(pid, i, naming(i));
  }
}

function span(pid, tid, name, from, to, args) {
  return { ph: "X", pid, tid, name, from, to, args };
}

function names(pid, text) {
  const sort = { ph: "M", pid, tid: 0, name: "process_sort_index", args: { sort_index: pid } };
  return [{ ph: "M", pid, tid: 0, name: "process_name", args: { name: text } }, sort];
}

function name(pid, tid, text) {
  return { ph: "M", pid, tid, name: "thread_name", args: { name: text } };
}

// Rounds to whole nanoseconds, so that no part ends after the span around it.
function inMicroseconds({ from, to, ...event }, origin) {
  if (from === undefined) return { ...event, ts: 0 };
  const nanoseconds = (time) => Math.max(0, Math.round((time - origin) * 1e9));
  const ts = nanoseconds(from);
  const made = { ...event, ts: ts / 1000 };
  if (to !== undefined) made.dur = Math.max(0, nanoseconds(to) - ts) / 1000;
  return made;
}

function text(values) {
  return Object.fromEntries(Object.entries(values).map(([key, value]) => [key, String(value)]));
}
