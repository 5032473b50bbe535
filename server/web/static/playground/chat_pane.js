// A conversation: its system message, its turns, and the next message.

import { element, newId } from "../dom.js";
import { Frame, key } from "./frame.js";
import { BadValue } from "./settings.js";
import { CHAT } from "./stream.js";
import { Turn } from "./turn.js";

const NEAR = 100; // pixels below the window at which the end of a pane still counts as seen

/** `page` is as in CompletionPane. */
export class ChatPane {
  #page;
  #frame;
  #turns = [];
  #height = 0; // of the conversation, in pixels
  #system = element("textarea", { rows: "2", placeholder: "What the model should keep to, if anything" });
  #list = element("ol", { class: "conversation", "aria-label": "Conversation" });
  #problem = element("div", { class: "problem", role: "alert", hidden: true });
  #next = element("textarea", { class: "prompt", rows: "2", placeholder: "Write a message" });

  constructor(page, { system = "", messages = [], next = "", seed = "", nLeftOut = 0 } = {}) {
    this.#page = page;
    this.#frame = new Frame({
      path: CHAT,
      runLabel: "Send",
      shortcut: [key("Enter"), " sends, ", key("Shift"), " ", key("Enter"), " breaks the line"],
      run: () => this.run(),
      stop: () => this.stop(),
      remove: () => page.remove(this),
      body: () => this.#body(this.#withNext()),
      refuse: (message) => this.#refuse(message),
    });
    this.#frame.seedText = seed;
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
    const id = newId();
    this.#system.id = id;
    this.element = element(
      "section",
      { class: "card pane" },
      this.#frame.head,
      element("div", { class: "field system" }, element("label", { for: id }, "System message"), this.#system),
      nLeftOut ? element("p", { class: "quiet small" }, `The first ${first} too long to be kept over the reload.`) : null,
      this.#list,
      this.#problem,
      this.#next,
      this.#frame.actions,
    );
    new ResizeObserver(() => this.#keepUp()).observe(this.#list);
  }

  get busy() {
    return this.#turns.some((turn) => turn.busy);
  }

  get state() {
    const messages = this.#turns.filter((turn) => turn.hasContent).map((turn) => turn.state);
    return { system: this.#system.value, messages, next: this.#next.value, seed: this.#frame.seedText };
  }

  name(number, isOnly) {
    const title = isOnly ? "Conversation" : `Conversation ${number}`;
    this.#frame.name(title, isOnly);
    this.element.setAttribute("aria-label", `Pane ${number}`);
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

  /** Send the next message; without one, answer the last again if nothing has answered it. */
  async run() {
    if (this.busy) return;
    if (this.#next.value.trim()) {
      this.#add({ role: "user", content: this.#next.value });
      this.#next.value = "";
    } else if (this.#turns.at(-1)?.role === "assistant" && !this.#turns.at(-1).hasContent) {
      this.#cut(this.#turns.length - 1);
    } else if (this.#turns.at(-1)?.role !== "user") {
      this.#refuse("Write a message first.");
      return;
    }
    await this.#answer();
  }

  async #answer() {
    this.#problem.hidden = true;
    let body;
    try {
      body = this.#body(this.#messages());
    } catch (error) {
      if (!(error instanceof BadValue)) throw error;
      this.#refuse(error.message);
      return;
    }
    const done = this.#add(null).ask(CHAT, body);
    this.#frame.busy = true;
    this.#page.changed();
    await done;
    this.#frame.busy = false;
    this.#page.changed();
  }

  // While an answer grows: keep the end of the pane in the window, if it was there.
  #keepUp() {
    const height = this.#list.offsetHeight;
    const grown = height - this.#height;
    this.#height = height;
    const below = this.element.getBoundingClientRect().bottom - innerHeight;
    if (this.busy && below > 0 && below - grown < NEAR) scrollBy(0, below + 16);
  }

  // A turn of a message, or with null one that is to be answered.
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

  // Answer again what stands before a turn, or with `keep` 1 up to it; what came later goes.
  #from(turn, keep) {
    if (this.busy) return;
    this.#cut(this.#turns.indexOf(turn) + keep);
    this.#answer();
  }

  #cut(length) {
    for (const turn of this.#turns.splice(length)) turn.element.remove();
  }

  #messages() {
    const system = this.#system.value.trim() ? [{ role: "system", content: this.#system.value }] : [];
    return [...system, ...this.#turns.filter((turn) => turn.hasContent).map((turn) => turn.message)];
  }

  #withNext() {
    const next = this.#next.value.trim() ? [{ role: "user", content: this.#next.value }] : [];
    return [...this.#messages(), ...next];
  }

  #body(messages) {
    const { model, ...fields } = this.#page.fields(true);
    return { model, messages, ...fields, ...this.#frame.seedField() };
  }

  #refuse(message) {
    this.#problem.textContent = message;
    this.#problem.hidden = false;
  }
}
