// Shows a request's answer as it comes: the text or tokens of each choice, then why it ended, how long it took and how fast it
// was.

import { announce, element, replace } from "../dom.js";
import { newView } from "./display.js";
import { generate, Refused } from "./stream.js";

const REASONS = {
  stop: "ended by itself",
  length: "reached its length",
  cancelled: "stopped",
  timeout: "ran out of time",
  error: "failed",
  tool_calls: "calls a tool",
};

/** The place on the page where answers appear, one after another. `name` names it for screen readers. */
export class Answer {
  #name;
  #display;
  #isChat;
  #choices = new Map();
  #abort = null;
  #text = element("div", { class: "answer-text" });
  #facts = element("div", { class: "facts" });
  #problem = element("div", { class: "problem", role: "alert", hidden: true });

  constructor(name, { display, isChat }) {
    this.#name = name;
    this.#display = display;
    this.#isChat = isChat;
    this.element = element("div", { class: "answer" }, this.#text, this.#problem, this.#facts);
  }

  get busy() {
    return this.#abort !== null;
  }

  /** The first choice as a message of a conversation. */
  get message() {
    return this.#choices.get(0)?.message ?? { role: "assistant", content: "" };
  }

  /** The first choice's reasoning. */
  get reasoning() {
    return this.#choices.get(0)?.reasoning ?? "";
  }

  /** Show a message of a kept or edited conversation. */
  show({ content, reasoning = "", tool_calls: calls = [] }) {
    this.#clear();
    this.element.dataset.state = "shown";
    this.#choice(0).add({ text: content ?? "", reasoning, calls, tokens: [], finish: null });
    this.#choice(0).end();
    replace(this.#facts);
  }

  /** Show the answer again, in the view that the user has chosen. */
  redraw() {
    for (const choice of this.#choices.values()) choice.redraw();
  }

  /** End the request; the text so far stays. */
  stop() {
    this.#abort?.abort();
  }

  /** Send a request and show its answer. Never throws. */
  async ask(path, body) {
    this.#abort = new AbortController();
    const clock = new Clock();
    this.#clear();
    this.element.dataset.state = "busy";
    this.element.setAttribute("aria-busy", "true");
    this.#show(clock, "waiting");
    let ended;
    try {
      for await (const piece of generate(path, body, this.#abort.signal)) {
        if (piece.usage) clock.usage = piece.usage;
        else {
          clock.tick(piece.tokens.length || 1);
          this.#choice(piece.index).add(piece);
        }
        this.#show(clock, "writing");
      }
      ended = [...new Set([...this.#choices.values()].map((choice) => choice.finish))].join(", ") || "stop";
    } catch (error) {
      ended = this.#failed(error);
    }
    this.#abort = null;
    for (const choice of this.#choices.values()) choice.end();
    this.element.dataset.state = ended;
    this.element.removeAttribute("aria-busy");
    clock.stop();
    this.#show(clock, ended);
    announce(`${this.#name}: ${REASONS[ended] ?? ended}${clock.usage ? `, ${clock.count} tokens` : ""}`);
  }

  /** Say that a request cannot be made. */
  refuse(message) {
    this.#problem.textContent = message;
    this.#problem.hidden = false;
  }

  #clear() {
    this.#choices.clear();
    this.#problem.hidden = true;
    replace(this.#text);
  }

  #choice(index) {
    let choice = this.#choices.get(index);
    if (!choice) {
      choice = new Choice(`${this.#name}, choice ${index + 1}`, index, (hasTokens) =>
        this.#display.viewOf({ hasTokens, isChat: this.#isChat }),
      );
      this.#choices.set(index, choice);
      this.#text.append(choice.element);
      this.#text.dataset.many = String(this.#choices.size > 1);
    }
    return choice;
  }

  #failed(error) {
    if (error.name === "AbortError") return "cancelled";
    this.refuse(error instanceof Refused ? error.message : `The server cannot be reached: ${error.message}`);
    return "error";
  }

  #show(clock, state) {
    replace(
      this.#facts,
      element("span", { class: "tag finish", "data-finish": state, title: REASONS[state] ?? "" }, state),
      ...clock.facts().map(([fact, title]) => element("span", { title }, fact)),
    );
  }
}

class Choice {
  finish = null;
  reasoning = "";
  #name;
  #viewOf;
  #kind = null; // the view's
  #view = null;
  #parts = []; // [text, tokens], if there are tokens
  #hasTokens = false;
  #hasEnded = false;
  #reasoningPlace = null;
  #calls = [];
  #content = "";

  constructor(name, index, viewOf) {
    this.#name = name;
    this.#viewOf = viewOf;
    this.element = element("div", { class: "choice" });
    this.element.dataset.index = String(index + 1);
    this.redraw();
  }

  get message() {
    const calls = this.#calls.filter(Boolean);
    return { role: "assistant", content: this.#content, ...(calls.length && { tool_calls: calls }) };
  }

  add({ text, reasoning, calls, tokens, finish }) {
    this.finish = finish ?? this.finish;
    if (reasoning) this.#reason(reasoning);
    for (const call of calls) this.#call(call);
    const isFirst = tokens.length > 0 && !this.#hasTokens;
    if (isFirst && this.#content) this.#parts.push([this.#content, []]);
    this.#hasTokens ||= isFirst;
    if (isFirst) this.redraw();
    this.#content += text;
    if (this.#hasTokens) this.#parts.push([text, tokens]);
    this.#view.add(text, tokens);
  }

  end() {
    this.#hasEnded = true;
    this.#view.end();
  }

  /** Show the text so far in the view that the user has chosen. */
  redraw() {
    const kind = this.#viewOf(this.#hasTokens);
    if (kind === this.#kind) return;
    this.#kind = kind;
    const view = newView(kind, this.#name);
    if (kind === "tokens") for (const [text, tokens] of this.#parts) view.add(text, tokens);
    else view.add(this.#content, []);
    if (this.#view) this.#view.element.replaceWith(view.element);
    else this.element.append(view.element);
    this.#view = view;
    if (this.#hasEnded) view.end();
  }

  #reason(text) {
    this.reasoning += text;
    if (!this.#reasoningPlace) {
      this.#reasoningPlace = element("div", { class: "reasoning" });
      this.element.prepend(element("details", { open: true }, element("summary", {}, "Reasoning"), this.#reasoningPlace));
    }
    this.#reasoningPlace.append(text);
  }

  #call(part) {
    const index = part.index ?? this.#calls.length;
    if (!this.#calls[index]) {
      this.#calls[index] = { id: part.id, type: "function", function: { name: "", arguments: "" } };
      this.element.append(element("pre", { class: "code call" }));
    }
    const { function: called } = this.#calls[index];
    called.name += part.function?.name ?? "";
    called.arguments += part.function?.arguments ?? "";
    this.element.querySelectorAll(".call")[index].textContent = `${called.name}(${called.arguments})`;
  }
}

class Clock {
  usage = null;
  #start = performance.now();
  #first = null;
  #last = null;
  #end = null;
  #n = 0;

  tick(n) {
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#n += n;
  }

  stop() {
    this.#end = performance.now();
  }

  get count() {
    return this.usage?.completion_tokens ?? this.#n;
  }

  facts() {
    if (this.#first === null) return [];
    const facts = [[`${this.count} tokens`, "tokens that were generated"]];
    const seconds = (this.#last - this.#first) / 1000;
    if (this.count > 1 && seconds > 0) facts.push([`${rate((this.count - 1) / seconds)} tokens/s`, "after the first token"]);
    facts.push([`first after ${Math.round(this.#first - this.#start)} ms`, "time to the first token"]);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (this.#end !== null && this.usage)
      facts.push([`${this.usage.prompt_tokens} in the prompt${cached ? `, ${cached} cached` : ""}`, "tokens of the prompt"]);
    return facts;
  }
}

function rate(perSecond) {
  return perSecond < 10 ? perSecond.toFixed(1) : String(Math.round(perSecond));
}
