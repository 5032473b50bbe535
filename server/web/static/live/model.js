// The newest iterations and requests, made from the lines of the feed or of a file.
//
// Memory is bounded: the oldest entries are forgotten and counted. docs/pages.md describes the lines.

export const PREFILL = 0;
export const CHUNK = 1; // a later chunk of a prompt
export const DECODE = 2;
/** The phases' names, which are also the names of their colours, and their descriptions. */
export const PHASES = ["prefill", "chunk", "decode"];
export const PHASE_WORDS = ["prefill", "later chunk of the prompt", "decode"];

const LIMITS = { iterations: 20000, cells: 400000, requests: 2000, stages: 40000, moments: 5000 };
const KEEP = [100, 200000];
const FULL_HELLO = 1024; // live requests in a hello, which may then have left some out
const WASTE = 1024; // removed entries for which a queue keeps its array

/** The limits of a page that keeps the newest `keep` iterations, a text of digits; the usual limits for any other text. */
export function limitsOf(keep) {
  if (!/^\d{1,9}$/.test(keep ?? "")) return LIMITS;
  const iterations = Math.min(KEEP[1], Math.max(KEEP[0], Number(keep)));
  const times = iterations / LIMITS.iterations;
  return { ...LIMITS, iterations, cells: LIMITS.cells * times, requests: Math.max(500, LIMITS.requests * times) };
}

/** A list that grows at its end and shrinks at its beginning, both in constant time. Beyond `limit` it drops the first entry. */
class Queue {
  #items = [];
  #first = 0;
  #limit;

  constructor(limit = Infinity) {
    this.#limit = limit;
  }

  get length() {
    return this.#items.length - this.#first;
  }

  at(i) {
    return this.#items[this.#first + i];
  }

  last() {
    return this.length ? this.#items.at(-1) : undefined;
  }

  push(item) {
    this.#items.push(item);
    if (this.length > this.#limit) this.shift();
  }

  /** Remove and return the first entry. */
  shift() {
    const item = this.#items[this.#first];
    this.#items[this.#first++] = undefined;
    if (this.#first > WASTE && this.#first * 2 > this.#items.length) {
      this.#items = this.#items.slice(this.#first);
      this.#first = 0;
    }
    return item;
  }

  /** The index of the first entry that passes `test`, or the length. Every entry after that one must pass too. */
  search(test) {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (test(this.at(middle))) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The entries from the first that passes `test`, as `search` finds it. */
  *from(test) {
    for (let i = this.search(test); i < this.length; i++) yield this.at(i);
  }

  *[Symbol.iterator]() {
    for (let i = 0; i < this.length; i++) yield this.at(i);
  }
}

/** A request that has arrived. Times are seconds of the server's clock, null until they are known. */
class LiveRequest {
  constructor(line) {
    this.number = line.arrived;
    this.id = String(line.id ?? "");
    this.arrived = line.time;
    this.nInput = line.n_input;
    this.maxTokens = line.max_tokens;
    this.priority = line.priority ?? 0;
    this.nCached = line.n_cached ?? 0;
    this.nOutput = 0;
    this.nPreempted = 0;
    this.scheduled = null; // issue of its first iteration
    this.firstToken = null;
    this.lastToken = null;
    this.longestGap = 0; // between two tokens
    this.finished = null;
    this.reason = null;
    this.waits = [[line.time, null]]; // the times without slots, as pairs of beginning and end
    this.rows = new Queue(); // its iterations
    this.nForgotten = 0; // iterations that are no longer kept
    this.inPrompt = false; // a part of the prompt has been computed, but not all
    this.hasGaps = false; // the page missed some of its iterations, so `nOutput` is a lower bound
  }

  get isWaiting() {
    return this.finished === null && this.waits.at(-1)?.[1] === null;
  }

  get isLive() {
    return this.finished === null;
  }

  /** "waiting", "prefill" or "decode", or the reason for which it ended. */
  get state() {
    if (!this.isLive) return this.reason;
    if (this.isWaiting) return "waiting";
    return this.nOutput > 0 && !this.inPrompt ? "decode" : "prefill";
  }

  /** Its phase in an iteration of `rows`. */
  phaseIn(row) {
    return row.phases[row.requests.indexOf(this.number)];
  }

  /** Take over what a hello says about this request. */
  update(line) {
    this.nOutput = line.n_output;
    this.scheduled ??= line.scheduled ?? null;
    this.firstToken ??= line.first_token ?? null;
    this.inPrompt = line.admitted && line.n_computed > 0 && line.n_computed < this.nInput;
    if (line.admitted) this.#endWait(this.scheduled ?? line.time);
    this.hasGaps = false;
  }

  /** Add its row in an iteration; returns the row's phase. `start` is null for a decode, which gives `nOutput`. */
  row(iteration, nOutput, start, isPartial) {
    this.rows.push(iteration);
    this.scheduled ??= iteration.issued;
    if (this.isWaiting) this.#endWait(iteration.issued);
    if (start === null) {
      this.#token(iteration.returned, nOutput);
      this.inPrompt = false;
      return DECODE;
    }
    if (!this.inPrompt && this.nOutput === 0 && this.nPreempted === 0) this.nCached = start;
    const phase = this.inPrompt ? CHUNK : PREFILL;
    this.inPrompt = isPartial;
    if (!isPartial) this.#token(iteration.returned, 1);
    return phase;
  }

  /** Let it wait again: it lost its slots. */
  preempted(at) {
    if (!this.isLive || this.isWaiting) return;
    this.waits.push([at, null]);
    this.nPreempted += 1;
    this.inPrompt = false;
  }

  end(line) {
    if (this.isWaiting) this.#endWait(line.time);
    this.finished = line.time;
    this.reason = line.reason;
    this.nOutput = line.n_output ?? line.output?.length ?? this.nOutput;
    this.nCached = line.n_cached ?? this.nCached;
  }

  #endWait(at) {
    this.waits.at(-1)[1] ??= at;
  }

  #token(at, n) {
    if (!this.isLive) return; // the engine computed it before it knew of the end
    if (this.lastToken !== null) this.longestGap = Math.max(this.longestGap, at - this.lastToken);
    this.firstToken ??= at;
    this.lastToken = at;
    this.nOutput += n;
  }
}

/** The output tokens of row `i` of an iteration. */
export function outputs(iteration, i) {
  if (iteration.phases[i] === DECODE) return iteration.kept?.get(i) ?? iteration.tokens[i];
  return iteration.partial.includes(i) ? 0 : 1;
}

export class LiveModel {
  constructor(limits = LIMITS) {
    this.limits = limits;
    this.version = 0; // changes with everything else
    this.source = "feed"; // or "file"
    this.clear();
  }

  clear() {
    const { stages, moments } = this.limits;
    this.sizes = {}; // of the engine, as in a hello
    this.status = { phase: "connecting", reason: null };
    this.iterations = new Queue();
    this.requests = new Map(); // by number, in the order of arrival
    this.stages = new Queue(stages); // { number, stage, from, to }
    this.moments = new Queue(moments); // { time, phase, reason }: changes of the server's status
    this.holds = new Queue(moments); // { from, to, what }: times in which the event loop or the GIL was held
    this.held = new Queue(moments); // { time, held }: changes of the request that waits first, and of its reason
    this.adapters = new Queue(moments); // { time, waiting }: changes of the requests whose adapter is on its way
    this.gaps = new Queue(moments); // { from, to, n, why }: iterations that are not shown
    this.counts = { iterations: 0, skipped: 0, unseen: 0, lost: 0, forgotten: 0, forgottenRequests: 0 };
    this.origin = null; // the earliest time of any line
    this.knownFrom = null; // the time before which no iteration is known, if there is one
    this.last = 0; // the newest time
    this.nCells = 0;
    this.run = null;
    this.note = ""; // from the end of a file
    this.nSkippedAhead = 0; // skipped iterations whose numbers have not been missed yet
    this.hasReconnected = false;
    this.version += 1;
  }

  /** Take a line of a feed or of a file. Lines of other kinds are ignored. */
  line(line) {
    if ("orca_live" in line) this.#hello(line);
    else if ("orca_recording" in line) this.#recording(line);
    else if ("iteration" in line) this.#iteration(line);
    else if ("arrived" in line) this.#arrived(line);
    else if ("finished" in line) this.#finished(line);
    else if ("stages" in line) this.#stages(line.stages);
    else if ("status" in line) this.#status(line);
    else if ("hold" in line) this.#hold(line);
    else if ("skipped" in line) this.#skipped(line.skipped);
    else if ("unseen" in line) this.hasReconnected = true;
    else if ("not_repeatable" in line) this.note = line.not_repeatable;
    else if ("stopped" in line) this.note = `the recording was stopped: ${line.stopped}`;
    this.version += 1;
  }

  // A connection, or a file that the page saved, begins with a hello.
  #hello(hello) {
    if (hello.run !== this.run) this.clear();
    else if (this.iterations.length) this.hasReconnected = true;
    this.run = hello.run ?? null;
    const { orca_live: _, requests = [], status, reason, now, known_from: knownFrom = null, ...sizes } = hello;
    this.sizes = sizes;
    if (this.source === "file") this.knownFrom = knownFrom;
    else if (hello.model && !this.iterations.length) this.knownFrom = now;
    if (hello.model) this.#tick(now); // while the model loads there is no clock
    const live = new Set();
    for (const line of requests) {
      live.add(line.arrived);
      if (!this.requests.has(line.arrived)) this.#arrived(line);
      this.requests.get(line.arrived)?.update(line);
    }
    if (live.size < FULL_HELLO && this.source === "feed") this.#endUnseen(live, now);
    this.#status({ status, reason, time: now });
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
    const { iteration: number, issued, returned, bucket, slots, waiting, rows, prefill } = line;
    const { held = null, starts = [], partial = [], preempted = [], snapshots = null, host_blocks: hostBlocks = null, host_states: hostStates = null, adapters = [] } = line;
    const kept = line.kept ? new Map(line.kept) : null; // by row: output tokens of a decode that verified drafts
    const isWhole = Array.isArray(rows) && Array.isArray(prefill) && slots?.length === 3;
    if (!isWhole || ![number, issued, returned, bucket].every(Number.isFinite)) throw new Error("it lacks fields");
    const n = rows.length;
    const made = { number, issued, returned, bucket, slots, snapshots, hostBlocks, hostStates, waiting, held, starts, partial, preempted, adapters, kept, nTokens: 0 };
    made.requests = new Array(n);
    made.tokens = new Array(n);
    made.phases = new Array(n);
    this.#missing(made);
    if (JSON.stringify(this.held.last()?.held ?? null) !== JSON.stringify(held)) this.held.push({ time: issued, held });
    if (JSON.stringify(this.adapters.last()?.waiting ?? []) !== JSON.stringify(adapters))
      this.adapters.push({ time: issued, waiting: adapters });
    for (const one of preempted) this.requests.get(one)?.preempted(issued);
    let nPrefill = 0;
    for (let i = 0; i < n; i++) {
      const [one, nTokens] = rows[i];
      const isPrefill = prefill[nPrefill] === i;
      const start = isPrefill ? (starts[nPrefill++] ?? 0) : null;
      made.requests[i] = one;
      made.tokens[i] = nTokens;
      made.nTokens += nTokens;
      const request = this.requests.get(one);
      made.phases[i] = request ? request.row(made, kept?.get(i) ?? nTokens, start, partial.includes(i)) : isPrefill ? PREFILL : DECODE;
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
    const other = this.hasReconnected ? "unseen" : "lost";
    if (n > 0) {
      if (n > skipped) this.counts[other] += n - skipped;
      this.gaps.push({ from: last.returned, to: iteration.issued, n, why: skipped ? "skipped" : other });
      for (const request of this.requests.values()) if (request.isLive) request.hasGaps = true;
    }
    this.nSkippedAhead = 0;
    this.hasReconnected = false;
  }

  #stages(reports) {
    for (const [number, stage, from, to] of reports) this.stages.push({ number, stage, from, to });
  }

  #status({ status, reason = null, time }) {
    const isOther = status !== this.status.phase || reason !== this.status.reason;
    if (isOther) this.moments.push({ time, phase: status, reason });
    this.status = { phase: status, reason };
    if (this.sizes.model) this.#tick(time);
  }

  #hold({ hold: what, seconds, time }) {
    if (![seconds, time].every(Number.isFinite)) throw new Error("it lacks fields");
    this.holds.push({ from: time - seconds, to: time, what });
    this.#tick(time);
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

  // The oldest request that has ended goes first.
  #forgetRequest() {
    let oldest = this.requests.keys().next().value;
    for (const request of this.requests.values()) {
      if (request.isLive) continue;
      oldest = request.number;
      break;
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
