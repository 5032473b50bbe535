// The times in which each stage computed. Where it did not although requests were live, there is a bubble.

import { Chart } from "./chart.js";
import { count, duration, percent } from "./format.js";
import { nStages, outside, stageSpans, sum, unknownAt, unknownTimes } from "./times.js";

const ROW = 26;
const BAR = 16;

export class StagesChart extends Chart {
  get wantedHeight() {
    return nStages(this.model) * ROW + 4;
  }

  paint(context) {
    const { view } = this;
    const unknown = unknownTimes(this.model, view.from, view.to);
    const live = [...outside(this.#liveTimes(), unknown)];
    const bars = Array.from({ length: nStages(this.model) }, () => ({ x: null, end: 0, busy: 0 }));
    const put = (bar, stage) => {
      if (bar.x !== null) this.#bar(context, stage, bar.x, bar.end, 1);
      bar.x = null;
    };
    context.fillStyle = this.colours.hatch(context, "bubble", 5);
    bars.forEach((_, stage) => {
      for (const [from, to] of live) this.#bar(context, stage, this.x(from), this.x(to));
    });
    context.fillStyle = this.colours.busy;
    for (const { stage, from, to } of stageSpans(this.model, view.from, view.to)) {
      const bar = bars[stage];
      if (!bar) continue;
      bar.busy += sum(outside([[Math.max(from, view.from), Math.min(to, view.to)]], unknown));
      const x = this.x(from);
      if (x - bar.end > 1) put(bar, stage);
      bar.x ??= x;
      bar.end = this.x(to);
      if (bar.end - x > 6) put(bar, stage);
    }
    bars.forEach(put);
    const whole = sum(live);
    this.shares = bars.map((bar) => percent(Math.min(bar.busy, whole), whole));
  }

  frame() {
    (this.shares ?? []).forEach((share, i) =>
      this.write(share, this.left - 6, i * ROW + 2 + ROW / 2, this.colours.quiet, "right"),
    );
  }

  at(x, y) {
    const stage = Math.floor((y - 2) / ROW);
    if (stage < 0 || stage >= nStages(this.model)) return null;
    const time = this.time(x);
    const name = `Stage ${stage + 1} of ${nStages(this.model)}`;
    const lines = [`busy ${this.shares?.[stage]} of the time with live requests in view`];
    for (const span of stageSpans(this.model, time, time)) {
      if (span.stage !== stage) continue;
      const which = span.number === null ? "an iteration" : `iteration ${count(span.number)}`;
      return { title: name, lines: [`${which}: ${duration(span.to - span.from)}`, ...lines], request: null };
    }
    const why = unknownAt(this.model, time);
    return { title: name, lines: [why ? `no data: ${why}` : "idle", ...lines], request: null };
  }

  #bar(context, stage, from, to, gap = 0) {
    const x = Math.round(from);
    const width = Math.round(to) - x;
    const top = stage * ROW + 2 + (ROW - BAR) / 2;
    context.fillRect(x, top, Math.max(1, width), BAR);
    if (gap && width > 4) context.clearRect(x + width - 1, top, 1, BAR); // between two iterations
  }

  // The parts of the view in which at least one request was live.
  #liveTimes() {
    const parts = [];
    for (const request of this.model.requests.values()) {
      const from = Math.max(this.view.from, request.arrived);
      const to = Math.min(this.view.to, request.finished ?? this.model.last);
      if (to > from) parts.push([from, to]);
    }
    parts.sort((a, b) => a[0] - b[0]);
    const merged = [];
    for (const part of parts) {
      const last = merged.at(-1);
      if (last && part[0] <= last[1]) last[1] = Math.max(last[1], part[1]);
      else merged.push(part);
    }
    return merged;
  }
}
