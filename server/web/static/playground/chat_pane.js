// A pane with a conversation: its system message, its turns, and the next message.

import { element, newId } from "../dom.js";
import { key, Pane } from "./pane.js";
import { CHAT } from "./stream.js";
import { Turn } from "./turn.js";

const NEAR = 100; // pixels below the window at which the end of a pane still counts as seen

/** `page` is as in CompletionPane. */
export class ChatPane extends Pane {
  #page;
  #turns = [];
  #height = 0; // of the conversation, in pixels
  #system = element("textarea", { rows: "2", placeholder: "Instructions for the model, if any" });
  #list = element("ol", { class: "conversation", "aria-label": "Conversation" });
  #problem = element("div", { class: "problem", role: "alert", hidden: true });
  #next = element("textarea", { class: "prompt", rows: "2", placeholder: "Write a message" });

  constructor(page, { system = "", messages = [], next = "", seed = "", nLeftOut = 0 } = {}) {
    const shortcut = [key("Enter"), " sends, ", key("Shift"), " ", key("Enter"), " breaks the line"];
    super(page, { noun: "Conversation", path: CHAT, runLabel: "Send", shortcut, seed });
    this.#page = page;
    this.#system.value = system;
    this.#next.value = next;
    for (const message of messages) this.#add(message);
    this.#next.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.run();
      }
    });
    const first = nLeftOut === 1 ? "message was" : `${nLeftOut} messages were`;
    this.#system.id = newId();
    this.element = element(
      "section",
      { class: "card pane" },
      this.head,
      element("div", { class: "field system" }, element("label", { for: this.#system.id }, "System message"), this.#system),
      nLeftOut ? element("p", { class: "quiet small" }, `The first ${first} too long to be kept over the reload.`) : null,
      this.#list,
      this.#problem,
      this.#next,
      this.actions,
    );
    new ResizeObserver(() => this.#keepUp()).observe(this.#list);
  }

  get busy() {
    return this.#turns.some((turn) => turn.busy);
  }

  get state() {
    const messages = this.#turns.filter((turn) => turn.hasContent).map((turn) => turn.state);
    return { system: this.#system.value, messages, next: this.#next.value, seed: this.seedText };
  }

  label(title, number, isOnly) {
    this.#list.setAttribute("aria-label", title);
    this.#next.setAttribute("aria-label", isOnly ? "Message" : `Message ${number}`);
  }

  focus() {
    this.#next.focus();
  }

  stop() {
    for (const turn of this.#turns) turn.stop();
  }

  redraw() {
    for (const turn of this.#turns) turn.redraw();
  }

  refuse(message) {
    this.#problem.textContent = message;
    this.#problem.hidden = false;
  }

  /** Send the next message; without one, answer the last message again if it has no answer. */
  async run() {
    if (this.busy) return;
    const last = this.#turns.at(-1);
    if (this.#next.value.trim()) {
      this.#add({ role: "user", content: this.#next.value });
      this.#next.value = "";
    } else if (last?.role === "assistant" && !last.hasContent) {
      this.#cut(this.#turns.length - 1);
    } else if (last?.role !== "user") {
      this.refuse("Write a message first.");
      return;
    }
    await this.#answer();
  }

  body() {
    const next = this.#next.value.trim() ? [{ role: "user", content: this.#next.value }] : [];
    return this.#bodyWith(next);
  }

  async #answer() {
    this.#problem.hidden = true;
    await this.send(() => this.#bodyWith([]), (body) => this.#add(null).ask(CHAT, body));
  }

  #bodyWith(next) {
    const system = this.#system.value.trim() ? [{ role: "system", content: this.#system.value }] : [];
    const messages = this.#turns.filter((turn) => turn.hasContent).map((turn) => turn.message);
    return this.bodyOf({ messages: [...system, ...messages, ...next] }, true);
  }

  // While an answer grows: keep the end of the pane in the window, if it was there.
  #keepUp() {
    const height = this.#list.offsetHeight;
    const grown = height - this.#height;
    this.#height = height;
    const below = this.element.getBoundingClientRect().bottom - innerHeight;
    if (this.busy && below > 0 && below - grown < NEAR) scrollBy(0, below + 16);
  }

  // Add a turn with a message, or with null one for an answer to come.
  #add(message) {
    const turn = new Turn(message, {
      display: this.#page.display,
      again: () => this.#from(turn, 0),
      edited: () => turn.role === "user" && this.#from(turn, 1),
    });
    this.#turns.push(turn);
    this.#list.append(turn.element);
    return turn;
  }

  // Answer the turns before one again, or with `keep` 1 the turns up to it; later turns go.
  #from(turn, keep) {
    if (this.busy) return;
    this.#cut(this.#turns.indexOf(turn) + keep);
    this.#answer();
  }

  #cut(length) {
    for (const turn of this.#turns.splice(length)) turn.element.remove();
  }
}
