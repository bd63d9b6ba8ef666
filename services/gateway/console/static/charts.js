// Small charts over time as SVG, drawn from a list of points; a gap in the data is a gap in the line.

import { el, svg } from "./dom.js";
import { clock } from "./format.js";

const W = 320;
const H = 72;
const PAD = 3;

/** A round number at or above the largest value: the top of the axis. */
function top(values) {
  const most = Math.max(0, ...values);
  if (!most) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= most * (1 - 1e-9));
}

/**
 * A figure with a title, the axis' top and the chart.
 * lines: [{name, values, tone}]; bars: true draws columns. format: how a value is said.
 */
export function chart({ title, points, lines, bars = false, max = null, format }) {
  const all = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const most = max ?? top(all);
  const step = (W - 2 * PAD) / Math.max(1, points.length);
  const x = (at) => PAD + (at + 0.5) * step;
  const y = (value) => H - PAD - (Math.min(value, most) / most) * (H - 2 * PAD);
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", class: "chart", "aria-hidden": "true" },
    [0, 0.5, 1].map((part) => svg("line", { x1: 0, x2: W, y1: y(most * part), y2: y(most * part), class: "grid" })),
    lines.map((line) => (bars ? columns(line, x, y, step) : path(line, x, y))));
  const last = lines.map((line) => {
    const value = line.values.findLast((each) => each !== null);
    return el("span", { class: `key ${line.tone}` }, `${line.name} ${format(value ?? null)}`);
  });
  const spoken = `${title}: ${lines.map((line) => `${line.name} ${format(line.values.findLast((v) => v !== null) ?? null)}`).join(", ")} at last`;
  return el("figure", { class: "panel plot", role: "img", "aria-label": spoken },
    el("figcaption", null, el("span", null, title), el("span", { class: "dim" }, all.length ? format(most) : "")),
    all.length ? picture : el("p", { class: "empty" }, "nothing in this time"),
    el("div", { class: "axis dim" }, el("span", null, points.length ? clock(points[0]) : ""), el("span", { class: "keys" }, last)));
}

function columns(line, x, y, step) {
  const width = Math.max(1, step * 0.72);
  return line.values.map((value, at) => (value
    ? svg("rect", { x: x(at) - width / 2, y: y(value), width, height: Math.max(0.5, H - PAD - y(value)), class: `col ${line.tone}` })
    : null));
}

function path(line, x, y) {
  const parts = [];
  let open = false;
  line.values.forEach((value, at) => {
    if (value === null) {
      open = false;
      return;
    }
    // A point between two gaps is drawn as a short dash.
    const alone = !open && (line.values[at + 1] ?? null) === null;
    parts.push(`${open ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}${alone ? " h2" : ""}`);
    open = true;
  });
  return svg("path", { d: parts.join(""), class: `line ${line.tone}`, "vector-effect": "non-scaling-stroke" });
}

/** A bar that is filled to a share, with the same in words beside it. */
export function meter(share, text, { plain = false } = {}) {
  const known = typeof share === "number" && Number.isFinite(share);
  const width = known ? Math.min(1, Math.max(0, share)) : 0;
  const tone = plain ? "" : width >= 0.9 ? "full" : width >= 0.7 ? "high" : "";
  return el("span", { class: "meter" },
    el("span", { class: "track", "aria-hidden": "true" }, el("span", { class: `fill ${tone}`, style: { width: `${(width * 100).toFixed(1)}%` } })),
    el("span", { class: "said" }, text));
}
