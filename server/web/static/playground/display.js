// How answers are shown: Markdown rendered or not, tokens tinted by their probability or not. The browser remembers.

import { element } from "../dom.js";
import { parseNumber } from "./json.js";
import { MarkdownText } from "./markdown.js";
import { PlainText, TokenText } from "./text_views.js";

const KEY = "orca-playground-display";

/** The two switches. `changed` is called when answers are to be shown in another way. */
export class Display {
  #markdown = toggle("markdown", true);
  #probabilities = toggle("logprobs", false);
  #count = element("input", { id: "n-logprobs", type: "number", min: "0", max: "20", step: "1", value: "5" });
  #takesText;

  constructor({ takesText, changed }) {
    this.#takesText = takesText;
    this.#remember();
    this.markdownElement = setting("Render Markdown", this.#markdown, "Off, an answer is shown as it came.");
    const alternatives = element("div", { class: "inline-field" }, element("label", { for: "n-logprobs" }, "alternatives"), this.#count);
    this.probabilitiesElement = setting(
      "Probabilities of tokens",
      this.#probabilities,
      "Of the answers to come: point at a token, or move to it with the arrow keys, to see its alternatives.",
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

  /** The fields that ask for log-probabilities, in the form of the route. */
  fields(chat) {
    // Without a tokenizer a token's name is all there is to show.
    if (!this.#probabilities.checked) return this.#takesText ? {} : { logprobs: 0 };
    const n = this.#count.value === "" ? 0 : parseNumber(this.#count.value);
    return chat ? { logprobs: true, top_logprobs: n } : { logprobs: n };
  }

  /** Which view an answer has: "tokens", "markdown" or "plain". */
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
      // No storage, or nothing of ours in it: the usual choice.
    }
  }

  #keep() {
    const kept = { markdown: this.#markdown.checked, probabilities: this.#probabilities.checked, alternatives: this.#count.valueAsNumber };
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
    } catch {
      // No storage: for as long as the page is open.
    }
  }
}

/** An empty view of a kind that `viewOf` names. */
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
