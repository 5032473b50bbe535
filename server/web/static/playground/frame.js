// The frame of a pane: its title, seed, buttons, and the copies of its request.

import { apiKey } from "../api.js";
import { copyButton } from "../clipboard.js";
import { element, icon, newId } from "../dom.js";
import { parseNumber } from "./json.js";
import { BadValue } from "./settings.js";
import { curl, python } from "./snippets.js";

const ON_MAC = /^Mac|^iP/.test(navigator.platform);

/**
 * A frame around a pane's parts. `path` is the route; `body` makes the request's JSON or throws BadValue; `run`,
 * `stop` and `remove` are called by the buttons. `shortcut` is what the keys of the keyboard do.
 */
export class Frame {
  #title = element("h2", { class: "pane-title" });
  #seed;
  #start;
  #stop;
  #remove;

  constructor({ path, runLabel, run, shortcut, stop, remove, body, refuse }) {
    const id = newId();
    this.#seed = element("input", { id, type: "number", step: "1", placeholder: "random" });
    const seed = element("div", { class: "seed" }, element("label", { for: id }, "Seed"), this.#seed);
    this.#remove = element("button", { type: "button", class: "icon-button", click: remove }, icon("close"));
    this.#start = element("button", { type: "button", class: "button primary run", click: run }, icon("play"), runLabel);
    this.#stop = element("button", { type: "button", class: "button stop", click: stop, hidden: true }, icon("stop"), "Stop");
    const copies = [
      ["curl", "Copy as curl", curl],
      ["Python", "Copy as Python", python],
    ].map(([word, label, write]) => copyButton(word, label, () => write(location.origin, path, body(), { keyed: Boolean(apiKey()) }), refuse));
    this.head = element("div", { class: "pane-head" }, this.#title, seed, this.#remove);
    const keys = element("span", { class: "shortcut" }, ...shortcut);
    this.actions = element("div", { class: "pane-actions" }, this.#start, this.#stop, keys, element("div", { class: "row copies" }, ...copies));
  }

  /** Call it `title`; `isOnly` says that there is no other pane. */
  name(title, isOnly) {
    this.#title.textContent = title;
    this.#remove.hidden = isOnly;
    this.#remove.setAttribute("aria-label", `Remove ${title}`);
    this.#start.classList.toggle("primary", isOnly);
  }

  /** Show whether a request runs; the focus stays on the button that is there. */
  set busy(busy) {
    const [from, to] = busy ? [this.#start, this.#stop] : [this.#stop, this.#start];
    const focused = document.activeElement === from;
    from.hidden = true;
    to.hidden = false;
    if (focused) to.focus();
  }

  get seedText() {
    return this.#seed.value;
  }

  set seedText(text) {
    this.#seed.value = text;
  }

  /** The seed as a request's field, if one is given. Throws BadValue. */
  seedField() {
    if (this.#seed.validity.badInput) throw new BadValue("the seed is not a number");
    return this.#seed.value === "" ? {} : { seed: parseNumber(this.#seed.value) };
  }
}

/** A key of the keyboard, where "Ctrl" is the command key on a Mac. */
export function key(name) {
  return element("kbd", {}, name === "Ctrl" && ON_MAC ? "⌘" : name);
}
