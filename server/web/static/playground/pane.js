// The base of a pane: its title, seed and buttons, the copies of its request, and how a request is sent.

import { apiKey } from "../api.js";
import { copyButton, element, icon, iconButton, newId } from "../dom.js";
import { curl, parseNumber, python } from "./request_text.js";
import { BadValue } from "./settings.js";

const ON_MAC = /^Mac|^iP/.test(navigator.platform);

/**
 * A subclass has `element`, made of `head`, `actions` and its parts; `busy`, `run` and `stop`; `body`, which makes the
 * request's JSON or throws BadValue; `label(title, number, isOnly)`, which names its parts; and `refuse`, which shows why a
 * request cannot be sent.
 */
export class Pane {
  #page;
  #noun;
  #title = element("h2", { class: "pane-title" });
  #seed;
  #start;
  #stop;
  #remove;

  /** `noun` is the pane's title without a number. `shortcut` says which keys of the keyboard send a request. */
  constructor(page, { noun, path, runLabel, shortcut, seed }) {
    this.#page = page;
    this.#noun = noun;
    const id = newId();
    this.#seed = element("input", { id, type: "number", step: "1", placeholder: "random", value: seed });
    const field = element("div", { class: "seed" }, element("label", { for: id }, "Seed"), this.#seed);
    this.#remove = iconButton("close", "", () => page.remove(this));
    this.#start = element("button", { type: "button", class: "button primary run", click: () => this.run() }, icon("play"), runLabel);
    this.#stop = element("button", { type: "button", class: "button stop", click: () => this.stop(), hidden: true }, icon("stop"), "Stop");
    const copy = (word, label, write) =>
      copyButton(word, label, () => write(location.origin, path, this.body(), Boolean(apiKey())), (message) => this.refuse(message));
    const copies = element("div", { class: "row copies" }, copy("curl", "Copy as curl", curl), copy("Python", "Copy as Python", python));
    this.head = element("div", { class: "pane-head" }, this.#title, field, this.#remove);
    const keys = element("span", { class: "shortcut" }, ...shortcut);
    this.actions = element("div", { class: "pane-actions" }, this.#start, this.#stop, keys, copies);
  }

  /** Number the pane; `isOnly` says that there is no other. */
  name(number, isOnly) {
    const title = isOnly ? this.#noun : `${this.#noun} ${number}`;
    this.#title.textContent = title;
    this.#remove.hidden = isOnly;
    this.#remove.setAttribute("aria-label", `Remove ${title}`);
    this.#start.classList.toggle("primary", isOnly);
    this.element.setAttribute("aria-label", `Pane ${number}`);
    this.label(title, number, isOnly);
  }

  get seedText() {
    return this.#seed.value;
  }

  /** The request's JSON: `input`, the fields that all panes share, and the seed if one is filled in. Throws BadValue. */
  bodyOf(input, isChat) {
    const { model, ...fields } = this.#page.fields(isChat);
    if (this.#seed.validity.badInput) throw new BadValue("the seed is not a number");
    const seed = this.#seed.value === "" ? {} : { seed: parseNumber(this.#seed.value) };
    return { model, ...input, ...fields, ...seed };
  }

  /** Send the request that `makeBody` makes by `ask`, and show that it runs until it ends. */
  async send(makeBody, ask) {
    let body;
    try {
      body = makeBody();
    } catch (error) {
      if (!(error instanceof BadValue)) throw error;
      this.refuse(error.message);
      return;
    }
    const done = ask(body);
    this.#show(this.#start, this.#stop);
    await done;
    this.#show(this.#stop, this.#start);
  }

  // Show another button; the focus moves to it if it was on the first.
  #show(from, to) {
    const isFocused = document.activeElement === from;
    from.hidden = true;
    to.hidden = false;
    if (isFocused) to.focus();
    this.#page.changed();
  }
}

/** Make a key of the keyboard; "Ctrl" is the command key on a Mac. */
export function key(name) {
  return element("kbd", {}, name === "Ctrl" && ON_MAC ? "⌘" : name);
}
