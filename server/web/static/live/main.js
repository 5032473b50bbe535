// The page at /live: a feed or a file fills the model, and the view shows a part of it. Start with model.js.

import { errorOf, request } from "../api.js";
import { Frames, RulerChart } from "./chart.js";
import { Colours } from "./colours.js";
import { connectControls, Pointer } from "./controls.js";
import { Details } from "./details.js";
import { Feed } from "./feed.js";
import { download, readInto, savedLines } from "./file.js";
import { IterationsChart } from "./iterations_chart.js";
import { limitsOf, LiveModel } from "./model.js";
import { traceOf } from "./perfetto.js";
import { publish } from "./published.js";
import { showTiles, StateLine, summaryOf, Tables } from "./readouts.js";
import { RequestList } from "./request_list.js";
import { RequestsChart } from "./requests_chart.js";
import { SlotsChart } from "./slots_chart.js";
import { StagesChart } from "./stages_chart.js";
import { View } from "./view.js";

const get = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const model = new LiveModel(limitsOf(query.get("keep")));
const choice = { number: null };
const frames = new Frames(draw, describe);
const changed = () => frames.changed();
const view = new View(changed);
const colours = new Colours(get("probe"), changed);
const pointer = new Pointer({ tooltip: get("tooltip"), view, holder: get("charts"), changed, choose });
const parts = { model, view, colours, choice, pointer, changed };
const charts = {
  ruler: new RulerChart(get("ruler"), parts),
  iterations: new IterationsChart(get("iterations"), parts),
  slots: new SlotsChart(get("slots"), parts),
  stages: new StagesChart(get("stages"), parts),
  requests: new RequestsChart(get("requests"), parts),
};
for (const chart of Object.values(charts)) pointer.attach(chart);
const list = new RequestList({
  ...{ list: get("list"), holder: get("holder"), note: get("in-view"), chart: charts.requests },
  ...{ model, view, choice, changed, choose },
});
const details = new Details({ place: get("details"), model, choice, close: () => choose(null) });
const tables = new Tables({ summary: get("summary"), holder: get("as-table"), body: get("last-iterations"), model });
const state = new StateLine(get, model);
const feed = new Feed({
  take(lines) {
    for (const line of lines) model.line(line);
    changed();
  },
  tell(connection) {
    state.connection = connection;
    changed();
  },
});

function draw() {
  view.suit(model);
  view.keepUp(model);
  const height = `${charts.stages.wantedHeight}px`;
  if (charts.stages.canvas.style.height !== height) charts.stages.canvas.style.height = height;
  for (const chart of Object.values(charts)) chart.draw();
  for (const name of ["iterations", "slots", "stages"]) charts[name].describe(labelOf(name));
  pointer.update();
}

function describe() {
  list.update();
  details.update();
  tables.update();
  showTiles(get("tiles"), model, view);
  state.update();
  const isFile = model.source === "file";
  for (const id of ["pause", "follow"]) get(id).hidden = isFile;
  get("back").hidden = !isFile;
  get("follow").setAttribute("aria-pressed", String(view.follows));
  get("pause").setAttribute("aria-pressed", String(state.isPaused));
}

function labelOf(name) {
  const one = model.iterations.last();
  if (!one) return `${name}: none yet`;
  const [held, used, cached] = one.slots;
  if (name === "slots") {
    const snapshots = one.snapshots === null ? "" : `; ${one.snapshots} snapshots of states, of ${model.sizes.n_snapshots ?? "?"}`;
    const host = one.hostBlocks === null ? "" : `; ${one.hostBlocks} blocks in host memory, of ${model.sizes.n_host_blocks ?? "?"}`;
    const states = one.hostStates === null ? "" : `; ${one.hostStates} states in host memory, of ${model.sizes.n_host_states ?? "?"}`;
    return `Slots: ${used} used, ${held} reserved, ${cached} cached, ${model.sizes.n_slots ?? "?"} in all${snapshots}${host}${states}`;
  }
  if (name === "stages") return `Stages, busy in view: ${(charts.stages.shares ?? []).join(", ") || "unknown"}`;
  return summaryOf(model);
}

function choose(number) {
  if (number !== null && number === choice.number) return;
  choice.number = number;
  const request = model.requests.get(number);
  if (request && !view.follows) view.reveal(request.arrived, request.finished ?? model.last);
  frames.changed(true);
}

function problem(text) {
  get("problem").textContent = text;
  get("problem").hidden = text === "";
}

async function show(opened) {
  feed.stop();
  problem("");
  choice.number = null;
  state.isPaused = false;
  try {
    await readInto(model, await opened(), changed);
  } catch (error) {
    model.source = "file";
    model.status = { phase: "failed", reason: "" };
    problem(`The file cannot be shown: ${error.message}`);
  }
  view.fit(model);
  frames.changed(true);
}

async function served(name) {
  const response = await request(`/live/files/${encodeURIComponent(name)}`);
  if (!response.ok) throw new Error(await errorOf(response));
  return response.body;
}

connectControls(
  get,
  {
    choose,
    fit: () => view.fit(model),
    follow(isOn) {
      list.follow();
      view.follow(isOn);
    },
    filter(which) {
      list.filter = which;
      frames.changed(true);
    },
    neighbour: (event) => list.key(event),
    open: (file) => show(() => file.stream()),
    pause() {
      if (model.source === "file") return;
      state.isPaused = feed.isOn;
      if (feed.isOn) feed.stop();
      else feed.start();
      if (!state.isPaused) view.follow(true);
      frames.changed(true);
    },
    perfetto: () => download("orca-trace.json", "application/json", [JSON.stringify(traceOf(model))]),
    save: () => download("orca-live.jsonl", "application/jsonl", [...savedLines(model)].map((line) => `${JSON.stringify(line)}\n`)),
    scale() {
      charts.iterations.isLinear = !charts.iterations.isLinear;
      get("scale").setAttribute("aria-pressed", String(charts.iterations.isLinear));
      changed();
    },
  },
  view,
);
addEventListener("orca-key", () => model.source === "feed" && !state.isPaused && feed.start());
publish({ model, view, frames });

const name = query.get("file");
if (name) show(() => served(name));
else if (name === null) feed.start();
else {
  model.source = "file";
  model.status = { phase: "recorded", reason: "open a file, or drop one here" };
}
frames.changed(true);
