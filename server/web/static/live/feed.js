// The connection to the server's feed: connects, reads, and connects again after a failure.

import { errorOf, events, request } from "../api.js";

const FIRST_PAUSE = 0.5; // seconds before the second try; each further one is twice as long
const LONGEST_PAUSE = 15;
const SILENCE = 30; // seconds; the server sends something at least every ten

/** `take(lines)` gets the lines, a hello among them; `tell(state)` gets { connected, text, stopped }. */
export class Feed {
  #take;
  #tell;
  #stop = null;

  constructor({ take, tell }) {
    this.#take = take;
    this.#tell = tell;
  }

  get isOn() {
    return this.#stop !== null;
  }

  start() {
    if (this.#stop) return;
    this.#stop = new AbortController();
    this.#run(this.#stop.signal);
  }

  stop() {
    this.#stop?.abort();
    this.#stop = null;
  }

  async #run(signal) {
    for (let failures = 0; !signal.aborted; failures++) {
      let why;
      try {
        this.#tell({ connected: false, text: failures ? "connecting again" : "connecting" });
        await this.#read(signal, () => (failures = 0));
        why = "the server has closed the connection";
      } catch (error) {
        why = error.message;
        if (error instanceof Refused) {
          if (!signal.aborted) this.#tell({ connected: false, text: why, stopped: true });
          if (this.#stop?.signal === signal) this.#stop = null;
          return;
        }
      }
      if (signal.aborted) return;
      const seconds = Math.min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** failures) * (0.75 + Math.random() / 2);
      this.#tell({ connected: false, text: `${why}; trying again in ${Math.ceil(seconds)} s` });
      await pause(seconds, signal);
    }
  }

  async #read(signal, connected) {
    const attempt = new AbortController();
    const both = AbortSignal.any([signal, attempt.signal]);
    const response = await request("/live/events", { signal: both, headers: { Accept: "text/event-stream" } });
    if (response.status === 401) throw new Refused("the server needs an API key");
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const { event, data } of events(watched(response, () => attempt.abort()))) {
      if (signal.aborted) return;
      const lines = JSON.parse(data);
      if (event === "hello") {
        connected();
        this.#tell({ connected: true, text: "" });
        this.#take([lines]);
      } else if (event === "lines") {
        this.#take(lines);
      }
    }
  }
}

class Refused extends Error {}

// The response, given up after a long silence: a connection can die without a word.
function watched(response, giveUp) {
  let timer = setTimeout(giveUp, SILENCE * 1000);
  const tap = new TransformStream({
    transform(chunk, controller) {
      clearTimeout(timer);
      timer = setTimeout(giveUp, SILENCE * 1000);
      controller.enqueue(chunk);
    },
    flush: () => clearTimeout(timer),
  });
  return new Response(response.body.pipeThrough(tap));
}

function pause(seconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
