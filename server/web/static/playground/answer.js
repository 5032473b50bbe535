// One request's answer as it comes: text or tokens for each choice, then why it ended, how long and how fast.

import { element, replace } from "../dom.js";
import { announce } from "../shell.js";
import { generate, Refused } from "./stream.js";
import { aligned, appendToken, tokenText } from "./tokens.js";

const REASONS = {
  stop: "ended by itself",
  length: "reached its length",
  cancelled: "stopped",
  timeout: "ran out of time",
  error: "failed",
  tool_calls: "calls a tool",
};

/** A place for one answer after another. `name` is what screen readers hear of it. */
export class Answer {
  #name;
  #choices = new Map();
  #abort = null;
  #text = element("div", { class: "answer-text" });
  #facts = element("div", { class: "facts" });
  #problem = element("div", { class: "problem", role: "alert", hidden: true });

  constructor(name) {
    this.#name = name;
    this.element = element("div", { class: "answer" }, this.#text, this.#problem, this.#facts);
  }

  get busy() {
    return this.#abort !== null;
  }

  /** The first choice as a message of a conversation. */
  get message() {
    return this.#choices.get(0)?.message ?? { role: "assistant", content: "" };
  }

  /** End the request; what has come stays. */
  stop() {
    this.#abort?.abort();
  }

  /** Ask, and show what comes. Returns whether there is any text, and never throws. */
  async ask(path, body) {
    this.#abort = new AbortController();
    const clock = new Clock();
    this.#choices.clear();
    this.#problem.hidden = true;
    replace(this.#text);
    this.element.dataset.state = "busy";
    this.element.setAttribute("aria-busy", "true");
    this.#tell(clock, "waiting");
    let ended;
    try {
      for await (const piece of generate(path, body, this.#abort.signal)) {
        if (piece.usage) clock.usage = piece.usage;
        else this.#add(piece, clock);
        this.#tell(clock, "writing");
      }
      ended = this.#reason();
    } catch (error) {
      ended = this.#failed(error);
    }
    this.#abort = null;
    this.element.dataset.state = ended;
    this.element.removeAttribute("aria-busy");
    clock.stop();
    this.#tell(clock, ended);
    announce(`${this.#name}: ${REASONS[ended] ?? ended}${clock.usage ? `, ${clock.count} tokens` : ""}`);
    return [...this.#choices.values()].some((choice) => choice.hasContent);
  }

  /** Say that a request cannot be made. */
  refuse(message) {
    this.#problem.textContent = message;
    this.#problem.hidden = false;
  }

  #add(piece, clock) {
    clock.tick(piece.tokens.length || 1);
    let choice = this.#choices.get(piece.index);
    if (!choice) {
      choice = new Choice(this.#name, piece.index);
      this.#choices.set(piece.index, choice);
      this.#text.append(choice.element);
      this.#text.dataset.many = String(this.#choices.size > 1);
    }
    choice.add(piece);
  }

  #reason() {
    const reasons = new Set([...this.#choices.values()].map((choice) => choice.finish));
    return [...reasons].join(", ") || "stop";
  }

  #failed(error) {
    if (error.name === "AbortError") return "cancelled";
    this.refuse(error instanceof Refused ? error.message : `The server cannot be reached: ${error.message}`);
    return "error";
  }

  #tell(clock, state) {
    replace(
      this.#facts,
      element("span", { class: "tag finish", "data-finish": state, title: REASONS[state] ?? "" }, state),
      ...clock.facts().map(([fact, title]) => element("span", { title }, fact)),
    );
  }
}

class Choice {
  finish = null;
  #plain = document.createTextNode("");
  #tokens = null;
  #reasoning = null;
  #calls = [];
  #content = "";
  #unspelled = []; // tokens that have no text yet
  #name;

  constructor(name, index) {
    this.#name = `${name}, choice ${index + 1}`;
    this.element = element("div", { class: "choice" }, this.#plain);
    this.element.dataset.index = String(index + 1);
  }

  get hasContent() {
    return Boolean(this.#content || this.#calls.length);
  }

  get message() {
    const calls = this.#calls.filter(Boolean);
    return { role: "assistant", content: this.#content, ...(calls.length && { tool_calls: calls }) };
  }

  add({ text, reasoning, calls, tokens, finish }) {
    this.#content += text;
    this.finish = finish ?? this.finish;
    if (reasoning) this.#reason(reasoning);
    for (const call of calls) this.#call(call);
    const pending = [...this.#unspelled, ...tokens];
    if (!pending.length) {
      this.#plain.data += text;
    } else if (text || finish) {
      this.#unspelled = [];
      this.#spell(text, pending);
    } else {
      this.#unspelled = pending;
    }
  }

  #spell(text, tokens) {
    if (!this.#tokens) {
      this.#tokens = tokenText(this.#name);
      this.element.append(this.#tokens);
    }
    for (const [part, its] of aligned(text, tokens)) {
      if (!its.length) this.#tokens.append(part);
      else if (part || text) appendToken(this.#tokens, part, its);
      else for (const one of its) appendToken(this.#tokens, one.text, [one]); // a model without a tokenizer
    }
  }

  #reason(text) {
    if (!this.#reasoning) {
      this.#reasoning = element("div", { class: "reasoning" });
      this.element.prepend(element("details", { open: true }, element("summary", {}, "Reasoning"), this.#reasoning));
    }
    this.#reasoning.append(text);
  }

  #call(part) {
    const index = part.index ?? this.#calls.length;
    if (!this.#calls[index]) {
      this.#calls[index] = { id: part.id, type: "function", function: { name: "", arguments: "" } };
      this.element.append(element("pre", { class: "code call" }));
    }
    const { function: its } = this.#calls[index];
    its.name += part.function?.name ?? "";
    its.arguments += part.function?.arguments ?? "";
    this.element.querySelectorAll(".call")[index].textContent = `${its.name}(${its.arguments})`;
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
