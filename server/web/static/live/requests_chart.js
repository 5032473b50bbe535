// A bar for each request: its waits with their reasons, its iterations by phase, its first token and its end.

import { Chart } from "./chart.js";
import { count, duration, plural } from "./format.js";
import { PHASES, PHASE_WORDS } from "./model.js";
import { inFull, inShort, summedReasons, waitReasons } from "./why.js";

export const ROW = 26;
const BAR = 14;
const THIN = 4;
const GOOD_ENDS = new Set(["stop", "length", "tool_calls"]);

export class RequestsChart extends Chart {
  requests = []; // those in the list to its left
  scrolled = 0;

  paint(context) {
    this.requests.forEach((request, i) => {
      const y = i * ROW - this.scrolled;
      if (y + ROW < 0 || y > this.height) return;
      this.#row(context, request, y);
    });
  }

  at(x, y) {
    const request = this.requests[Math.floor((y + this.scrolled) / ROW)];
    if (!request) return null;
    const time = this.time(x);
    const found = { title: title(request), lines: [], request: request.number };
    const end = request.finished ?? this.model.last;
    if (time < request.arrived - 3 * this.perPixel || time > end + 8 * this.perPixel) return found;
    const wait = request.waits.find(([from, to]) => time >= from && time < (to ?? end));
    if (wait) {
      const part = waitReasons(this.model, request, wait[0], wait[1] ?? end).find((one) => time < one.to);
      found.lines.push(`waits ${duration((wait[1] ?? end) - wait[0])}`);
      if (part) found.lines.push(inFull(this.model, request, part));
      return found;
    }
    const { rows } = request;
    const row = rows.at(rows.search((one) => one.returned >= time));
    if (row && row.issued <= time) {
      const i = row.requests.indexOf(request.number);
      found.lines.push(`${PHASE_WORDS[row.phases[i]]}: ${plural(row.tokens[i], "token")} in iteration ${count(row.number)}`);
    } else if (time < end) found.lines.push("between two of its iterations");
    if (request.finished !== null && time >= end - 2 * this.perPixel) found.lines.push(`ended: ${request.reason}`);
    found.lines.push(`${count(request.nInput)} tokens in, ${count(request.nOutput)} out`);
    return found;
  }

  #row(context, request, y) {
    const { view, model } = this;
    const middle = y + ROW / 2;
    if (request.number === this.choice.number) {
      this.fill(this.colours.sunken, this.left, y, this.right - this.left, ROW);
      this.fill(this.colours.accent, this.left, y, 2, ROW);
    }
    const end = request.finished ?? model.last;
    if (request.scheduled !== null) {
      const x = this.x(request.scheduled);
      this.fill(this.colours.padding, x, Math.round(middle - THIN / 2), Math.max(1, this.x(end) - x), THIN);
    }
    for (const [from, to] of request.waits) {
      if (from <= view.to && (to ?? end) >= view.from) this.#wait(context, request, from, to ?? end, middle);
    }
    this.#work(request, middle);
    if (request.firstToken !== null) this.#firstToken(context, this.x(request.firstToken), middle);
    if (request.finished !== null) this.#end(context, request, this.x(end), middle);
  }

  #wait(context, request, from, to, middle) {
    const top = Math.round(middle - BAR / 2);
    const { view } = this;
    for (const part of summedReasons(this.model, request, Math.max(from, view.from), Math.min(to, view.to))) {
      const x = Math.round(this.x(part.from));
      const width = Math.max(1, Math.round(this.x(part.to)) - x);
      if (x > this.right || x + width < this.left) continue;
      this.fill(this.colours.hatch(context, "wait"), x, top, width, BAR);
      const seen = Math.max(x, this.left);
      const text = inShort(this.model, request, part);
      const textWidth = context.measureText(text).width;
      if (textWidth + 14 > x + width - seen) continue;
      context.globalAlpha = 0.8;
      this.fill(this.colours.surface, seen + 3, top + 1, textWidth + 8, BAR - 2);
      context.globalAlpha = 1;
      this.write(text, seen + 7, middle + 0.5, this.colours.waitText, "left");
    }
  }

  // Draw iterations of one phase that are less than a pixel apart as one block.
  #work(request, middle) {
    const top = Math.round(middle - BAR / 2);
    let phase = null;
    let [from, to] = [0, 0];
    const put = () => {
      if (phase === null) return;
      const x = Math.round(from);
      const width = Math.max(1, Math.round(to) - x);
      this.fill(this.colours[PHASES[phase]], x, top, width > 5 ? width - 1 : width, BAR);
    };
    for (const row of request.rows.from((one) => one.returned >= this.view.from)) {
      if (row.issued > this.view.to) break;
      const next = request.phaseIn(row);
      const begin = this.x(row.from ?? row.issued);
      const isWide = to - from > 5;
      if (next !== phase || begin - to > 1 || isWide) {
        put();
        [phase, from] = [next, begin];
      }
      to = this.x(row.returned);
    }
    put();
  }

  #firstToken(context, x, middle) {
    context.beginPath();
    for (const [dx, dy] of [[0, -6], [5, 0], [0, 6], [-5, 0]]) context.lineTo(x + dx, middle + dy);
    context.closePath();
    context.fillStyle = this.colours.surface;
    context.fill();
    context.strokeStyle = this.colours.text;
    context.lineWidth = 1.5;
    context.stroke();
  }

  #end(context, request, x, middle) {
    const isGood = GOOD_ENDS.has(request.reason);
    context.strokeStyle = isGood ? this.colours.text : this.colours.bad;
    context.lineWidth = 2;
    context.beginPath();
    if (isGood) {
      context.moveTo(x, middle - BAR / 2 - 2);
      context.lineTo(x, middle + BAR / 2 + 2);
    } else {
      for (const side of [-1, 1]) {
        context.moveTo(x - 4, middle - 4 * side);
        context.lineTo(x + 4, middle + 4 * side);
      }
    }
    context.stroke();
    context.lineWidth = 1;
  }
}

/** A request's number, and its id if the server shows ids. */
export function title(request) {
  return request.id ? `#${request.number} ${request.id}` : `Request #${request.number}`;
}
