// The card of the served model: its fields from /v1/models, and the engine's sizes from the live feed.

import { errorOf, events, getJson, request } from "../api.js";
import { element, replace } from "../dom.js";

const AGAIN_MS = 2000;

/** Wait for the served model. While it loads, `waiting` gets the server's message. */
export async function servedModel(waiting) {
  for (;;) {
    const response = await request("/v1/models");
    if (response.ok) return (await response.json()).data[0];
    const message = await errorOf(response);
    if (response.status !== 503) throw new Error(message);
    waiting(message);
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** Show the model's card, and again when the engine's sizes are known. */
export async function showCard(card, model) {
  const facts = [["Context", `${grouped(model.max_model_len)} tokens`, "input and output together"]];
  show(card, model, facts);
  const [engine, version] = await Promise.allSettled([engineSizes(), getJson("/version")]);
  if (engine.value) facts.push(...sizes(engine.value));
  if (version.value) facts.push(["Version", version.value.version, "of orca_jax"]);
  show(card, model, facts);
}

function show(card, model, facts) {
  const rows = facts.map(([name, value, title]) =>
    element("div", { title }, element("dt", {}, name), element("dd", {}, value)),
  );
  replace(
    card,
    element("div", { class: "label" }, "Model"),
    element("h2", { class: "model-name", title: `served since ${new Date(model.created * 1000).toLocaleString()}` }, model.id),
    element("dl", { class: "card-facts" }, ...rows),
  );
}

function sizes({ max_batch_size, n_slots, policy, scheduling_policy, n_workers }) {
  return [
    ["Batch", `${max_batch_size} requests`, "at most, in one iteration (max_bs)"],
    ["Slots", `${grouped(n_slots)} tokens`, "of keys and values (n_slots)"],
    ["Policy", `${policy}, ${scheduling_policy}`, "which requests run in an iteration, and in which order they wait"],
    ...(n_workers > 1 ? [["Stages", String(n_workers), "parts of the model that run one after another"]] : []),
  ];
}

// The first message of the feed has the sizes. A server without the feed has no such card.
async function engineSizes() {
  const response = await request("/live/events");
  if (!response.ok) return null;
  for await (const { event, data } of events(response)) {
    if (event === "hello") return JSON.parse(data);
  }
  return null;
}

function grouped(number) {
  return number.toLocaleString("en").replaceAll(",", "\u202f");
}
