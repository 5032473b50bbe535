// A bar for each request: its waits with their reasons, its iterations by phase, its first token and its end.

import { Chart } from "./chart.js";
import { count, duration, plural } from "./format.js";
import { CHUNK, DECODE, PREFILL } from "./request.js";
import { inFull, inShort, summedReasons, waitReasons } from "./why.js";

export const ROW = 26;
const BAR = 14;
const THIN = 4;
const COLOURS = { [PREFILL]: "prefill", [CHUNK]: "chunk", [DECODE]: "decode" };
const WORDS = { [PREFILL]: "prefill", [CHUNK]: "later chunk of its prompt", [DECODE]: "decode" };
const GOOD_ENDS = new Set(["stop", "length", "tool_calls"]);

export class RequestsChart extends Chart {
  requests = []; // as the list beside it shows them
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
      found.lines.push(`${WORDS[row.phases[i]]}: ${plural(row.tokens[i], "token")} in iteration ${count(row.number)}`);
    } else if (time < end) found.lines.push("between two of its iterations");
    if (request.finished !== null && time >= end - 2 * this.perPixel) found.lines.push(`ended: ${request.reason}`);
    found.lines.push(`${count(request.nInput)} tokens in, ${count(request.nOutput)} out`);
    return found;
  }

  #row(context, request, y) {
    const { view, model } = this;
    const middle = y + ROW / 2;
    if (request.number === this.choice.number) {
      context.fillStyle = this.colours.sunken;
      context.fillRect(this.left, y, this.right - this.left, ROW);
      context.fillStyle = this.colours.accent;
      context.fillRect(this.left, y, 2, ROW);
    }
    const end = request.finished ?? model.last;
    if (request.scheduled !== null) {
      context.fillStyle = this.colours.padding;
      const x = this.x(request.scheduled);
      context.fillRect(x, Math.round(middle - THIN / 2), Math.max(1, this.x(end) - x), THIN);
    }
    for (const [from, to] of request.waits) {
      if (from <= view.to && (to ?? end) >= view.from) this.#wait(context, request, from, to ?? end, middle);
    }
    this.#work(context, request, middle);
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
      context.fillStyle = this.colours.hatch(context, "wait");
      context.fillRect(x, top, width, BAR);
      const seen = Math.max(x, this.left);
      const text = inShort(this.model, request, part);
      if (context.measureText(text).width + 14 > x + width - seen) continue;
      context.fillStyle = this.colours.surface;
      context.globalAlpha = 0.8;
      context.fillRect(seen + 3, top + 1, context.measureText(text).width + 8, BAR - 2);
      context.globalAlpha = 1;
      context.fillStyle = this.colours.waitText;
      context.textAlign = "left";
      context.fillText(text, seen + 7, middle + 0.5);
    }
  }

  // Iterations of one phase that are less than a pixel apart are one block.
  #work(context, request, middle) {
    const { rows } = request;
    const top = Math.round(middle - BAR / 2);
    let phase = null;
    let [from, to] = [0, 0];
    const put = () => {
      if (phase === null) return;
      const x = Math.round(from);
      const width = Math.max(1, Math.round(to) - x);
      context.fillStyle = this.colours[COLOURS[phase]];
      context.fillRect(x, top, width > 5 ? width - 1 : width, BAR);
    };
    for (let i = rows.search((row) => row.returned >= this.view.from); i < rows.length; i++) {
      const row = rows.at(i);
      if (row.issued > this.view.to) break;
      const own = row.phases[row.requests.indexOf(request.number)];
      const begin = this.x(row.from ?? row.issued);
      const isWide = to - from > 5;
      if (own !== phase || begin - to > 1 || isWide) {
        put();
        [phase, from] = [own, begin];
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

/** A request's number, with its id if the server tells it. */
export function title(request) {
  return request.id ? `#${request.number} ${request.id}` : `Request #${request.number}`;
}
