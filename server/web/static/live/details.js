// The details of the chosen request: its times, its tokens, why it waited, and its iterations.

import { element, replace } from "../dom.js";
import { count, duration, plural } from "./format.js";
import { PHASES } from "./model.js";
import { inFull, inShort, summedReasons } from "./why.js";

const MOST_ROWS = 60;
const MOST_WAITS = 12;

export class Details {
  #shown = "";

  constructor({ place, model, choice, close }) {
    Object.assign(this, { place, model, choice });
    this.facts = element("dl", { class: "facts" });
    this.waits = element("ol", { class: "waits" });
    this.rows = element("tbody");
    this.more = element("p", { class: "quiet small" });
    this.name = element("h2", { id: "details-name" });
    this.id = element("p", { class: "mono quiet small" });
    const head = ["iteration", "phase", "tokens", "took"].map((text) => element("th", { scope: "col" }, text));
    const table = element("table", { class: "numbers" }, element("thead", {}, element("tr", {}, ...head)), this.rows);
    const button = element("button", { type: "button", class: "button plain", click: close }, "Close");
    replace(
      place,
      element("div", { class: "row spread" }, this.name, button),
      this.id,
      this.facts,
      element("h3", {}, "Why it waited"),
      this.waits,
      element("h3", {}, "Its iterations, newest first"),
      element("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Its iterations" }, table),
      this.more,
    );
  }

  update() {
    const request = this.choice.number === null ? null : this.model.requests.get(this.choice.number);
    this.place.hidden = request === null;
    if (!request) {
      if (this.choice.number !== null) {
        this.place.hidden = false;
        this.name.textContent = `Request #${this.choice.number}`;
        this.id.textContent = "The page no longer keeps this request.";
        for (const part of [this.facts, this.waits, this.rows, this.more]) replace(part);
      }
      this.#shown = "";
      return;
    }
    const shown = [request.number, request.rows.length, request.nForgotten, request.state, request.isLive && this.model.last].join();
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.name.textContent = `Request #${request.number}`;
    this.id.textContent = request.id;
    this.#showFacts(request);
    this.#showWaits(request);
    this.#showRows(request);
  }

  #showFacts(request) {
    const { arrived, scheduled, firstToken, lastToken, finished, nInput, nCached, nOutput } = request;
    const since = (time) => (time === null ? null : duration(time - arrived));
    const decoding = nOutput > 1 && firstToken !== null && lastToken > firstToken ? lastToken - firstToken : null;
    const facts = [
      ["State", finished === null ? request.state : `ended: ${request.reason}`],
      ["Tokens in", count(nInput) + (nCached ? `, ${count(nCached)} from the cache` : "")],
      ["Tokens out", (request.hasGaps && finished === null ? "at least " : "") + count(nOutput)],
      ["Most tokens", count(request.maxTokens)],
      ["Arrived", `at ${(arrived - (this.model.origin ?? 0)).toFixed(3)} s`],
      ["In the queue", since(scheduled) ?? since(finished ?? this.model.last)],
      ["First token", since(firstToken) ?? "not yet"],
      ["Each further token", decoding ? `${duration(decoding / (nOutput - 1))}, at most ${duration(request.longestGap)}` : "–"],
      [finished === null ? "So far" : "In all", since(finished ?? this.model.last)],
      ["Iterations", count(request.rows.length + request.nForgotten)],
      ["Priority", String(request.priority)],
    ];
    if (request.nPreempted) facts.push(["Lost its slots", plural(request.nPreempted, "time")]);
    replace(this.facts, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  }

  #showWaits(request) {
    const end = request.finished ?? this.model.last;
    const parts = request.waits.flatMap(([from, to]) => summedReasons(this.model, request, from, to ?? end));
    const items = parts.slice(-MOST_WAITS).map((part) =>
      element(
        "li",
        {},
        element("strong", {}, inShort(this.model, request, part)),
        ` ${duration(part.to - part.from)}`,
        element("span", { class: "quiet small" }, inFull(this.model, request, part)),
      ),
    );
    const left = parts.length - items.length;
    if (left > 0) items.unshift(element("li", { class: "quiet small" }, `${plural(left, "earlier reason")} left out`));
    replace(this.waits, ...items);
  }

  #showRows(request) {
    const { rows, number } = request;
    const shown = [];
    for (let i = rows.length - 1; i >= Math.max(0, rows.length - MOST_ROWS); i--) {
      const row = rows.at(i);
      const j = row.requests.indexOf(number);
      const kept = row.kept?.get(j);
      const tokens = count(row.tokens[j]) + (kept === undefined ? "" : `, ${count(kept)} kept`);
      const values = [count(row.number), PHASES[row.phases[j]], tokens, duration(row.returned - row.issued)];
      shown.push(element("tr", {}, ...values.map((value) => element("td", {}, value))));
    }
    replace(this.rows, ...shown);
    const left = rows.length + request.nForgotten - shown.length;
    this.more.textContent = left > 0 ? `${plural(left, "earlier one")} not listed` : "";
  }
}
