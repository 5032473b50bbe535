// The list of requests in view, from which the user chooses one; requests_chart.js draws a bar for each.

import { element, setText } from "../dom.js";
import { plural } from "./format.js";
import { ROW, title } from "./requests_chart.js";
import { inFull, inShort, whyNow } from "./why.js";

const MOST = 200;

export class RequestList {
  #items = new Map(); // by number: { item, text }
  #shown = [];
  #keptAt = 0;
  #isScrolled = false;

  /** `list` is the list's element, `holder` scrolls it; `choose(number or null)`. */
  constructor({ list, holder, note, model, view, choice, chart, changed, choose }) {
    Object.assign(this, { list, holder, note, model, view, choice, chart, changed, choose });
    list.addEventListener("keydown", (event) => this.key(event));
    list.addEventListener("click", (event) => {
      const item = event.target.closest("[data-number]");
      if (item) choose(Number(item.dataset.number));
    });
    holder.addEventListener("scroll", () => {
      if (holder.scrollTop !== this.#keptAt) this.#isScrolled = true; // by the user
      chart.scrolled = holder.scrollTop;
      changed();
    });
  }

  filter = "all";

  /** Scroll to the newest again. */
  follow() {
    this.#isScrolled = false;
  }

  /** Show the requests that are in view now. */
  update() {
    const { view, holder } = this;
    const inView = [];
    for (const request of this.model.requests.values()) {
      const end = request.finished ?? this.model.last;
      const isChosen = request.number === this.choice.number;
      if (!isChosen && (request.arrived > view.to || end < view.from)) continue;
      if (!isChosen && this.filter === "live" && !request.isLive) continue;
      if (!isChosen && this.filter === "waiting" && !request.isWaiting) continue;
      inView.push(request);
    }
    const shown = inView.slice(-MOST);
    this.#show(shown);
    if (view.follows && !this.#isScrolled) this.#keepUp(shown);
    this.chart.scrolled = holder.scrollTop;
    this.chart.requests = shown;
    const more = inView.length > MOST ? `, the ${MOST} newest of them shown` : "";
    setText(this.note, shown.length ? `${plural(inView.length, "request")} in view${more}` : "No request in view");
  }

  // Scroll to the newest running requests and the first waiting ones.
  #keepUp(shown) {
    const { holder } = this;
    const nShown = Math.floor(holder.clientHeight / ROW);
    const firstWaiting = shown.findIndex((request) => request.isWaiting);
    const last = firstWaiting < 0 ? shown.length : Math.min(shown.length, firstWaiting + Math.ceil(nShown / 3));
    const top = Math.max(0, last * ROW - holder.clientHeight);
    if (holder.scrollTop === top) return;
    holder.scrollTop = top;
    this.#keptAt = holder.scrollTop;
  }

  #show(shown) {
    const isSame = shown.length === this.#shown.length && shown.every((one, i) => one === this.#shown[i]);
    if (!isSame) {
      const items = new Map();
      for (const request of shown) items.set(request.number, this.#items.get(request.number) ?? this.#item(request));
      this.#items = items;
      this.#shown = shown;
      this.list.replaceChildren(...[...items.values()].map(({ item }) => item));
    }
    const isFocused = this.#items.has(this.choice.number);
    for (const request of shown) this.#describe(request);
    if (isFocused) this.list.setAttribute("aria-activedescendant", `request-${this.choice.number}`);
    else this.list.removeAttribute("aria-activedescendant");
  }

  #item(request) {
    const name = element("span", { class: "request-name" }, `#${request.number}`);
    const state = element("span", { class: "request-state" });
    const properties = { role: "option", id: `request-${request.number}`, "data-number": request.number };
    const item = element("li", properties, name, state);
    return { item, state, text: "" };
  }

  #describe(request) {
    const shown = this.#items.get(request.number);
    const why = whyNow(this.model, request);
    const text = why ? `waits: ${inShort(this.model, request, why)}` : request.state;
    if (text !== shown.text) {
      shown.text = text;
      shown.state.textContent = text;
      shown.item.title = why ? `${title(request)} waits: ${inFull(this.model, request, why)}` : title(request);
      shown.item.dataset.state = request.isWaiting ? "waiting" : request.isLive ? "running" : "ended";
    }
    const isChosen = String(request.number === this.choice.number);
    if (shown.item.getAttribute("aria-selected") !== isChosen) shown.item.setAttribute("aria-selected", isChosen);
  }

  /** Move the choice with an arrow, Home or End. */
  key(event) {
    const last = this.#shown.length - 1;
    const at = this.#shown.findIndex((request) => request.number === this.choice.number);
    const to = { ArrowDown: Math.min(last, at + 1), ArrowUp: at < 0 ? last : Math.max(0, at - 1), Home: 0, End: last };
    if (!(event.key in to) || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const { number } = this.#shown[to[event.key]];
    this.choose(number);
    this.#items.get(number)?.item.scrollIntoView({ block: "nearest" });
  }
}
