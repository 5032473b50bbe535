// A pane with a prompt and its completion.

import { element } from "../dom.js";
import { Answer } from "./answer.js";
import { key, Pane } from "./pane.js";
import { BadValue } from "./settings.js";
import { COMPLETIONS } from "./stream.js";

/** `page` has the parameters and the display: `page.fields(isChat)`, `page.display`, `page.takesText`, `page.changed()`. */
export class CompletionPane extends Pane {
  #page;
  #answer;
  #prompt = element("textarea", { class: "prompt", rows: "5", spellcheck: "false" });

  constructor(page, { prompt = "", seed = "" } = {}) {
    super(page, { noun: "Prompt", path: COMPLETIONS, runLabel: "Run", shortcut: [key("Ctrl"), " ", key("Enter")], seed });
    this.#page = page;
    this.#answer = new Answer("Answer", { display: page.display, isChat: false });
    this.#prompt.value = prompt;
    this.#prompt.placeholder = page.takesText ? "Write the beginning of a text; the model continues it." : "Token ids: [1, 2, 3]";
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      }
    });
    this.element = element("section", { class: "card pane" }, this.head, this.#prompt, this.actions, this.#answer.element);
  }

  get busy() {
    return this.#answer.busy;
  }

  /** What makes another pane like this one. */
  get state() {
    return { prompt: this.#prompt.value, seed: this.seedText };
  }

  label(title) {
    this.#prompt.setAttribute("aria-label", title);
  }

  focus() {
    this.#prompt.focus();
  }

  stop() {
    this.#answer.stop();
  }

  redraw() {
    this.#answer.redraw();
  }

  refuse(message) {
    this.#answer.refuse(message);
  }

  async run() {
    if (!this.busy) await this.send(() => this.body(), (body) => this.#answer.ask(COMPLETIONS, body));
  }

  body() {
    return this.bodyOf({ prompt: this.#input() }, false);
  }

  #input() {
    const text = this.#prompt.value;
    if (this.#page.takesText) return text;
    try {
      return JSON.parse(text);
    } catch {
      throw new BadValue("this model has no tokenizer: write the prompt as token ids, such as [1, 2, 3]");
    }
  }
}
