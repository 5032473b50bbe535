// A prompt and its completion.

import { element } from "../dom.js";
import { Answer } from "./answer.js";
import { Frame, key } from "./frame.js";
import { BadValue } from "./settings.js";
import { COMPLETIONS } from "./stream.js";

/** `page` has the parameters and the display: `page.fields(chat)`, `page.display`, `page.takesText`, `page.changed()`. */
export class CompletionPane {
  #page;
  #frame;
  #answer;
  #prompt = element("textarea", { class: "prompt", rows: "5", spellcheck: "false" });

  constructor(page, { prompt = "", seed = "" } = {}) {
    this.#page = page;
    this.#answer = new Answer("Answer", { display: page.display, isChat: false });
    this.#frame = new Frame({
      path: COMPLETIONS,
      runLabel: "Run",
      shortcut: [key("Ctrl"), " ", key("Enter")],
      run: () => this.run(),
      stop: () => this.stop(),
      remove: () => page.remove(this),
      body: () => this.#body(),
      refuse: (message) => this.#answer.refuse(message),
    });
    this.#prompt.value = prompt;
    this.#frame.seedText = seed;
    this.#prompt.placeholder = page.takesText ? "Write a beginning; the model continues it." : "Token ids: [1, 2, 3]";
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      }
    });
    this.element = element(
      "section",
      { class: "card pane" },
      this.#frame.head,
      this.#prompt,
      this.#frame.actions,
      this.#answer.element,
    );
  }

  get busy() {
    return this.#answer.busy;
  }

  /** What another pane begins with to be like this one. */
  get state() {
    return { prompt: this.#prompt.value, seed: this.#frame.seedText };
  }

  name(number, isOnly) {
    const title = isOnly ? "Prompt" : `Prompt ${number}`;
    this.#frame.name(title, isOnly);
    this.element.setAttribute("aria-label", `Pane ${number}`);
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

  async run() {
    if (this.busy) return;
    let body;
    try {
      body = this.#body();
    } catch (error) {
      if (!(error instanceof BadValue)) throw error;
      this.#answer.refuse(error.message);
      return;
    }
    const done = this.#answer.ask(COMPLETIONS, body);
    this.#frame.busy = true;
    this.#page.changed();
    await done;
    this.#frame.busy = false;
    this.#page.changed();
  }

  #body() {
    const { model, ...fields } = this.#page.fields(false);
    return { model, prompt: this.#input(), ...fields, ...this.#frame.seedField() };
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
