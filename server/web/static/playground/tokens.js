// Shows text as tokens, and in a tip a token's probability and its alternatives.
//
// The tip opens under the pointer and on focus. Tab stops once at the text, the arrow keys go from token to token, and a click
// or Enter keeps the tip open.

import { element, replace } from "../dom.js";

const tip = element("div", { id: "token-tip", class: "tip", role: "tooltip", popover: "manual" });
let kept = null; // the token whose tip stays open
let shown = null; // the token whose tip is open

/** A view of an answer as tokens with their probabilities. */
export class TokenText {
  #unspelled = []; // tokens without text so far

  constructor(name) {
    this.element = tokenGroup(name);
  }

  add(text, tokens) {
    const pending = [...this.#unspelled, ...tokens];
    if (!text && pending.length) {
      this.#unspelled = pending;
      return;
    }
    this.#unspelled = [];
    this.#spell(text, pending);
  }

  end() {
    this.#spell("", this.#unspelled);
    this.#unspelled = [];
  }

  #spell(text, tokens) {
    for (const [part, spelling] of aligned(text, tokens)) {
      if (!spelling.length) this.element.append(part);
      else if (part || text) appendToken(this.element, part, spelling);
      else for (const one of spelling) appendToken(this.element, one.text, [one]); // of a model without a tokenizer
    }
  }
}

// The element of an answer's tokens.
function tokenGroup(label) {
  const group = element("span", { class: "tokens", role: "group", "aria-label": label });
  group.addEventListener("pointerover", (event) => show(tokenAt(event)));
  group.addEventListener("pointerleave", () => show(kept));
  group.addEventListener("focusin", (event) => show(tokenAt(event)));
  group.addEventListener("focusout", () => keep(null));
  group.addEventListener("click", (event) => keep(tokenAt(event) === kept ? null : tokenAt(event)));
  group.addEventListener("keydown", onKey);
  return group;
}

// Append a span of text with the tokens that spell it: mostly one, several where they spell one character.
function appendToken(group, text, tokens) {
  const [last] = tokens.slice(-1);
  const span = element("span", {
    class: "token",
    role: "button",
    tabindex: group.childElementCount ? "-1" : "0",
    "data-likely": likelihood(last.logprob),
    "aria-label": text.trim() ? null : spoken(text),
  });
  span.textContent = text;
  span.tokens = tokens;
  group.append(span);
}

// Cut `text` at the borders of `tokens`, into pairs of a text and its tokens. From where the tokens do not spell the text (a
// character of several tokens, a text that was held back) one pair has the rest of both.
function aligned(text, tokens) {
  const pairs = [];
  let rest = text;
  for (let i = 0; i < tokens.length; i++) {
    const { text: name } = tokens[i];
    if (!name || !rest.startsWith(name)) {
      pairs.push([rest, tokens.slice(i)]);
      return pairs;
    }
    pairs.push([name, [tokens[i]]]);
    rest = rest.slice(name.length);
  }
  if (rest) pairs.push([rest, []]);
  return pairs;
}

function tokenAt(event) {
  return event.target.closest(".token");
}

function onKey(event) {
  const token = tokenAt(event);
  if (!token) return;
  const to = {
    ArrowLeft: token.previousElementSibling,
    ArrowRight: token.nextElementSibling,
    Home: token.parentElement.firstElementChild,
    End: token.parentElement.lastElementChild,
  }[event.key];
  if (to) {
    token.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  } else if (event.key === "Enter" || event.key === " ") {
    keep(token === kept ? null : token);
  } else if (event.key === "Escape") {
    kept = null;
    show(null);
  } else {
    return;
  }
  event.preventDefault();
}

function keep(token) {
  kept?.removeAttribute("data-kept");
  kept = token;
  kept?.setAttribute("data-kept", "");
  show(token);
}

function show(token) {
  if (token === shown) return;
  shown?.removeAttribute("aria-describedby");
  shown = token;
  if (!token) {
    if (tip.isConnected) tip.hidePopover();
    return;
  }
  if (!tip.isConnected) document.body.append(tip);
  replace(tip, ...token.tokens.map(described));
  token.setAttribute("aria-describedby", tip.id);
  tip.showPopover();
  place(token);
}

function described(token) {
  const rows = token.top.map((one) => {
    const bar = element("span", { class: "tip-bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", `${100 * Math.exp(one.logprob)}%`);
    return element(
      "tr",
      { class: one.text === token.text ? "chosen" : "" },
      element("th", { scope: "row" }, visible(one.text)),
      element("td", { class: "tip-share" }, bar),
      element("td", {}, percent(one.logprob)),
    );
  });
  const logprob = token.logprob === null ? "no log-probability" : `log-probability ${token.logprob.toFixed(3).replace("-", "−")}`;
  return element(
    "div",
    { class: "tip-token" },
    element("div", { class: "tip-head" }, element("code", {}, visible(token.text)), element("strong", {}, percent(token.logprob))),
    element("div", { class: "quiet small" }, logprob),
    rows.length ? element("table", {}, element("tbody", {}, ...rows)) : null,
  );
}

// Put the tip under the token, or above it where there is no room.
function place(token) {
  const at = [...token.getClientRects()].at(-1) ?? token.getBoundingClientRect(); // a leading space may end a line
  const { width, height } = tip.getBoundingClientRect();
  const below = at.bottom + 6;
  const top = below + height > innerHeight && at.top > height + 6 ? at.top - height - 6 : below;
  tip.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8))}px`;
  tip.style.top = `${top}px`;
}

function visible(text) {
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");
  return shown || "(no text)";
}

// What screen readers say for a text without anything to read.
function spoken(text) {
  if (text.includes("\n")) return "line break";
  return text ? "space" : "no text";
}

function percent(logprob) {
  if (logprob === null) return "";
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}

// The probability of a token, in the steps that the style sheet tints.
function likelihood(logprob) {
  const share = logprob === null ? 1 : Math.exp(logprob);
  return share >= 0.05 ? "likely" : share >= 0.01 ? "unlikely" : "rare";
}

addEventListener("scroll", () => show(null), { capture: true, passive: true });
