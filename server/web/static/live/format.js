// Numbers and times as text.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(n) {
  return whole.format(n);
}

/** A duration in a fitting unit: 420 us, 3.2 ms, 1.24 s, 2 min 05 s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size < 0.9995e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (size < 0.9995) return `${(seconds * 1e3).toPrecision(3)} ms`;
  if (size < 60) return `${seconds.toPrecision(3)} s`;
  const minutes = Math.floor(seconds / 60);
  return `${minutes} min ${String(Math.floor(seconds - 60 * minutes)).padStart(2, "0")} s`;
}

/** A time since the view's origin, with the digits that steps of `step` seconds need. */
export function moment(seconds, step = 0.001) {
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
  if (seconds < 60) return `${seconds.toFixed(digits)} s`;
  const minutes = Math.floor(seconds / 60);
  const rest = (seconds - 60 * minutes).toFixed(digits);
  return `${minutes}:${rest.padStart(digits ? digits + 3 : 2, "0")}`;
}

export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

/** The smallest of 1, 2 and 5 times a power of ten that is at least `least`. */
export function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= least * (1 - 1e-9));
}
