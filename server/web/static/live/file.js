// Files: the JSON lines that `orca serve --record` writes, those that this page saves, and downloads.

import { CHUNK, DECODE, outputs } from "./model.js";

const LONGEST_LINE = 1 << 26; // characters
const TURN = 40; // milliseconds of work before the page gets a turn
const KEEP = 60000; // milliseconds until the browser has surely read a download

/** Read a stream of bytes into a model. Throws an Error that says what is wrong with the file. Calls `changed` now and then. */
export async function readInto(model, stream, changed) {
  model.clear();
  model.source = "file";
  model.status = { phase: "opening", reason: null };
  let isFirst = true;
  let n = 0;
  let since = performance.now();
  for await (const text of lines(stream)) {
    n += 1;
    const line = parsed(text, n);
    if (isFirst && !("orca_recording" in line || "orca_live" in line))
      throw new Error("this is neither a recording of orca serve --record nor a file that this page saved");
    isFirst = false;
    try {
      model.line(line);
    } catch (error) {
      throw new Error(`line ${n} is not a line of a recording: ${error.message}`);
    }
    if (performance.now() - since > TURN) {
      changed();
      await new Promise((resolve) => setTimeout(resolve));
      since = performance.now();
    }
  }
  if (isFirst) throw new Error("the file is empty");
  model.status = { phase: "recorded", reason: model.note || model.status.reason };
  model.version += 1;
}

function parsed(text, n) {
  let line;
  try {
    line = JSON.parse(text);
  } catch {
    try {
      line = JSON.parse(text.replace(/(?<=[[:,]\s*)(-?Infinity|NaN)(?=\s*[\],}])/g, "null")); // Python's JSON
    } catch (error) {
      throw new Error(`line ${n} is not JSON: ${error.message}`);
    }
  }
  if (line === null || typeof line !== "object" || Array.isArray(line)) throw new Error(`line ${n} is not an object`);
  return line;
}

// A last line without a newline is left out: the file was still being written.
async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      if (rest.length > LONGEST_LINE) throw new Error("a line is longer than 64 MiB, so this is no recording");
      yield* parts.filter((part) => part !== "");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The lines of a model, from which `readInto` makes an equal one. */
export function* savedLines(model, now = new Date()) {
  const requests = [...model.requests.values()];
  const before = requests.filter(hasBegunBefore);
  const { run: _, ...sizes } = model.sizes;
  yield {
    orca_live: 1,
    ...sizes,
    saved: now.toISOString(),
    now: model.origin,
    known_from: model.counts.forgotten ? model.iterations.at(0).issued : model.knownFrom,
    status: model.moments.at(0)?.phase ?? model.status.phase,
    reason: null,
    requests: before.map(begun),
  };
  const later = [
    ...requests.filter((one) => !hasBegunBefore(one)).map((one) => [one.arrived, 0, arrival(one)]),
    ...[...model.moments].map((one) => [one.time, 1, { status: one.phase, reason: one.reason, time: one.time }]),
    ...[...model.holds].map((one) => [one.to, 1, { hold: one.what, seconds: one.to - one.from, time: one.to }]),
    ...[...model.gaps].map((gap) => [Math.max(gap.from, gap.to), 2.5, { [gap.why]: gap.n }]),
    ...[...model.stages].map((one) => [one.from, 1, { stages: [[one.number, one.stage, one.from, one.to]] }]),
    ...[...model.iterations].map((one) => [one.returned, 2, iteration(one)]),
    ...requests.filter((one) => !one.isLive).map((one) => [one.finished, 3, end(one)]),
  ];
  later.sort(([a, i], [b, j]) => a - b || i - j);
  for (const [, , line] of later) yield line;
}

// A request whose first iteration is no longer kept had begun before the saved time.
function hasBegunBefore(request) {
  const first = request.rows.at(0);
  return request.scheduled !== null && (first === undefined || first.issued > request.scheduled);
}

function arrival(request) {
  const { number, arrived, id, nInput, maxTokens, priority } = request;
  return { arrived: number, time: arrived, id, n_input: nInput, max_tokens: maxTokens, priority };
}

function begun(request) {
  let nOutput = request.nOutput;
  for (const row of request.rows) {
    const i = row.requests.indexOf(request.number);
    nOutput -= outputs(row, i);
  }
  const first = request.rows.at(0);
  const goesOn = first !== undefined && request.phaseIn(first) === CHUNK;
  return {
    ...arrival(request),
    n_cached: request.nCached,
    n_computed: goesOn ? Math.max(1, request.nInput - 1) : request.nInput,
    n_output: Math.max(0, nOutput),
    admitted: !request.isWaiting,
    scheduled: request.scheduled,
    first_token: request.firstToken,
  };
}

function iteration(one) {
  const { number, issued, returned, bucket, slots, waiting, held, requests, tokens, phases, starts, partial } = one;
  const prefill = phases.flatMap((phase, i) => (phase === DECODE ? [] : [i]));
  const rows = requests.map((request, i) => [request, tokens[i]]);
  const waits = one.adapters.length ? { adapters: one.adapters } : {};
  const line = { iteration: number, issued, rows, bucket, prefill, starts, partial, slots, waiting, held };
  return { ...line, preempted: one.preempted, returned, ...(one.kept && { kept: [...one.kept] }), ...waits };
}

function end(request) {
  const { number, finished, reason, nOutput, nCached } = request;
  return { finished: number, time: finished, reason, n_output: nOutput, n_cached: nCached };
}

/** Let the user save a file of these parts. */
export function download(name, type, parts) {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), KEEP);
}
