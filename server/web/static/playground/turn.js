// One message of a conversation, which can be edited, or an answer, which can be asked for again.

import { element, icon, replace } from "../dom.js";
import { Answer } from "./answer.js";

const NAMES = { user: "You", assistant: "Model" };

/** `message` null: an answer that `ask` fills. `again` and `edited` are called by the buttons. */
export class Turn {
  #message;
  #answer = null;
  #content = element("div", { class: "turn-content" });
  #edited;
  #buttons;

  constructor(message, { again, edited }) {
    this.role = message?.role ?? "assistant";
    this.#message = message;
    this.#edited = edited;
    const name = NAMES[this.role] ?? this.role;
    const edit = button("edit", "Edit", () => this.#edit());
    const redo = this.role === "assistant" ? button("redo", "Regenerate", again) : null;
    this.#buttons = element("div", { class: "turn-buttons" }, edit, redo);
    this.element = element(
      "li",
      { class: "turn", "data-role": this.role },
      element("div", { class: "turn-head" }, element("h3", {}, name), this.#buttons),
      this.#content,
    );
    if (message) this.#show();
    else this.#answer = new Answer("Answer");
  }

  get busy() {
    return this.#answer?.busy ?? false;
  }

  get message() {
    return this.#message ?? this.#answer.message;
  }

  get hasContent() {
    return Boolean(this.message.content || this.message.tool_calls);
  }

  stop() {
    this.#answer?.stop();
  }

  async ask(path, body) {
    replace(this.#content, this.#answer.element);
    const done = this.#answer.ask(path, body);
    this.#buttons.hidden = true;
    await done;
    this.#buttons.hidden = false;
  }

  #show() {
    const text = element("div", { class: "plain-text" }, this.#message.content);
    replace(this.#content, text);
  }

  #edit() {
    const { message } = this;
    const area = element("textarea", { class: "prompt", rows: "3", "aria-label": "Message to edit" });
    area.value = message.content;
    const before = [...this.#content.childNodes];
    const close = (nodes) => {
      replace(this.#content, ...nodes);
      this.#buttons.hidden = false;
      this.#buttons.firstElementChild.focus();
    };
    const save = () => {
      this.#message = { ...message, content: area.value };
      this.#show();
      close([...this.#content.childNodes]);
      this.#edited();
    };
    const word = this.role === "user" ? "Send again" : "Save";
    const buttons = element(
      "div",
      { class: "row" },
      element("button", { type: "button", class: "button primary", click: save }, word),
      element("button", { type: "button", class: "button", click: () => close(before) }, "Cancel"),
    );
    this.#buttons.hidden = true;
    replace(this.#content, element("div", { class: "stack editing" }, area, buttons));
    area.focus();
  }
}

function button(name, label, click) {
  return element("button", { type: "button", class: "icon-button", "aria-label": label, title: label, click }, icon(name));
}
