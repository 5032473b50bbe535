// What the charts show, in words and in a table: for those who do not see them, or want numbers.

import { element, replace } from "../dom.js";
import { count, duration, plural } from "./format.js";
import { DECODE } from "./request.js";
import { WHY } from "./why.js";

const ROWS = 15;

export class Tables {
  #version = -1;

  constructor({ summary, holder, body, model }) {
    Object.assign(this, { summary, holder, body, model });
    holder.addEventListener("toggle", () => this.update(true));
  }

  update(isAsked = false) {
    const { model } = this;
    if (model.version === this.#version && !isAsked) return;
    this.#version = model.version;
    this.summary.textContent = summaryOf(model);
    if (!this.holder.open) return;
    const { iterations } = model;
    const rows = [];
    for (let i = iterations.length - 1; i >= Math.max(0, iterations.length - ROWS); i--) rows.push(rowOf(iterations.at(i)));
    replace(this.body, ...rows);
  }
}

/** The newest iteration in a sentence. */
export function summaryOf(model) {
  const one = model.iterations.last();
  if (!one) return "No iteration yet.";
  const nDecode = one.phases.filter((phase) => phase === DECODE).length;
  const parts = `${plural(one.requests.length, "request")} (${one.requests.length - nDecode} prefill, ${nDecode} decode)`;
  const wait = one.waiting ? `; ${count(one.waiting)} waiting: ${whyOf(one)}` : "; none waiting";
  return `Iteration ${count(one.number)}: ${parts}, ${count(one.nTokens)} tokens in a bucket of ${count(one.bucket)}${wait}.`;
}

function rowOf(one) {
  const nDecode = one.phases.filter((phase) => phase === DECODE).length;
  const values = [
    count(one.number),
    duration(one.returned - one.issued),
    count(one.requests.length - nDecode),
    count(nDecode),
    `${count(one.nTokens)} of ${count(one.bucket)}`,
    count(one.slots[1]),
    count(one.slots[0]),
    one.waiting ? `${count(one.waiting)} (${whyOf(one)})` : "0",
  ];
  return element("tr", {}, ...values.map((value) => element("td", {}, value)));
}

function whyOf(one) {
  return one.held ? (WHY[one.held[1]]?.[0] ?? one.held[1]) : "next iteration";
}
