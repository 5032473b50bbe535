// Keeps the playground's mode, panes and parameters over a reload, in the tab's session storage.
//
// They are forgotten with the tab, and have no API key. Their size is bounded: the oldest messages go first.

const KEY = "orca-playground";
const VERSION = 1;
const MOST = 1 << 20; // characters

/** The state { mode, chat, completion, parameters } that was kept, or null. `chat` and `completion` have the panes' states. */
export function kept() {
  try {
    const state = JSON.parse(sessionStorage.getItem(KEY));
    const isWhole = state?.version === VERSION && state.chat.length && state.completion.length && state.parameters;
    return isWhole ? state : null;
  } catch {
    return null; // no storage, or nothing of ours in it
  }
}

/** Keep a state. */
export function keep(state) {
  try {
    sessionStorage.setItem(KEY, bounded({ version: VERSION, ...state }));
  } catch {
    forget(); // nothing is better than an older state
  }
}

function forget() {
  try {
    sessionStorage.removeItem(KEY);
  } catch {
    // No storage: nothing is kept.
  }
}

/** The state as JSON of at most `most` characters. Throws a RangeError where only prompts and parameters are longer. */
export function bounded(state, most = MOST) {
  const short = { ...state, chat: state.chat.map((pane) => ({ ...pane, messages: [...pane.messages] })) };
  let text = JSON.stringify(short);
  while (text.length > most) {
    let over = text.length - most;
    const longest = short.chat.reduce((one, other) => (size(other.messages) > size(one.messages) ? other : one));
    if (!longest.messages.length) throw new RangeError(`${text.length} characters are too many to keep`);
    while (over > 0 && longest.messages.length) {
      over -= size(longest.messages.shift());
      longest.nLeftOut = (longest.nLeftOut ?? 0) + 1;
    }
    text = JSON.stringify(short);
  }
  return text;
}

function size(value) {
  return JSON.stringify(value).length;
}
