// A turn of a conversation: a user's message, which can be edited, or an answer, which can also be regenerated.

import { copyButton, element, iconButton, replace } from "../dom.js";
import { Answer } from "./answer.js";

const NAMES = { user: "You", assistant: "Model" };

/** With `message` null, an answer that `ask` fills. The buttons call `again` and `edited`. */
export class Turn {
  #message; // a user's
  #answer = null; // the model's
  #content = element("div", { class: "turn-content" });
  #edited;
  #buttons;

  constructor(message, { display, again, edited }) {
    this.role = message?.role ?? "assistant";
    this.#message = message;
    this.#edited = edited;
    if (this.role === "assistant") this.#answer = new Answer("Answer", { display, isChat: true });
    const name = NAMES[this.role] ?? this.role;
    const edit = iconButton("edit", "Edit", () => this.#edit());
    const redo = this.#answer ? iconButton("redo", "Regenerate", again) : null;
    const copy = copyButton("", "Copy", () => this.message.content);
    this.#buttons = element("div", { class: "turn-buttons" }, edit, redo, copy);
    this.element = element(
      "li",
      { class: "turn", "data-role": this.role },
      element("div", { class: "turn-head" }, element("h3", {}, name), this.#buttons),
      this.#content,
    );
    if (message) this.#show(message);
  }

  get busy() {
    return this.#answer?.busy ?? false;
  }

  get message() {
    return this.#answer ? this.#answer.message : this.#message;
  }

  /** What makes another turn like this one: the message, and the reasoning before it. */
  get state() {
    const reasoning = this.#answer?.reasoning;
    return { ...this.message, ...(reasoning && { reasoning }) };
  }

  get hasContent() {
    return Boolean(this.message.content || this.message.tool_calls);
  }

  stop() {
    this.#answer?.stop();
  }

  redraw() {
    this.#answer?.redraw();
  }

  async ask(path, body) {
    replace(this.#content, this.#answer.element);
    const done = this.#answer.ask(path, body);
    this.#buttons.hidden = true;
    await done;
    this.#buttons.hidden = false;
  }

  #show(message) {
    if (this.#answer) {
      this.#answer.show(message);
      replace(this.#content, this.#answer.element);
    } else {
      this.#message = message;
      replace(this.#content, element("div", { class: "plain-text" }, message.content));
    }
  }

  #edit() {
    const { message } = this;
    const area = element("textarea", { class: "prompt", rows: "3", "aria-label": "Message to edit" });
    area.value = message.content;
    const before = [...this.#content.childNodes];
    const close = () => {
      this.#buttons.hidden = false;
      this.#buttons.firstElementChild.focus();
    };
    const save = () => {
      this.#show({ ...this.state, content: area.value });
      close();
      this.#edited();
    };
    const cancel = () => {
      replace(this.#content, ...before);
      close();
    };
    const word = this.role === "user" ? "Send again" : "Save";
    const buttons = element(
      "div",
      { class: "row" },
      element("button", { type: "button", class: "button primary", click: save }, word),
      element("button", { type: "button", class: "button", click: cancel }, "Cancel"),
    );
    this.#buttons.hidden = true;
    replace(this.#content, element("div", { class: "stack editing" }, area, buttons));
    area.focus();
  }
}
