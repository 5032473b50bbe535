// The playground: completions and conversations, side by side, with the parameters of the server's schema.

import { announce, element, replace } from "../dom.js";
import { openapi } from "../schema.js";
import { ChatPane } from "./chat_pane.js";
import { CompletionPane } from "./completion_pane.js";
import { Display } from "./display.js";
import { keep, kept } from "./kept.js";
import { servedModel, showCard } from "./model_card.js";
import { Settings } from "./settings.js";
import { CHAT, COMPLETIONS } from "./stream.js";

const MOST_PANES = 8;
const LONG_ANSWER = 128; // tokens at first; the API's 16 are few to look at
const MUCH_ROOM = 4096; // tokens of context from which an answer in Chat has no limit at first

const at = (id) => document.getElementById(id);

class Mode {
  panes = [];

  constructor(page, Pane, settings) {
    this.page = page;
    this.Pane = Pane;
    this.settings = settings;
  }

  add(state) {
    const pane = new this.Pane(this.page, state);
    this.panes.push(pane);
    return pane;
  }

  /** Begin anew with one empty pane. */
  clear() {
    for (const pane of this.panes.splice(0)) pane.stop();
    return this.add();
  }
}

class Page {
  #model;
  #modes;
  #mode;

  constructor(model, document) {
    this.#model = model;
    this.display = new Display({ takesText: this.takesText, changed: () => this.#redraw() });
    const before = kept();
    const mode = (name, Pane, path) => {
      const most = Math.min(LONG_ANSWER, Math.floor(model.max_model_len / 2));
      const isFree = name === "chat" && model.max_model_len >= MUCH_ROOM;
      const texts = { max_tokens: isFree ? "" : String(most), ...before?.parameters[name] };
      const made = new Mode(this, Pane, new Settings(document, path, texts));
      for (const state of before?.[name] ?? [{}]) made.add(state);
      return made;
    };
    this.#modes = {
      chat: mode("chat", ChatPane, CHAT),
      completion: mode("completion", CompletionPane, COMPLETIONS),
    };
    at("display-settings").append(this.display.markdownElement, this.display.probabilitiesElement);
    this.#listen();
    this.#choose(this.#canChat && before?.mode !== "completion" ? "chat" : "completion");
  }

  get #canChat() {
    return this.#model.inputs?.includes("messages") ?? true;
  }

  get takesText() {
    return this.#model.inputs?.includes("text") ?? true;
  }

  /** The request's fields that all panes share. Throws BadValue. */
  fields(isChat) {
    const mode = this.#modes[isChat ? "chat" : "completion"];
    return { model: this.#model.id, ...mode.settings.values(), ...this.display.fields(isChat) };
  }

  /** Show and keep the state after a pane has begun or ended a request. */
  changed() {
    const { panes } = this.#mode;
    const hasSeveral = panes.length > 1;
    const isBusy = panes.some((pane) => pane.busy);
    at("run-all").hidden = !hasSeveral || isBusy;
    at("stop-all").hidden = !hasSeveral || !isBusy;
    at("add-pane").disabled = panes.length >= MOST_PANES;
    this.#keep();
  }

  remove(pane) {
    const { panes } = this.#mode;
    pane.stop();
    panes.splice(panes.indexOf(pane), 1);
    this.#show();
    panes.at(-1).focus();
  }

  #listen() {
    for (const input of document.querySelectorAll("[name=mode]")) {
      input.disabled = input.value === "chat" && !this.#canChat;
      input.addEventListener("change", () => this.#choose(input.value));
    }
    at("no-chat").hidden = this.#canChat || !this.takesText;
    at("no-tokenizer").hidden = this.takesText;
    at("clear").addEventListener("click", () => this.#clear());
    at("add-pane").addEventListener("click", () => this.#add());
    at("run-all").addEventListener("click", () => this.#each((pane) => pane.run(), "stop-all"));
    at("stop-all").addEventListener("click", () => this.#each((pane) => pane.stop(), null));
    // The last event that a page is sure to get, before a reload, another page or another app.
    document.addEventListener("visibilitychange", () => document.hidden && this.#keep());
  }

  #keep() {
    const each = (get) => Object.fromEntries(Object.entries(this.#modes).map(([name, mode]) => [name, get(mode)]));
    keep({
      mode: this.#mode === this.#modes.chat ? "chat" : "completion",
      parameters: each((mode) => mode.settings.texts),
      ...each((mode) => mode.panes.map((pane) => pane.state)),
    });
  }

  #clear() {
    const pane = this.#mode.clear();
    this.#show();
    pane.focus();
    announce("Cleared");
  }

  #redraw() {
    for (const mode of Object.values(this.#modes)) for (const pane of mode.panes) pane.redraw();
  }

  #each(act, focused) {
    for (const pane of this.#mode.panes) act(pane);
    if (focused) at(focused).focus();
  }

  // Add a pane like the last one, with the next seed, so that their answers can be compared.
  #add() {
    const { state } = this.#mode.panes.at(-1);
    const seed = state.seed === "" ? "" : String(BigInt(state.seed) + 1n);
    const pane = this.#mode.add({ ...state, seed });
    this.#show();
    pane.focus();
    announce(`${this.#mode.panes.length} panes`);
  }

  #choose(name) {
    if (this.#mode && this.#mode !== this.#modes[name]) for (const pane of this.#mode.panes) pane.stop();
    this.#mode = this.#modes[name];
    document.querySelector(`[name=mode][value=${name}]`).checked = true;
    this.display.markdownElement.hidden = name !== "chat";
    replace(at("route-settings"), this.#mode.settings.element);
    this.#show();
  }

  #show() {
    const { panes } = this.#mode;
    panes.forEach((pane, i) => pane.name(i + 1, panes.length === 1));
    replace(at("panes"), ...panes.map((pane) => pane.element));
    at("panes").dataset.many = String(panes.length > 1);
    this.changed();
  }
}

async function start() {
  const say = (message) => replace(at("model-card"), element("p", { class: "quiet" }, message));
  try {
    const [model, document] = await Promise.all([servedModel(say), openapi()]);
    const page = new Page(model, document);
    at("content").hidden = false;
    showCard(at("model-card"), model);
    return page;
  } catch (error) {
    const again = element("button", { type: "button", class: "button", click: start }, "Try again");
    replace(at("model-card"), element("div", { class: "problem", role: "alert" }, error.message), again);
    return null;
  }
}

start();
