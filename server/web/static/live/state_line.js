// What the page shows now: the server's phase, the connection, the engine's sizes, and what is not shown.

import { announce } from "../shell.js";
import { count, plural } from "./format.js";

const SAYS = {
  ready: "ready",
  connecting: "connecting",
  loading: "the model is loading",
  recovering: "a worker was lost",
  draining: "shutting down",
  opening: "opening the file",
  recorded: "a recorded file",
};

export class StateLine {
  #said = "";
  connection = { connected: false, text: "connecting" };
  isPaused = false;

  constructor({ dot, phase, reason, engine, notice, empty, model }) {
    Object.assign(this, { dot, phase, reason, engine, notice, empty, model });
  }

  update() {
    const [phase, words, reason] = this.#now();
    this.dot.dataset.phase = phase;
    show(this.phase, words);
    show(this.reason, reason);
    show(this.engine, engineOf(this.model.sizes));
    const notice = notShown(this.model);
    show(this.notice, notice);
    this.notice.hidden = notice === "";
    this.empty.hidden = this.model.iterations.length > 0;
    if (!this.empty.hidden) show(this.empty, emptyOf(phase));
    if (this.#said !== words) announce(`Live view: ${words}`);
    this.#said = words;
  }

  #now() {
    const { status, source } = this.model;
    if (source === "file") return [status.phase, SAYS[status.phase] ?? status.phase, status.reason ?? ""];
    if (this.isPaused) return ["paused", "view paused", ""];
    if (!this.connection.connected) {
      const words = this.connection.stopped ? "not connected" : this.model.iterations.length ? "reconnecting" : "connecting";
      return ["unreachable", words, this.connection.text];
    }
    return [status.phase, SAYS[status.phase] ?? status.phase, status.reason ?? ""];
  }
}

function show(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

function engineOf(sizes) {
  if (!sizes.model) return "";
  const order = sizes.scheduling_policy && sizes.scheduling_policy !== "fcfs" ? `, ${sizes.scheduling_policy}` : "";
  return [
    sizes.model,
    sizes.policy && `policy ${sizes.policy}${order}`,
    sizes.max_batch_size && `batches of ${count(sizes.max_batch_size)}`,
    sizes.n_slots && `${count(sizes.n_slots)} slots`,
    sizes.n_workers > 1 && plural(sizes.n_workers, "stage"),
  ]
    .filter(Boolean)
    .join(" · ");
}

/** What is missing, in words; "" if nothing is. */
export function notShown({ counts }) {
  const parts = [
    counts.skipped && `${plural(counts.skipped, "iteration")} skipped by the server, which had too much to tell`,
    counts.unseen && `${plural(counts.unseen, "iteration")} passed while the page was not connected`,
    counts.lost && `${plural(counts.lost, "iteration")} did not return`,
    counts.forgotten && `${plural(counts.forgotten, "older iteration")} no longer kept`,
    counts.forgottenRequests && `${plural(counts.forgottenRequests, "older request")} no longer kept`,
  ].filter(Boolean);
  return parts.length ? `Not shown: ${parts.join("; ")}.` : "";
}

function emptyOf(phase) {
  if (phase === "ready") return "Nothing has run since the page was opened. Send a request, for example from the playground.";
  if (phase === "loading") return "The model is loading. The view begins by itself.";
  if (phase === "recorded") return "This file has no iterations.";
  return "";
}
