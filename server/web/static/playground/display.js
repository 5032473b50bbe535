// How answers are shown: with Markdown rendered or not, with tokens tinted by their probability or not. The browser keeps
// the choice.

import { element } from "../dom.js";
import { MarkdownText } from "./markdown.js";
import { parseNumber } from "./request_text.js";
import { TokenText } from "./tokens.js";

const KEY = "orca-playground-display";

/** The two switches. `changed` is called when one of them changes how answers are shown. */
export class Display {
  #markdown = toggle("markdown", true);
  #probabilities = toggle("logprobs", false);
  #count = element("input", { id: "n-logprobs", type: "number", min: "0", max: "20", step: "1", value: "5" });
  #takesText;

  constructor({ takesText, changed }) {
    this.#takesText = takesText;
    this.#remember();
    this.markdownElement = setting("Render Markdown", this.#markdown, "Turn it off to see answers as the model wrote them.");
    const alternatives = element("div", { class: "inline-field" }, element("label", { for: "n-logprobs" }, "alternatives"), this.#count);
    this.probabilitiesElement = setting(
      "Probabilities of tokens",
      this.#probabilities,
      "For the next answers. Point at a token, or move to it with the arrow keys, to see its alternatives.",
      alternatives,
    );
    const show = () => (alternatives.hidden = !this.#probabilities.checked);
    for (const input of [this.#markdown, this.#probabilities, this.#count]) {
      input.addEventListener("change", () => {
        show();
        this.#keep();
        if (input !== this.#count) changed();
      });
    }
    show();
  }

  /** The request's fields that ask for log-probabilities, which differ between the routes. */
  fields(isChat) {
    // Without a tokenizer only the names of tokens can be shown.
    if (!this.#probabilities.checked) return this.#takesText ? {} : { logprobs: 0 };
    const n = this.#count.value === "" ? 0 : parseNumber(this.#count.value);
    return isChat ? { logprobs: true, top_logprobs: n } : { logprobs: n };
  }

  /** The view of an answer: "tokens", "markdown" or "plain". */
  viewOf({ hasTokens, isChat }) {
    if (hasTokens && (this.#probabilities.checked || !this.#takesText)) return "tokens";
    return isChat && this.#markdown.checked ? "markdown" : "plain";
  }

  #remember() {
    try {
      const kept = JSON.parse(localStorage.getItem(KEY)) ?? {};
      this.#markdown.checked = kept.markdown ?? this.#markdown.checked;
      this.#probabilities.checked = kept.probabilities ?? this.#probabilities.checked;
      if (Number.isInteger(kept.alternatives)) this.#count.value = kept.alternatives;
    } catch {
      // No storage, or nothing of ours in it: the defaults stay.
    }
  }

  #keep() {
    const kept = { markdown: this.#markdown.checked, probabilities: this.#probabilities.checked, alternatives: this.#count.valueAsNumber };
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
    } catch {
      // No storage: the choice lasts as long as the page is open.
    }
  }
}

/** A view of an answer as it came. All views have `element`, `add(text, tokens)` and `end()`. */
class PlainText {
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

/** Make an empty view of a kind that `viewOf` returns. */
export function newView(kind, name) {
  if (kind === "tokens") return new TokenText(name);
  return kind === "markdown" ? new MarkdownText() : new PlainText();
}

function toggle(id, checked) {
  return element("input", { id, type: "checkbox", role: "switch", class: "switch", checked });
}

function setting(label, input, about, more = null) {
  return element(
    "div",
    { class: "setting" },
    element("div", { class: "setting-head" }, element("label", { for: input.id }, label), input),
    more,
    element("p", { class: "about" }, about),
  );
}
