// Buttons, keys, and files that are opened or dropped.

const ZOOM = 1.5;
const STEP = 0.15; // of the span, for an arrow

/** Connect the page's controls with `act`, an object of functions by name; `get(id)` finds an element. */
export function connectControls(get, act, view) {
  const clicks = {
    pause: act.pause,
    follow: () => act.follow(!view.follows),
    "zoom-in": () => view.zoom(1 / ZOOM),
    "zoom-out": () => view.zoom(ZOOM),
    fit: act.fit,
    open: () => get("file").click(),
    save: act.save,
    perfetto: act.perfetto,
    scale: act.scale,
  };
  for (const [id, click] of Object.entries(clicks)) get(id).addEventListener("click", click);
  get("file").addEventListener("change", (event) => {
    const [file] = event.target.files;
    event.target.value = ""; // so that the same file may be opened again
    if (file) act.open(file);
  });
  get("filter").addEventListener("change", (event) => act.filter(event.target.value));
  addEventListener("keydown", (event) => key(event, get, act, view));
  connectDrops(get("charts"), act);
}

function key(event, get, act, view) {
  const isOurs = get("charts").contains(event.target) || event.target === document.body || event.target.id === "main";
  if (event.key === "Escape" && !event.defaultPrevented) return act.choose(null);
  if (!isOurs || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("button, select, input, a, summary")) return;
  const keys = {
    ArrowLeft: () => view.pan(-STEP),
    ArrowRight: () => view.pan(STEP),
    "+": () => view.zoom(1 / ZOOM),
    "=": () => view.zoom(1 / ZOOM),
    "-": () => view.zoom(ZOOM),
    0: act.fit,
    f: () => act.follow(!view.follows),
    " ": act.pause,
    ArrowUp: () => act.neighbour(event),
    ArrowDown: () => act.neighbour(event),
  };
  // The page scrolls with these where no chart is in use.
  const isScroll = ["ArrowUp", "ArrowDown", " "].includes(event.key) && !get("charts").contains(event.target);
  if (!Object.hasOwn(keys, event.key) || isScroll) return;
  event.preventDefault();
  keys[event.key]();
}

function connectDrops(charts, act) {
  const mark = (isOn) => charts.classList.toggle("is-target", isOn);
  addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(true);
  });
  addEventListener("dragleave", () => mark(false));
  addEventListener("drop", (event) => {
    event.preventDefault();
    mark(false);
    const [file] = event.dataTransfer.files;
    if (file) act.open(file);
  });
}
