// The playground: completions and conversations, side by side, with the parameters of the server's own schema.

import { element, replace } from "../dom.js";
import { openapi } from "../schema.js";
import { announce } from "../shell.js";
import { ChatPane } from "./chat_pane.js";
import { CompletionPane } from "./completion_pane.js";
import { servedModel, showCard } from "./model_card.js";
import { LogprobSettings, Settings } from "./settings.js";
import { CHAT, COMPLETIONS } from "./stream.js";

const MOST_PANES = 8;
const LONG_ANSWER = 128; // tokens at first; the API's 16 are few to look at

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
}

class Page {
  #model;
  #modes;
  #mode;
  #logprobs = new LogprobSettings();

  constructor(model, document) {
    this.#model = model;
    const most = Math.min(LONG_ANSWER, Math.floor(model.max_model_len / 2));
    const texts = { max_tokens: String(most) };
    this.#modes = {
      completion: new Mode(this, CompletionPane, new Settings(document, COMPLETIONS, texts)),
      chat: new Mode(this, ChatPane, new Settings(document, CHAT, texts)),
    };
    for (const mode of Object.values(this.#modes)) mode.add();
    at("logprob-settings").append(this.#logprobs.element);
    this.#listen();
    this.#choose("completion");
  }

  get takesText() {
    return this.#model.inputs?.includes("text") ?? true;
  }

  /** The request's fields that all panes share. Throws BadValue. */
  fields(chat) {
    const mode = this.#modes[chat ? "chat" : "completion"];
    return { model: this.#model.id, ...mode.settings.values(), ...this.#logprobs.values(chat) };
  }

  /** A pane has begun or ended. */
  changed() {
    const { panes } = this.#mode;
    const some = panes.length > 1;
    at("run-all").hidden = !some || panes.some((pane) => pane.busy);
    at("stop-all").hidden = !some || !panes.some((pane) => pane.busy);
    at("add-pane").disabled = panes.length >= MOST_PANES;
  }

  remove(pane) {
    const { panes } = this.#mode;
    pane.stop();
    panes.splice(panes.indexOf(pane), 1);
    this.#show();
    panes.at(-1).focus();
  }

  #listen() {
    const canChat = this.#model.inputs?.includes("messages") ?? true;
    for (const input of document.querySelectorAll("[name=mode]")) {
      input.disabled = input.value === "chat" && !canChat;
      input.addEventListener("change", () => this.#choose(input.value));
    }
    at("no-chat").hidden = canChat;
    at("add-pane").addEventListener("click", () => this.#add());
    at("run-all").addEventListener("click", () => this.#each((pane) => pane.run(), "stop-all"));
    at("stop-all").addEventListener("click", () => this.#each((pane) => pane.stop(), null));
  }

  #each(act, focused) {
    for (const pane of this.#mode.panes) act(pane);
    if (focused) at(focused).focus();
  }

  // The new pane is like the last, with the next seed, so that the two can be compared.
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
