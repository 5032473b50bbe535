// A request as the view knows it, from the lines about it.

import { Queue } from "./queue.js";

export const PREFILL = 0;
export const CHUNK = 1; // a later part of a prompt
export const DECODE = 2;

/** A request that has arrived. Times are seconds of the server's clock, null while they have not come. */
export class LiveRequest {
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
    this.waits = [[line.time, null]]; // from, to: without slots
    this.rows = new Queue(); // its iterations
    this.nForgotten = 0; // iterations that are no longer kept
    this.inPrompt = false; // a part of its prompt is computed, and another is to come
    this.hasGaps = false; // not all of its iterations were seen, so that its output is at least `nOutput`
  }

  get isWaiting() {
    return this.finished === null && this.waits.at(-1)?.[1] === null;
  }

  get isLive() {
    return this.finished === null;
  }

  /** "waiting", "prefill", "decode" or why it ended. */
  get state() {
    if (!this.isLive) return this.reason;
    if (this.isWaiting) return "waiting";
    return this.nOutput > 0 && !this.inPrompt ? "decode" : "prefill";
  }

  /** What a hello says about a live request that is known, or new. */
  update(line) {
    this.nOutput = line.n_output;
    this.scheduled ??= line.scheduled ?? null;
    this.firstToken ??= line.first_token ?? null;
    this.inPrompt = line.admitted && line.n_computed > 0 && line.n_computed < this.nInput;
    if (line.admitted) this.#endWait(this.scheduled ?? line.time);
    this.hasGaps = false;
  }

  /** A row of an iteration; returns its phase. `start` is null for a decode. */
  row(iteration, nTokens, start, isPartial) {
    this.rows.push(iteration);
    this.scheduled ??= iteration.issued;
    if (this.isWaiting) this.#endWait(iteration.issued);
    if (start === null) {
      this.#token(iteration.returned, nTokens);
      this.inPrompt = false;
      return DECODE;
    }
    if (!this.inPrompt && this.nOutput === 0 && this.nPreempted === 0) this.nCached = start;
    const phase = this.inPrompt ? CHUNK : PREFILL;
    this.inPrompt = isPartial;
    if (!isPartial) this.#token(iteration.returned, 1);
    return phase;
  }

  /** It lost its slots. */
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
    if (!this.isLive) return; // computed ahead of the end that was not known yet
    if (this.lastToken !== null) this.longestGap = Math.max(this.longestGap, at - this.lastToken);
    this.firstToken ??= at;
    this.lastToken = at;
    this.nOutput += n;
  }
}
