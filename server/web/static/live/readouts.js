// What the page says in words and numbers: the state line, the tiles, the newest iteration in a sentence and a table.

import { announce, element, replace, setText } from "../dom.js";
import { count, duration, percent, plural } from "./format.js";
import { DECODE, outputs } from "./model.js";
import { outside, sum, unknownTimes } from "./times.js";
import { WHY } from "./why.js";

const ROWS = 15; // of the table
const SAYS = {
  loading: "the model is loading",
  recovering: "a worker was lost",
  draining: "shutting down",
  opening: "opening the file",
  recorded: "a recorded file",
};
const EMPTY = {
  ready: "Nothing has run since you opened the page. Send a request, for example from the playground.",
  loading: "The model is loading. The view starts by itself.",
  recorded: "This file has no iterations.",
};

/** The state line: the server's phase, the connection, the engine's sizes, and what is not shown. */
export class StateLine {
  #announced = "";
  connection = { connected: false, text: "connecting" };
  isPaused = false;

  /** `get(id)` finds an element of the page. */
  constructor(get, model) {
    this.get = get;
    this.model = model;
  }

  update() {
    const { get, model } = this;
    const { phase, words = SAYS[phase] ?? phase, reason } = this.#now();
    get("dot").dataset.phase = phase;
    setText(get("phase"), words);
    setText(get("reason"), reason ?? "");
    setText(get("engine"), engineOf(model.sizes));
    const notice = [notShown(model), heldTimes(model)].filter(Boolean).join(" ");
    setText(get("notice"), notice);
    get("notice").hidden = notice === "";
    get("empty").hidden = model.iterations.length > 0;
    setText(get("empty"), EMPTY[phase] ?? "");
    if (this.#announced !== words) announce(`Live view: ${words}`);
    this.#announced = words;
  }

  #now() {
    const { status, source, iterations } = this.model;
    if (source === "file") return status;
    if (this.isPaused) return { phase: "paused", words: "view paused" };
    if (this.connection.connected) return status;
    const words = this.connection.stopped ? "not connected" : iterations.length ? "reconnecting" : "connecting";
    return { phase: "unreachable", words, reason: this.connection.text };
  }
}

function engineOf(sizes) {
  if (!sizes.model) return "";
  const order = sizes.scheduling_policy && sizes.scheduling_policy !== "fcfs" ? `, ${sizes.scheduling_policy}` : "";
  return [
    sizes.model,
    sizes.policy && `policy ${sizes.policy}${order}`,
    sizes.max_batch_size && `batches of ${count(sizes.max_batch_size)}`,
    sizes.n_slots && `${count(sizes.n_slots)} slots`,
    sizes.n_states && plural(sizes.n_states, "state"),
    sizes.n_snapshots && plural(sizes.n_snapshots, "snapshot"),
    sizes.n_host_blocks && `${plural(sizes.n_host_blocks, "block")} in host memory`,
    sizes.n_host_states && `${plural(sizes.n_host_states, "state")} in host memory`,
    sizes.n_workers > 1 && plural(sizes.n_workers, "stage"),
  ]
    .filter(Boolean)
    .join(" · ");
}

function notShown({ counts }) {
  const parts = [
    counts.skipped && `${plural(counts.skipped, "iteration")} skipped by the server, which had too much to send`,
    counts.unseen && `${plural(counts.unseen, "iteration")} passed while the page was not connected`,
    counts.lost && `${plural(counts.lost, "iteration")} did not return`,
    counts.forgotten && `${plural(counts.forgotten, "older iteration")} no longer kept`,
    counts.forgottenRequests && `${plural(counts.forgottenRequests, "older request")} no longer kept`,
  ].filter(Boolean);
  return parts.length ? `Not shown: ${parts.join("; ")}.` : "";
}

function heldTimes({ holds }) {
  if (!holds.length) return "";
  const longest = Math.max(...[...holds].map((hold) => hold.to - hold.from));
  return `The event loop or the GIL was held ${plural(holds.length, "time")}, for ${duration(longest)} at most: marked on the axis of time.`;
}

/** Write the numbers above the charts, for the part of the time that is in view, into the tiles of `place`. */
export function showTiles(place, model, view) {
  for (const [name, text] of Object.entries(numbersOf(model, view))) setText(place.querySelector(`[data-tile=${name}]`), text);
}

function numbersOf(model, view) {
  let [running, waiting, nTokens, nRows, nBucket, n, nOutput] = [0, 0, 0, 0, 0, 0, 0];
  const firsts = [];
  for (const request of model.requests.values()) {
    if (request.isWaiting) waiting += 1;
    else if (request.isLive) running += 1;
    const { firstToken } = request;
    if (firstToken !== null && firstToken >= view.from && firstToken <= view.to) firsts.push(firstToken - request.arrived);
  }
  const { iterations } = model;
  let to = view.from;
  for (const one of iterations.from(({ returned }) => returned > view.from)) {
    if (one.returned > view.to) break;
    n += 1;
    nTokens += one.nTokens;
    nBucket += one.bucket;
    nRows += one.requests.length;
    for (let j = 0; j < one.phases.length; j++)
      nOutput += outputs(one, j);
    to = one.returned;
  }
  const from = Math.max(view.from, iterations.at(0)?.issued ?? view.from);
  const end = view.follows ? to : Math.min(view.to, model.last);
  const seconds = sum(outside([[from, end]], unknownTimes(model, from, end)));
  firsts.sort((a, b) => a - b);
  const rate = (value) => (n && seconds > 0 ? count(Math.round(value / seconds)) : "–");
  return {
    running: count(running),
    waiting: count(waiting),
    tokens: rate(nOutput),
    iterations: rate(n),
    batch: n ? (nRows / n).toFixed(1) + (model.sizes.max_batch_size ? ` / ${model.sizes.max_batch_size}` : "") : "–",
    padding: percent(nBucket - nTokens, nBucket),
    first: firsts.length ? duration(firsts[firsts.length >> 1]) : "–",
  };
}

/** The sentence and the table of the newest iterations, for those who cannot see the charts or want numbers. */
export class Tables {
  #version = -1;

  constructor({ summary, holder, body, model }) {
    Object.assign(this, { summary, holder, body, model });
    holder.addEventListener("toggle", () => this.update(true));
  }

  update(isForced = false) {
    const { model } = this;
    if (model.version === this.#version && !isForced) return;
    this.#version = model.version;
    this.summary.textContent = summaryOf(model);
    if (!this.holder.open) return;
    const { iterations } = model;
    const rows = [];
    for (let i = iterations.length - 1; i >= Math.max(0, iterations.length - ROWS); i--) rows.push(rowOf(iterations.at(i)));
    replace(this.body, ...rows);
  }
}

/** Describe the newest iteration in a sentence. */
export function summaryOf(model) {
  const one = model.iterations.last();
  if (!one) return "No iteration yet.";
  const [nPrefill, nDecode] = phaseCounts(one);
  const parts = `${plural(one.requests.length, "request")} (${nPrefill} prefill, ${nDecode} decode)`;
  const wait = one.waiting ? `; ${count(one.waiting)} waiting: ${whyOf(one)}` : "; none waiting";
  return `Iteration ${count(one.number)}: ${parts}, ${count(one.nTokens)} tokens in a bucket of ${count(one.bucket)}${wait}.`;
}

function rowOf(one) {
  const values = [
    count(one.number),
    duration(one.returned - one.issued),
    ...phaseCounts(one).map(count),
    `${count(one.nTokens)} of ${count(one.bucket)}`,
    count(one.slots[1]),
    count(one.slots[0]),
    one.waiting ? `${count(one.waiting)} (${whyOf(one)})` : "0",
  ];
  return element("tr", {}, ...values.map((value) => element("td", {}, value)));
}

function phaseCounts({ phases }) {
  const nDecode = phases.filter((phase) => phase === DECODE).length;
  return [phases.length - nDecode, nDecode];
}

function whyOf(one) {
  return one.held ? (WHY[one.held[1]]?.[0] ?? one.held[1]) : "next iteration";
}
