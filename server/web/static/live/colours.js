// The page's colours in the form that a canvas takes, read again when the theme changes; and hatched patterns.

const NAMES = [
  ...["text", "quiet", "line", "strong-line", "surface", "sunken", "accent", "bad", "good", "warn"],
  ...["prefill", "chunk", "decode", "wasted", "padding", "wait", "wait-text", "used", "reserved", "cached", "busy", "bubble", "gap", "unknown"],
  ...["on-prefill", "on-chunk", "on-decode"],
];

export class Colours {
  #probe;
  #patterns = new Map();

  /** `probe` is an element of the page; `changed` is called after the theme has changed. */
  constructor(probe, changed) {
    this.#probe = probe;
    this.#read();
    const again = () => {
      this.#read();
      changed();
    };
    addEventListener("orca-theme", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    matchMedia("(forced-colors: active)").addEventListener("change", again);
  }

  /** A pattern of lines from lower left to upper right, `gap` pixels apart, on a light ground of the same colour. */
  hatch(context, name, gap = 6) {
    const key = `${name} ${gap}`;
    if (!this.#patterns.has(key)) this.#patterns.set(key, context.createPattern(this.#tile(this[name], gap), "repeat"));
    return this.#patterns.get(key);
  }

  #tile(colour, gap) {
    const scale = 2; // sharp on dense screens
    const tile = new OffscreenCanvas(gap * scale, gap * scale);
    const context = tile.getContext("2d");
    context.globalAlpha = 0.18;
    context.fillStyle = colour;
    context.fillRect(0, 0, tile.width, tile.height);
    context.globalAlpha = 0.55;
    context.strokeStyle = colour;
    context.lineWidth = scale;
    context.lineCap = "square";
    const size = tile.width;
    for (const shift of [-size, 0, size]) {
      context.beginPath();
      context.moveTo(shift, size);
      context.lineTo(shift + size, 0);
      context.stroke();
    }
    return tile;
  }

  #read() {
    this.#patterns.clear();
    for (const name of NAMES) {
      this.#probe.style.color = `var(--${name})`;
      this[name.replace(/-(\w)/g, (_, letter) => letter.toUpperCase())] = getComputedStyle(this.#probe).color;
    }
  }
}
