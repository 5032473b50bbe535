// Renders a model's Markdown as elements, while the model writes it.
//
// The text is not to be trusted. It is parsed, and the elements are made here from the parser's tokens: HTML in the text
// stays text, nothing is loaded (an image becomes a link), and a link shows where it leads.

import { copyButton, element } from "../dom.js";
import MarkdownIt from "../vendor/markdown-it.js";

const TAGS = new Set("p ul ol li blockquote table thead tbody tr th td em strong s".split(" "));
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const PAUSE = 4; // milliseconds without rendering for each millisecond of it
const LONGEST_LANGUAGE = 40; // characters of a code block's language that are shown

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false }); // only complete addresses become links

/** A view of a growing text. At most once a frame it parses again the last blocks, which may still change. */
export class MarkdownText {
  element = element("div", { class: "markdown" });
  #text = "";
  #rest = ""; // the end of the text, whose blocks may still change
  #shown = []; // the blocks of the rest: { source, fence, node }
  #hasDefinitions = false; // link reference definitions
  #isAsked = false;
  #hasEnded = false;
  #cost = 0; // milliseconds that the last rendering took

  /** Add to the text. */
  add(text) {
    const added = text.replaceAll("\r", "");
    this.#text += added;
    this.#rest += added;
    if (this.#isAsked) return;
    this.#isAsked = true;
    setTimeout(() => requestAnimationFrame(() => this.#frame()), PAUSE * this.#cost);
  }

  /** Show the whole text, now that it is complete. */
  end() {
    this.#hasEnded = true;
    this.draw();
    if (this.#hasDefinitions) this.#drawWhole();
  }

  /** Render the end of the text. Blocks that can no longer change are not parsed again. */
  draw() {
    const { blocks, lastLine, hasDefinitions } = parsed(this.#rest);
    this.#hasDefinitions ||= hasDefinitions;
    let same = 0;
    while (same < blocks.length && this.#shown[same]?.source === blocks[same].source) {
      blocks[same].node = this.#shown[same].node;
      same++;
    }
    const [old, grown] = [this.#shown[same], blocks[same]];
    if (old?.fence && grown?.fence && canGrow(old.fence, grown.fence)) {
      grow(old.node, old.fence, grown.fence);
      grown.node = old.node;
    }
    for (const { node } of this.#shown.slice(same)) if (node !== grown?.node) node.remove();
    for (const block of blocks) {
      if (block.node) continue;
      block.node = rendered(block.tokens);
      this.element.append(block.node);
    }
    // The line that is being written may still join the block before it, or undo a table whose head is the line before.
    const last = Math.max(0, blocks.findLastIndex(({ line }) => line < lastLine - 1));
    if (last > 0) this.#rest = this.#rest.slice(blocks[last].start);
    this.#shown = blocks.slice(last);
  }

  #frame() {
    this.#isAsked = false;
    if (this.#hasEnded) return;
    const start = performance.now();
    this.draw();
    this.#cost = performance.now() - start;
  }

  // A link reference definition applies to the whole text, so earlier blocks are parsed again too.
  #drawWhole() {
    this.element.replaceChildren();
    this.#shown = [];
    this.#rest = this.#text;
    this.draw();
  }
}

// The top-level blocks { line, start, source, tokens, fence, node } of a text, and the number of its last line.
function parsed(text) {
  const env = {};
  const tokens = parser.parse(text, env);
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  const blocks = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) {
      const [line] = token.map;
      blocks.push({ line, start: starts[line], tokens: [], fence: token.type === "fence" ? token : null, node: null });
    }
    blocks.at(-1).tokens.push(token);
  }
  blocks.forEach((block, i) => (block.source = text.slice(block.start, blocks[i + 1]?.start)));
  return { blocks, lastLine: starts.length - 1, hasDefinitions: env.references !== undefined };
}

// The element of one block.
function rendered(tokens) {
  const root = element("div");
  build(root, tokens);
  return root.firstElementChild ?? element("p");
}

function build(root, tokens) {
  const open = [root];
  const put = (node) => open.at(-1).append(node);
  for (const token of tokens) {
    if (token.nesting < 0) {
      if (!token.hidden) open.pop();
    } else if (token.nesting > 0) {
      if (token.hidden) continue; // the paragraph of an item in a tight list
      const made = opened(token);
      put(token.tag === "table" ? element("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Table" }, made) : made);
      open.push(made);
    } else if (token.type === "inline") {
      buildInline(open.at(-1), token.children);
    } else if (token.type === "hr") {
      put(element("hr"));
    } else {
      put(codeBlock(token)); // a fence, or an indented block
    }
  }
}

function opened(token) {
  if (token.type === "heading_open") {
    // Below the headings of the page and the turn.
    const level = Number(token.tag.slice(1));
    return element(`h${Math.min(6, level + 3)}`, { "data-level": level });
  }
  if (!TAGS.has(token.tag)) throw new Error(`Markdown made an element ${token.tag}`);
  const start = token.tag === "ol" ? token.attrGet("start") : null;
  const align = token.attrGet("style")?.match(/^text-align:(left|center|right)$/)?.[1];
  return element(token.tag, { start, "data-align": align });
}

function buildInline(root, tokens) {
  const open = [root];
  const put = (node) => open.at(-1).append(node);
  let link = null; // the open link: { made, href }
  for (const token of tokens) {
    if (token.type === "link_open") {
      link = { made: linkTo(token.attrGet("href")), href: token.attrGet("href") };
      put(link.made);
      open.push(link.made);
    } else if (token.type === "link_close") {
      open.pop();
      showTarget(link);
      link = null;
    } else if (token.type === "image") {
      put(link ? token.content : imageLink(token));
    } else if (token.nesting > 0) {
      const made = opened(token);
      put(made);
      open.push(made);
    } else if (token.nesting < 0) {
      open.pop();
    } else if (token.type === "softbreak" || token.type === "hardbreak") {
      put("\n"); // models write lines that they mean; the style sheet keeps them
    } else {
      put(token.type === "code_inline" ? element("code", {}, token.content) : token.content);
    }
  }
}

/** An address that a link may have, or null. */
function address(href) {
  try {
    const url = new URL(href); // without a base: relative addresses would lead to this server
    return SCHEMES.has(url.protocol) ? url : null;
  } catch {
    return null;
  }
}

function linkTo(href) {
  const url = address(href);
  if (!url) return element("span", { class: "no-link" });
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href });
}

// Shows where a link leads, unless its text does.
function showTarget({ made, href }) {
  const url = address(href);
  const said = made.textContent.trim();
  if (url && (said === url.href || said === href || `${said}/` === url.href || `mailto:${said}` === url.href)) return;
  const target = url ? url.host || url.pathname : href;
  made.append(element("span", { class: "target" }, ` (${target})`));
}

function imageLink(token) {
  const href = token.attrGet("src");
  const link = { made: linkTo(href), href };
  link.made.append(`Image: ${token.content || "without a description"}`);
  showTarget(link);
  return link.made;
}

function codeBlock(token) {
  const language = token.info.trim().split(/\s/)[0].slice(0, LONGEST_LANGUAGE);
  const code = element("code", {}, codeOf(token));
  return element(
    "div",
    { class: "code-block" },
    element("div", { class: "code-head" }, element("span", {}, language), copyButton("Copy", "Copy the code", () => code.textContent)),
    element("pre", { class: "code", tabindex: "0", role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, code),
  );
}

function codeOf(token) {
  return token.content.replace(/\n$/, "");
}

function canGrow(old, grown) {
  return old.info === grown.info && codeOf(old) !== "" && codeOf(grown).startsWith(codeOf(old));
}

// Appends to the text of a code block, so that a long block is not made again for each piece.
function grow(node, old, grown) {
  node.querySelector("code").firstChild.appendData(codeOf(grown).slice(codeOf(old).length));
}
