// What the page knows: the newest iterations and requests, made from the lines of the feed or of a file.
//
// Memory is bounded: the oldest are forgotten and counted. docs/pages.md describes the lines.

import { Queue } from "./queue.js";
import { LiveRequest } from "./request.js";

export const LIMITS = { iterations: 20000, cells: 400000, requests: 2000, stages: 40000, moments: 5000 };
const KEEP = [100, 200000];
const FULL_HELLO = 1024; // live requests of a hello that may not be all

/** The limits where the newest `keep` iterations are kept, a text of digits; the usual ones for anything else. */
export function limitsOf(keep) {
  if (!/^\d{1,9}$/.test(keep ?? "")) return LIMITS;
  const iterations = Math.min(KEEP[1], Math.max(KEEP[0], Number(keep)));
  const times = iterations / LIMITS.iterations;
  return { ...LIMITS, iterations, cells: LIMITS.cells * times, requests: Math.max(500, LIMITS.requests * times) };
}

const nothing = () => ({ iterations: 0, skipped: 0, unseen: 0, lost: 0, forgotten: 0, forgottenRequests: 0 });

export class LiveModel {
  constructor(limits = LIMITS) {
    this.limits = limits;
    this.version = 0; // changes with everything else
    this.source = "feed"; // or "file"
    this.clear();
  }

  clear() {
    this.sizes = {}; // of the engine, as in a hello
    this.status = { phase: "connecting", reason: null };
    this.iterations = new Queue();
    this.requests = new Map(); // by number, in the order of arrival
    this.stages = new Queue(); // { number, stage, from, to }
    this.moments = new Queue(); // { time, phase, reason }: changes of the server's status
    this.held = new Queue(); // { time, held }: changes of who waits first, and why
    this.gaps = new Queue(); // { from, to, n, why }: iterations that are not shown
    this.counts = nothing();
    this.origin = null; // the first time that was heard of
    this.knownFrom = null; // the time before which iterations are not known, if there is one
    this.last = 0; // the newest
    this.nCells = 0;
    this.run = null;
    this.note = ""; // what a file says at its end
    this.nSkippedAhead = 0; // skipped iterations whose numbers have not been missed yet
    this.hasReconnected = false;
    this.version += 1;
  }

  /** A line of a feed or of a file; what is unknown is left alone. */
  line(line) {
    if ("orca_live" in line) this.hello(line);
    else if ("orca_recording" in line) this.#recording(line);
    else if ("iteration" in line) this.#iteration(line);
    else if ("arrived" in line) this.#arrived(line);
    else if ("finished" in line) this.#finished(line);
    else if ("stages" in line) this.#stages(line.stages);
    else if ("status" in line) this.#status(line);
    else if ("skipped" in line) this.#skipped(line.skipped);
    else if ("unseen" in line) this.hasReconnected = true;
    else if ("not_repeatable" in line) this.note = line.not_repeatable;
    else if ("stopped" in line) this.note = `the recording was stopped: ${line.stopped}`;
    this.version += 1;
  }

  /** What a new connection begins with. */
  hello(hello) {
    if (hello.run !== this.run) this.clear();
    else if (this.iterations.length) this.hasReconnected = true;
    this.run = hello.run ?? null;
    this.#know(hello);
    if (this.source === "file") this.knownFrom = hello.known_from ?? null;
    else if (hello.model && !this.iterations.length) this.knownFrom = hello.now;
    if (hello.model) this.#tick(hello.now); // while it loads there is no clock
    const live = new Set();
    for (const line of hello.requests ?? []) {
      live.add(line.arrived);
      if (!this.requests.has(line.arrived)) this.#arrived(line);
      this.requests.get(line.arrived)?.update(line);
    }
    if (live.size < FULL_HELLO && this.source === "feed") this.#endUnseen(live, hello.now);
    this.#status({ status: hello.status, reason: hello.reason, time: hello.now });
    this.version += 1;
  }

  /** The live requests that wait for slots, in their order. */
  waiting() {
    const waiting = [...this.requests.values()].filter((request) => request.isWaiting);
    if (this.sizes.scheduling_policy === "priority") waiting.sort((a, b) => a.priority - b.priority);
    return waiting;
  }

  #know(hello) {
    const { orca_live: _, requests: __, status: ___, reason: ____, now: _____, known_from: ______, ...sizes } = hello;
    this.sizes = sizes;
  }

  #recording(header) {
    this.clear();
    const { scheduling = {}, ...serving } = header.serving ?? {};
    const names = { policy: scheduling.policy, scheduling_policy: scheduling.order, n_workers: header.n_workers };
    this.sizes = { ...serving, ...names, model: header.model ?? "the demo model", started: header.started };
    this.status = { phase: "recorded", reason: header.started ?? null };
  }

  #arrived(line) {
    if (![line.arrived, line.time, line.n_input].every(Number.isFinite)) throw new Error("it lacks fields");
    const request = new LiveRequest(line);
    if (this.requests.size >= this.limits.requests) this.#forgetRequest();
    this.requests.set(request.number, request);
    this.#tick(request.arrived);
  }

  #finished(line) {
    this.requests.get(line.finished)?.end(line);
    this.#tick(line.time);
  }

  #iteration(line) {
    const { iteration: number, issued, returned, bucket, slots, waiting, held = null } = line;
    const isWhole = Array.isArray(line.rows) && Array.isArray(line.prefill) && slots?.length === 3;
    if (!isWhole || ![number, issued, returned, bucket].every(Number.isFinite)) throw new Error("it lacks fields");
    const n = line.rows.length;
    const made = { number, issued, returned, bucket, slots, waiting, held, nTokens: 0 };
    made.requests = new Array(n);
    made.tokens = new Array(n);
    made.phases = new Array(n);
    made.starts = line.starts ?? [];
    made.partial = line.partial ?? [];
    made.preempted = line.preempted ?? [];
    this.#missing(made);
    if (JSON.stringify(this.held.last()?.held ?? null) !== JSON.stringify(held)) {
      this.held.push({ time: issued, held });
      if (this.held.length > this.limits.moments) this.held.shift();
    }
    for (const one of made.preempted) this.requests.get(one)?.preempted(issued);
    let nPrefill = 0;
    for (let i = 0; i < n; i++) {
      const [one, nTokens] = line.rows[i];
      const isPrefill = line.prefill[nPrefill] === i;
      const start = isPrefill ? (made.starts[nPrefill++] ?? 0) : null;
      made.requests[i] = one;
      made.tokens[i] = nTokens;
      made.nTokens += nTokens;
      const request = this.requests.get(one);
      made.phases[i] = request ? request.row(made, nTokens, start, made.partial.includes(i)) : isPrefill ? 0 : 2;
    }
    this.#tick(issued);
    this.#tick(returned);
    this.iterations.push(made);
    this.nCells += n;
    this.counts.iterations += 1;
    while (this.iterations.length > this.limits.iterations || this.nCells > this.limits.cells) this.#forget();
  }

  // Numbers between the last iteration and this one: skipped by the server, not seen, or lost with a worker.
  #missing(iteration) {
    const last = this.iterations.last();
    const n = last ? iteration.number - last.number - 1 : 0;
    const skipped = Math.min(n, this.nSkippedAhead);
    const others = n - skipped;
    this.nSkippedAhead = 0;
    if (n > 0) {
      const why = skipped ? "skipped" : this.hasReconnected ? "unseen" : "lost";
      if (others) this.counts[this.hasReconnected ? "unseen" : "lost"] += others;
      this.#gap({ from: last.returned, to: iteration.issued, n, why });
    }
    this.hasReconnected = false;
  }

  #gap(gap) {
    this.gaps.push(gap);
    if (this.gaps.length > this.limits.moments) this.gaps.shift();
    for (const request of this.requests.values()) if (request.isLive) request.hasGaps = true;
  }

  #stages(reports) {
    for (const [number, stage, from, to] of reports) {
      this.stages.push({ number, stage, from, to });
      if (this.stages.length > this.limits.stages) this.stages.shift();
    }
  }

  #status({ status, reason = null, time }) {
    if (status !== this.status.phase || reason !== this.status.reason) {
      this.moments.push({ time, phase: status, reason });
      if (this.moments.length > this.limits.moments) this.moments.shift();
    }
    this.status = { phase: status, reason };
    if (this.sizes.model) this.#tick(time);
  }

  #skipped(n) {
    this.counts.skipped += n;
    this.nSkippedAhead += n;
  }

  #endUnseen(live, now) {
    for (const request of this.requests.values()) {
      if (request.isLive && !live.has(request.number)) {
        request.end({ time: now, reason: "not seen" });
        request.hasGaps = true;
      }
    }
  }

  #forget() {
    const old = this.iterations.shift();
    this.nCells -= old.requests.length;
    this.counts.forgotten += 1;
    for (const one of old.requests) {
      const request = this.requests.get(one);
      if (request?.rows.at(0) === old) {
        request.rows.shift();
        request.nForgotten += 1;
      }
    }
    while (this.stages.length && this.stages.at(0).from < old.issued) this.stages.shift();
  }

  #forgetRequest() {
    let oldest = this.requests.keys().next().value;
    for (const request of this.requests.values()) {
      if (!request.isLive) {
        oldest = request.number;
        break;
      }
    }
    this.requests.delete(oldest);
    this.counts.forgottenRequests += 1;
  }

  #tick(time) {
    if (typeof time !== "number") return;
    this.origin = this.origin === null ? time : Math.min(this.origin, time);
    this.last = Math.max(this.last, time);
  }
}
