// Each request's way through the engine: waited, its prompt stored piece by piece, its answer decoded.

import { seconds } from "./chart.js";
import { el, svg } from "./dom.js";

const MOST_S = 60, SPANS_S = [10, 20, 30, MOST_S]; // what is looked back on
const WIDTH = 1000, HEIGHT = 18, LEAST_GAP = 7;
const MAX_KEPT = 60, MAX_SHOWN = 14;

export class Timeline {
  constructor() {
    this.requests = new Map();
  }

  // Takes one stage of a request, as `/events` tells it.
  take(stage) {
    const one = this.#one(stage.task, stage);
    one.prompt = stage.prompt_tokens;
    one.cached = Math.max(one.cached, stage.cached_tokens);
    one.tokens = Math.max(one.tokens, stage.new_tokens);
    if (stage.type === "piece") one.pieces.push({ at: stage.at_s, stored: stage.stored_tokens });
    else if (stage.type !== "preempted") one[stage.type] = stage.at_s;
    if (stage.type === "preempted") one.preempted += 1;
    if (stage.type === "ended") one.outcome = stage.outcome;
  }

  // Takes what stands in the slots: counts, and requests that began before anybody watched.
  see(slots, now) {
    for (const slot of slots) {
      if (!slot) continue;
      const one = this.#one(slot.task, slot);
      if (one.ended) continue;
      if (one.queued === undefined && one.started === undefined) Object.assign(one, { started: now, isPartial: true });
      if (one.isPartial && slot.new_tokens && !one.first_token) one.first_token = now;
      Object.assign(one, { prompt: slot.prompt_tokens, cached: slot.cached_tokens, tokens: slot.new_tokens });
    }
  }

  #one(task, { id, choice }) {
    let one = this.requests.get(task);
    if (!one) {
      one = { task, id, choice, prompt: 0, cached: 0, tokens: 0, pieces: [], preempted: 0 };
      this.requests.set(task, one);
      for (const [number, old] of this.requests) {
        if (this.requests.size <= MAX_KEPT) break;
        if (old.ended !== undefined) this.requests.delete(number);
      }
    }
    return one;
  }

  // Forgets what was not heard to its end, when the stream broke.
  lose() {
    for (const [number, one] of this.requests) if (one.ended === undefined) this.requests.delete(number);
  }

  // Those that wait, the first come first.
  waiting() {
    return [...this.requests.values()].filter((one) => one.queued !== undefined && one.started === undefined && one.ended === undefined);
  }

  get isMoving() {
    return [...this.requests.values()].some((one) => one.ended === undefined);
  }

  // The picture at `now`, of the loop's clock.
  draw(now) {
    const shown = [...this.requests.values()].filter((one) => (one.ended ?? now) > now - MOST_S).reverse().slice(0, MAX_SHOWN);
    if (!shown.length) return [el("p", { class: "muted" }, "No requests in the last minute. Ask something in the chat, and watch it here.")];
    const oldest = now - Math.min(...shown.map((one) => one.queued ?? one.started ?? now));
    const span = SPANS_S.find((seconds) => seconds >= oldest) ?? MOST_S;
    const legend = [["wait", "waits"], ["prefill", "prompt, piece by piece"], ["decode", "answer"]].map(([kind, name]) =>
      el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), name));
    return [el("ul", { class: "legend", "aria-label": "Colours" }, ...legend),
      el("ol", { class: "timeline" }, ...shown.map((one) => row(one, now, span))),
      el("p", { class: "ends muted small", "aria-hidden": "true" }, el("span", {}, `${span} s ago`), el("span", {}, "now"))];
  }
}

function row(one, now, span) {
  const end = one.ended ?? now, started = one.started ?? end, first = one.first_token ?? end, bars = [];
  const place = (at) => Math.max(0, WIDTH * (1 - (now - at) / span));
  const bar = (kind, from, to) => {
    const x = place(from);
    if (to > from && place(to) > 0) bars.push(svg("rect", { class: `fill ${kind}`, x, y: 0, width: Math.max(place(to) - x, 2), height: HEIGHT }));
  };
  bar("wait", one.queued ?? started, Math.min(started, end));
  if (one.started !== undefined) bar("prefill", started, Math.min(first, end));
  if (one.first_token !== undefined) bar("decode", first, end);
  let last = place(started);
  for (const x of one.pieces.map(({ at }) => place(at))) {
    if (x - last < LEAST_GAP) continue;
    bars.push(svg("path", { class: "tick", d: `M${x} 0V${HEIGHT}` }));
    last = x;
  }
  const track = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...bars);
  return el("li", {}, el("p", { class: "small" }, el("code", {}, name(one)), el("span", {}, said(one, end, started, first))), track);
}

// A request's id is as long as its client likes.
export const name = (one) => {
  const id = one.id.length > 14 ? `…${one.id.slice(-10)}` : one.id;
  return one.choice ? `${id} (${one.choice + 1})` : id;
};

function said(one, end, started, first) {
  const parts = [];
  if (one.queued !== undefined) parts.push(`waited ${seconds(Math.max(Math.min(started, end) - one.queued, 0))}`);
  if (one.started !== undefined) {
    const cached = one.cached ? `, ${one.cached} cached` : "", num = one.pieces.length;
    parts.push(`${one.prompt} prompt tokens${cached}, ${num} piece${num === 1 ? "" : "s"} in ${seconds(Math.max(first - started, 0))}`);
  }
  if (one.first_token !== undefined) parts.push(`${one.tokens} token${one.tokens === 1 ? "" : "s"} in ${seconds(Math.max(end - first, 0))}`);
  if (one.preempted) parts.push(`gave way ${one.preempted === 1 ? "once" : `${one.preempted} times`}`);
  return `${parts.join(" · ")}${one.outcome ? ` · ${one.outcome.replace("_", " ")}` : ""}`;
}
