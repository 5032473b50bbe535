// The slots of the K/V cache over time: used, reserved, and cached for prompts with the same beginning.

import { Chart } from "./chart.js";
import { count, niceStep, percent } from "./format.js";
import { outside, unknownTimes } from "./times.js";

const TOP = 10;
const WHOLE = 0.4; // the share of slots in use above which the axis shows all slots

export class SlotsChart extends Chart {
  prepare() {
    const { view } = this;
    const { iterations, sizes } = this.model;
    this.total = sizes.n_slots ?? 0;
    this.first = Math.max(0, iterations.search((one) => one.issued > view.from) - 1);
    let most = 0;
    let end = this.first;
    for (; end < iterations.length && iterations.at(end).issued <= view.to; end++) {
      const { slots } = iterations.at(end);
      most = Math.max(most, slots[0] + slots[2]);
    }
    this.most = most > WHOLE * this.total ? Math.max(this.total, most) : niceStep(Math.max(8, most * 1.1));
    this.end = end;
  }

  paint(context) {
    const { first, end, view } = this;
    const known = outside([[view.from, view.to]], unknownTimes(this.model, view.from, view.to));
    context.beginPath();
    for (const [from, to] of known) context.rect(this.x(from), 0, this.x(to) - this.x(from), this.height);
    context.clip();
    // One shape for each layer, so that a long view has three shapes and not thousands.
    const layers = [
      [this.colours.hatch(context, "cached", 9), ([held, , cached]) => held + cached, ([held]) => held],
      [this.colours.hatch(context, "reserved"), ([held]) => held, ([, used]) => used],
      [this.colours.used, ([, used]) => used, () => 0],
    ];
    for (const [fill, upper, lower] of layers) this.#area(context, fill, first, end, upper, lower);
  }

  levels() {
    for (const share of [1, 0.5]) this.level(this.#y(share * this.most), short(share * this.most));
    this.level(this.height - 1, "0");
  }

  frame(context) {
    if (!this.total || this.most < this.total) return;
    context.strokeStyle = this.colours.quiet;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(this.left, this.#y(this.total) + 0.5);
    context.lineTo(this.right, this.#y(this.total) + 0.5);
    context.stroke();
    context.setLineDash([]);
  }

  at(x) {
    const { iterations } = this.model;
    const one = iterations.at(iterations.search((other) => other.issued > this.time(x)) - 1);
    const nothing = this.noData(x);
    if (nothing || !one) return nothing;
    const [held, used, cached] = one.slots;
    const lines = [
      `${count(used)} used: keys and values of requests`,
      `${count(held - used)} reserved and empty`,
      `${count(cached)} kept for prompts with the same beginning`,
    ];
    if (this.total) lines.push(`${count(this.total)} in all, ${percent(held, this.total)} reserved`);
    return { title: `Slots at iteration ${count(one.number)}`, lines, request: null };
  }

  #area(context, fill, first, end, upper, lower) {
    const { iterations } = this.model;
    const at = (i, level) => Math.round(this.#y(level(iterations.at(i).slots)));
    const edge = (i) => (i < end && i < iterations.length ? this.x(iterations.at(i).issued) : Math.min(this.x(this.model.last), this.right));
    context.beginPath();
    for (let i = first; i < end; i++) {
      context.lineTo(edge(i), at(i, upper));
      context.lineTo(edge(i + 1), at(i, upper));
    }
    for (let i = end - 1; i >= first; i--) {
      context.lineTo(edge(i + 1), at(i, lower));
      context.lineTo(edge(i), at(i, lower));
    }
    context.closePath();
    context.fillStyle = fill;
    context.fill();
  }

  #y(slots) {
    return this.height - 1 - (slots / this.most) * (this.height - 1 - TOP);
  }
}

function short(n) {
  if (n >= 1e6) return `${+(n / 1e6).toPrecision(3)}M`;
  if (n >= 1e4) return `${+(n / 1e3).toPrecision(3)}k`;
  return count(n);
}
