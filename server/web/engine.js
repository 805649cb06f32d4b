// The live view of the engine: `/events` moves it, `/metrics` has its histograms, `/slots` how its requests draw.

import { ask, frames, json } from "./api.js";
import { bytes, histogram, Line, shares, short } from "./chart.js";
import { byId, el } from "./dom.js";
import { about, chosen } from "./models.js";
import { name, Timeline } from "./timeline.js";

const REDRAW_MS = 250, MOVE_MS = 1000, METRICS_MS = 2000, RETRY_MS = 2000;
const RATE_SECONDS = 120;
const HISTOGRAMS = { ttft: ["mlxcel_ttft_seconds", "Time to the first token"], gap: ["mlxcel_inter_token_seconds", "Time between tokens"] };

// The buckets of a histogram in Prometheus' text, each with its own count: the chosen model's, where there are several.
function bucketsOf(text, metric) {
  let before = 0;
  const model = chosen() && `model="${chosen().replace(/["\\]/g, "\\$&")}"`;
  const lines = [...text.matchAll(new RegExp(`^${metric}_bucket\\{(.*)\\} (\\S+)$`, "gm"))].filter(([, labels]) => !model || labels.includes(model));
  return lines.map(([, labels, sum]) => {
    const [, bound] = /le="([^"]+)"/.exec(labels), count = Number(sum) - before;
    before = Number(sum);
    return { bound: bound === "+Inf" ? Infinity : Number(bound), count };
  });
}

// New tokens and prompt tokens in each of the last seconds.
class Rates {
  constructor() {
    this.lines = { completion_tokens: new Line("New tokens a second", "decode"), prompt_tokens: new Line("Prompt tokens a second", "prefill") };
    this.bins = new Map();
  }

  take(snapshot) {
    const last = this.last;
    this.last = snapshot;
    if (!last || snapshot.at_s <= last.at_s) return;
    const from = Math.max(last.at_s, snapshot.at_s - 2), width = snapshot.at_s - from;
    for (let second = Math.floor(from); second <= snapshot.at_s; second += 1) {
      const part = (Math.min(second + 1, snapshot.at_s) - Math.max(second, from)) / width;
      const bin = this.bins.get(second) ?? { completion_tokens: 0, prompt_tokens: 0 };
      for (const field of Object.keys(bin)) bin[field] += part * (snapshot[field] - last[field]);
      this.bins.set(second, bin);
    }
    for (const second of this.bins.keys()) if (second < snapshot.at_s - RATE_SECONDS - 2) this.bins.delete(second);
  }

  // The last whole seconds up to `now`.
  draw(now) {
    const end = Math.floor(now);
    for (const [field, line] of Object.entries(this.lines)) {
      line.update(Array.from({ length: RATE_SECONDS }, (_, i) => this.bins.get(end - RATE_SECONDS + i)?.[field] ?? 0));
    }
    return this.bins.get(end - 1)?.completion_tokens ?? 0;
  }
}

export class Engine {
  constructor() {
    this.timeline = new Timeline();
    this.rates = new Rates();
    this.slotsDetail = new Map();
    byId("rates").append(...Object.values(this.rates.lines).map((line) => line.node));
  }

  serves(props) {
    this.props = props;
    if (this.snapshot) this.#redrawSoon();
  }

  start() {
    if (this.controller) return;
    this.controller = new AbortController();
    this.#follow(this.controller.signal);
    this.moves = setInterval(() => { if (this.snapshot && (this.timeline.isMoving || this.#isRecent())) this.#redrawSoon(); }, MOVE_MS);
  }

  stop() {
    this.controller?.abort();
    this.controller = null;
    clearInterval(this.moves);
    this.#lose();
  }

  // What happens from here on is not heard, and must not be guessed when it is again.
  #lose() {
    this.timeline.lose();
    this.rates.last = null;
  }

  async #follow(signal) {
    while (!signal.aborted) {
      this.#say("Connecting", "");
      try {
        const response = await ask(about("/events"), { signal });
        this.#say("Live", "good");
        for await (const { data } of frames(response)) if (data) this.#take(JSON.parse(data));
      } catch (fault) {
        if (signal.aborted) return;
        if (fault.status === 401) { this.#say("A key is needed", "bad"); this.controller = null; return; }
      }
      this.#lose();
      this.#say("Not connected", "bad");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #say(text, kind) {
    byId("connection").textContent = text;
    byId("connection").className = `chip ${kind}`;
  }

  #take(frame) {
    if (frame.type === "snapshot") {
      this.snapshot = frame;
      this.#at(frame.at_s);
      this.rates.take(frame);
      this.timeline.see(frame.slots, frame.at_s);
      this.#look();
    } else if (frame.type !== "missed") {
      this.#at(frame.at_s);
      this.timeline.take(frame);
    }
    this.#redrawSoon();
  }

  // The loop's clock, as it goes here.
  #at(at_s) {
    this.clock = { at_s, here: performance.now() };
  }

  get #now() {
    return this.clock.at_s + (performance.now() - this.clock.here) / 1000;
  }

  #isRecent() {
    return this.#now - this.snapshot.at_s < RATE_SECONDS;
  }

  // Asks for histograms and for what requests draw by, when something has changed and not too often.
  #look() {
    this.looking ??= setTimeout(async () => {
      try {
        const [metrics, slots] = await Promise.all([ask("/metrics").then((answer) => answer.text()), json(about("/slots"))]);
        for (const [id, [metric, label]] of Object.entries(HISTOGRAMS)) byId(id).replaceChildren(histogram(label, bucketsOf(metrics, metric)));
        this.slotsDetail = new Map(slots.filter((slot) => slot.is_processing).map((slot) => [slot.id_task, slot]));
      } catch {
        // what is shown stays until the next look
      }
      this.looking = null;
    }, this.looked ? METRICS_MS : 0);
    this.looked = true;
  }

  #redrawSoon() {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      if (this.snapshot && !byId("engine-view").hidden) this.#redraw();
    }, REDRAW_MS);
  }

  #redraw() {
    const { snapshot } = this, now = this.#now, rate = this.rates.draw(now);
    byId("tiles").replaceChildren(...this.#tiles(snapshot, rate));
    byId("slots").replaceChildren(...snapshot.slots.map((slot, i) => this.#slot(slot, i)));
    byId("queue").replaceChildren(...this.#queue(snapshot, now));
    byId("blocks").replaceChildren(...memory(snapshot));
    byId("prefix").replaceChildren(...promptCache(snapshot.prompt_cache));
    byId("timeline").replaceChildren(...this.timeline.draw(now));
  }

  #tiles({ slots, queue_depth, requests, prompt_cache, preemptions, completion_tokens }, rate) {
    const { hits, misses } = prompt_cache, asked = hits + misses, context = this.props?.default_generation_settings.n_ctx;
    return [
      ["Slots at work", `${slots.filter(Boolean).length} of ${slots.length}`, context ? `${short(context)} tokens each` : ""],
      ["Waiting", queue_depth, `${short(preemptions)} gave way so far`],
      ["Tokens a second", short(rate), `${short(completion_tokens)} in all`],
      ["Prefix hits", asked ? `${Math.round((100 * hits) / asked)} %` : "–", `${short(hits)} of ${short(asked)}`],
      ["Answered", short(requests.stop + requests.length), `${short(requests.cancelled)} broken off`],
      ["Failed", short(requests.failed), `${short(requests.refused)} refused`],
    ].map(([label, value, more]) => el("div", {}, el("dt", {}, label), el("dd", {}, el("strong", {}, String(value)), el("span", { class: "muted small" }, more))));
  }

  #slot(slot, number) {
    if (!slot) return el("li", {}, el("p", {}, el("span", {}, `Slot ${number}`), el("span", { class: "muted" }, "free")), el("div", { class: "bar", "aria-hidden": "true" }));
    const detail = this.slotsDetail.get(slot.task), told = detail?.next_token[0];
    const most = told && told.n_decoded + told.n_remain; // of one moment: the slot itself is of a later one
    const isPrefill = slot.stored_tokens < slot.prompt_tokens;
    const share = isPrefill ? slot.stored_tokens / slot.prompt_tokens : most ? Math.min(slot.new_tokens / most, 1) : 1;
    const bar = el("div", { class: "bar", "aria-hidden": "true" });
    const fill = el("span", { class: `fill ${isPrefill ? "prefill" : "decode"}` });
    fill.style.width = `${100 * share}%`;
    bar.append(fill);
    const cached = slot.cached_tokens ? `, ${slot.cached_tokens} cached` : "";
    const state = isPrefill ? `prompt ${slot.stored_tokens} of ${slot.prompt_tokens}${cached}`
      : `prompt ${slot.prompt_tokens}${cached} · ${slot.new_tokens} new${most ? ` of at most ${most}` : ""}`;
    return el("li", {}, el("p", {}, el("span", {}, `Slot ${number} `, el("code", {}, name(slot))), el("span", {}, isPrefill ? "prompt" : "answer")), bar,
      el("p", { class: "muted small" }, `${state}${detail ? ` · temperature ${short(detail.params.temperature)}` : ""}`));
  }

  #queue({ queue_depth }, now) {
    const waiting = this.timeline.waiting();
    if (!queue_depth && !waiting.length) return [el("p", { class: "muted" }, "Nobody waits.")];
    const items = waiting.slice(0, 12).map((one) => el("li", {}, el("code", {}, name(one)), el("span", { class: "muted small" }, `${one.prompt} prompt tokens, ${Math.max(0, Math.round(now - one.queued))} s`)));
    const rest = queue_depth - items.length;
    return [el("ol", { class: "plain" }, ...items), ...(rest > 0 ? [el("p", { class: "muted small" }, `${items.length ? "and " : ""}${rest} ${items.length ? "more" : "waiting"}`)] : [])];
  }
}

function memory({ kv_blocks, kv_bytes }) {
  const { held, cached, free } = kv_blocks, live = el("p", { class: "small" }, `${bytes(kv_bytes)} kept for what runs`);
  if (held === undefined) return [live, el("p", { class: "muted small" }, "Each request has buffers of its own; there are no shared blocks here.")];
  return [shares("Blocks of 16 tokens", [
    { name: "held by requests", value: held, kind: "decode" },
    { name: "kept for later", value: cached, kind: "prefill" },
    { name: "free", value: free, kind: "idle" },
  ]), live];
}

function promptCache(cache) {
  if (!cache.enabled) return [el("p", { class: "muted" }, "Off (--no-prompt-cache).")];
  return [shares("Lookups", [{ name: "hits", value: cache.hits, kind: "decode" }, { name: "misses", value: cache.misses, kind: "idle" }]),
    el("p", { class: "small" }, `${short(cache.tokens_reused)} tokens reused`),
    el("p", { class: "small" }, `${bytes(cache.bytes)} of at most ${bytes(cache.budget_bytes)}`)];
}
