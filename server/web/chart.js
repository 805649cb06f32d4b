// Numbers as pictures that can be read without seeing them: rates over time, shares of a whole, histograms.

import { el, svg } from "./dom.js";

const WIDTH = 600, HEIGHT = 90;

// A number in few characters: 0, 0.42, 7.3, 128, 12 k.
export function short(value) {
  if (value >= 10000) return `${Math.round(value / 1000)} k`;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}

// A number of seconds: 4 ms, 0.25 s, 12 s, 3 min.
export function seconds(value) {
  if (value < 0.1) return `${Number((value * 1000).toFixed(1))} ms`;
  if (value < 120) return `${Number(value.toFixed(value < 10 ? 2 : 0))} s`;
  return `${Math.round(value / 60)} min`;
}

// A number of bytes: 0 B, 12 KiB, 1.5 GiB.
export function bytes(value) {
  const power = value < 1 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), 4);
  return `${short(value / 2 ** (10 * power))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// A line over time. `values` are of equal steps, the last one now.
export class Line {
  constructor(name, kind) {
    this.name = name;
    this.now = el("strong");
    this.most = el("span", { class: "muted small" });
    this.area = svg("path", { class: `area ${kind}` });
    this.line = svg("path", { class: `line ${kind}` });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      svg("path", { class: "rule", d: `M0 ${HEIGHT - 0.5}H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 0.5H${WIDTH}` }), this.area, this.line);
    this.node = el("figure", {}, el("figcaption", {}, el("span", {}, name), this.now, this.most), this.picture,
      el("p", { class: "ends muted small", "aria-hidden": "true" }, el("span", {}, "2 min ago"), el("span", {}, "now")));
  }

  update(values) {
    const most = Math.max(...values), top = most || 1, step = WIDTH / (values.length - 1);
    const points = values.map((value, i) => `${(i * step).toFixed(1)} ${(HEIGHT - 2 - (value / top) * (HEIGHT - 6)).toFixed(1)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${points.join("L")}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z`);
    this.now.textContent = short(values.at(-1));
    this.most.textContent = `highest ${short(most)}`;
    this.picture.setAttribute("aria-label", `${this.name} over two minutes: now ${short(values.at(-1))}, at most ${short(most)}`);
  }
}

// Parts of a whole as one bar, with a legend that has the numbers. `parts`: `{name, value, kind}`.
export function shares(label, parts, shown = String) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  for (const { value, kind } of parts) {
    const piece = el("span", { class: `fill ${kind}` });
    piece.style.width = `${(100 * value) / whole}%`;
    bar.append(piece);
  }
  const legend = parts.map(({ name, value, kind }) =>
    el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), `${name} `, el("strong", {}, shown(value))));
  return el("div", {}, bar, el("ul", { class: "legend", "aria-label": label }, ...legend));
}

// The bound below which a share of what was counted lies. `buckets`: `{bound, count}`.
export function quantile(buckets, share) {
  let left = buckets.reduce((sum, bucket) => sum + bucket.count, 0) * share;
  for (const { bound, count } of buckets) {
    left -= count;
    if (left <= 0) return bound;
  }
  return Infinity;
}

const within = (bound) => (bound === Infinity ? "longer" : `≤ ${seconds(bound)}`);

// A histogram as a table whose cells are bars, without the empty buckets at its ends.
export function histogram(label, buckets) {
  const first = buckets.findIndex((bucket) => bucket.count), last = buckets.findLastIndex((bucket) => bucket.count);
  if (first < 0) return el("p", { class: "muted" }, "Nothing was measured yet.");
  const most = Math.max(...buckets.map((bucket) => bucket.count)), total = buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  const rows = buckets.slice(first, last + 1).map(({ bound, count }) => {
    const bar = el("div", { class: "fill decode" });
    bar.style.width = `${(100 * count) / most}%`;
    return el("tr", {}, el("th", { scope: "row" }, within(bound)), el("td", { class: "bars" }, bar), el("td", { class: "count" }, String(count)));
  });
  const half = within(quantile(buckets, 0.5)), most95 = within(quantile(buckets, 0.95));
  return el("div", {}, el("p", { class: "small" }, `${total} measured since the start: half ${half}, 95 % ${most95}`),
    el("table", { class: "histogram" }, el("caption", { class: "unseen" }, label),
      el("thead", { class: "unseen" }, el("tr", {}, el("th", { scope: "col" }, "Time"), el("td"), el("th", { scope: "col" }, "Count"))),
      el("tbody", {}, ...rows)));
}
