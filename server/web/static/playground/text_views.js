// The two simple ways to show an answer's text; markdown.js is the third. Each has `element`, `add` and `end`.

import { element } from "../dom.js";
import { aligned, appendToken, tokenText } from "./tokens.js";

/** The text as it came. */
export class PlainText {
  element = element("div", { class: "raw" });
  #node = document.createTextNode("");

  constructor() {
    this.element.append(this.#node);
  }

  add(text) {
    this.#node.appendData(text);
  }

  end() {}
}

/** The text as tokens with their probabilities. */
export class TokenText {
  #unspelled = []; // tokens that have no text yet

  constructor(name) {
    this.element = tokenText(name);
  }

  add(text, tokens) {
    const pending = [...this.#unspelled, ...tokens];
    if (!text && pending.length) {
      this.#unspelled = pending;
      return;
    }
    this.#unspelled = [];
    this.#spell(text, pending);
  }

  end() {
    this.#spell("", this.#unspelled);
    this.#unspelled = [];
  }

  #spell(text, tokens) {
    for (const [part, its] of aligned(text, tokens)) {
      if (!its.length) this.element.append(part);
      else if (part || text) appendToken(this.element, part, its);
      else for (const one of its) appendToken(this.element, one.text, [one]); // a model without a tokenizer
    }
  }
}
