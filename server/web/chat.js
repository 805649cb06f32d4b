// The conversation that is shown: asked on, stopped, edited, begun again. One answer runs at a time.

import { ApiError, ask, frames } from "./api.js";
import { button, byId, el } from "./dom.js";
import { chosen } from "./models.js";
import { samplingOf } from "./settings.js";
import { keep, messages } from "./store.js";
import { resultsForm, TurnView } from "./turn.js";

const REDRAW_MS = 60;
const MAX_READ_OUT = 600; // characters of an answer that a screen reader is given unasked
const SUGGESTIONS = [
  "Explain how a prefix cache speeds up a conversation.",
  "Write a Python function that merges two sorted lists.",
  "Compare three ways to brew coffee, as a table.",
];

const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", calls: [] });

// Takes what one chunk of the stream says into the turn.
function take(turn, chunk) {
  if (chunk.error) throw new ApiError(chunk.error.message, 0);
  if (chunk.usage) turn.stats = { ...turn.stats, usage: chunk.usage, timings: chunk.timings };
  const [choice] = chunk.choices ?? [];
  if (!choice) return;
  const { delta } = choice;
  turn.content += delta.content ?? "";
  turn.reasoning += delta.reasoning_content ?? "";
  for (const call of delta.tool_calls ?? []) {
    turn.calls[call.index] ??= { id: call.id, name: call.function.name, arguments: "" };
    turn.calls[call.index].arguments += call.function.arguments ?? "";
  }
  turn.finish = choice.finish_reason ?? turn.finish;
}

export class Chat {
  // `changed` is called when a conversation was kept.
  constructor(changed) {
    this.changed = changed;
    this.running = null;
    this.turns = byId("turns");
    this.input = byId("message");
    this.#listen();
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop-button").onclick = () => this.stop();
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    this.input.addEventListener("input", () => this.#fit());
    byId("chat-view").addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
    addEventListener("pagehide", () => { if (this.running) keep(this.running.conversation); });
  }

  // Shows `conversation`; an answer that runs elsewhere runs on.
  show(conversation) {
    this.conversation = conversation;
    this.#rebuild();
    this.turns.scrollTop = this.turns.scrollHeight;
    this.#refresh();
  }

  stop() {
    this.running?.controller.abort();
  }

  // Ends what runs in a conversation that is no more.
  drop(id) {
    if (this.running?.conversation.id !== id) return;
    this.running.isDropped = true;
    this.stop();
  }

  #send() {
    const text = this.input.value.trim();
    if (!text || this.running) return;
    this.input.value = "";
    this.#fit();
    this.#ask({ role: "user", content: text });
  }

  // Asks on from what there is and `turns` more; a dropped tail is gone for good.
  #ask(...turns) {
    const conversation = this.conversation, turn = newAnswer();
    conversation.turns.push(...turns, turn);
    this.running = { conversation, turn, controller: new AbortController(), progress: "", started: performance.now() };
    this.#rebuild();
    this.turns.scrollTop = this.turns.scrollHeight;
    this.#keep(conversation);
    this.#refresh();
    this.#run(this.running);
  }

  #again(index) {
    this.conversation.turns.splice(index);
    this.#ask();
  }

  async #run(running) {
    const { conversation, turn, controller } = running, { tools } = conversation.settings;
    byId("announcer").textContent = "The answer is being written";
    try {
      const body = {
        model: chosen(), messages: messages(conversation), stream: true, stream_options: { include_usage: true },
        ...samplingOf(conversation.settings), ...(tools ? { tools: JSON.parse(tools) } : {}),
      };
      const response = await ask("/v1/chat/completions", { body, signal: controller.signal });
      for await (const { comment, data } of frames(response)) {
        if (data === "[DONE]") break;
        if (data) this.#took(running, JSON.parse(data));
        else if (comment?.startsWith("prefill ")) running.progress = read(comment);
        this.#redrawSoon(running);
      }
      if (!turn.finish) turn.error = "The answer broke off.";
    } catch (fault) {
      if (fault.name === "AbortError") turn.finish = "stopped";
      else turn.error = fault instanceof ApiError ? fault.message : `The answer could not be read: ${fault.message}`;
    }
    this.#ended(running);
  }

  #took(running, chunk) {
    const { turn } = running;
    take(turn, chunk);
    if (!turn.stats?.firstMs && (turn.content || turn.reasoning || turn.calls.length)) {
      turn.stats = { ...turn.stats, firstMs: Math.round(performance.now() - running.started) };
    }
  }

  #redrawSoon(running) {
    running.timer ??= setTimeout(() => {
      running.timer = null;
      this.#redraw(running);
    }, REDRAW_MS);
  }

  #redraw(running) {
    if (running.conversation !== this.conversation) return;
    const { turns } = this, follows = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 60;
    this.views.at(-1).update({ runs: this.running === running, progress: running.progress });
    if (follows) turns.scrollTop = turns.scrollHeight;
  }

  #ended(running) {
    clearTimeout(running.timer);
    const { turn, conversation } = running;
    this.running = null;
    if (!running.isDropped) this.#keep(conversation);
    this.#redraw(running);
    if (conversation === this.conversation) this.#offerResults();
    this.#refresh();
    const said = turn.error ? `The answer failed: ${turn.error}` : turn.finish === "stopped" ? "Stopped" : `Answer: ${spoken(turn)}`;
    byId("announcer").textContent = said;
  }

  #keep(conversation) {
    const isKept = keep(conversation);
    byId("chat-error").textContent = isKept ? "" : "This browser has no room for the conversation; export it.";
    byId("chat-error").hidden = isKept;
    this.changed();
  }

  #rebuild() {
    const { turns } = this.conversation;
    this.views = turns.map((turn, i) => new TurnView(turn, i, {
      edit: turn.role === "user" ? (text) => this.#edited(i, text) : null,
      again: turn.role === "assistant" ? () => { if (!this.running) this.#again(i); } : null,
    }));
    this.turns.replaceChildren(...(this.views.length ? this.views.map((view) => view.node) : [this.#welcome()]));
    if (this.running?.conversation === this.conversation) this.#redraw(this.running);
    else this.#offerResults();
  }

  #edited(index, text) {
    if (this.running) return;
    this.conversation.turns.splice(index);
    this.#ask({ role: "user", content: text });
    this.input.focus();
  }

  #welcome() {
    const suggested = SUGGESTIONS.map((text) => button(text, () => {
      this.input.value = text;
      this.#fit();
      this.input.focus();
    }, { class: "suggestion" }));
    return el("div", { class: "welcome" }, el("h2", {}, "What would you like to know?"),
      el("p", { class: "muted" }, "The model runs on this server; conversations are kept in this browser alone."), ...suggested);
  }

  #offerResults() {
    const last = this.conversation.turns.at(-1);
    if (last?.role !== "assistant" || !last.calls.length || last.finish !== "tool_calls") return;
    const form = resultsForm(last.calls, (texts) => {
      if (!this.running) this.#ask(...texts.map((content, i) => ({ role: "tool", call: last.calls[i].id, content })));
    });
    this.turns.append(form);
    this.turns.scrollTop = this.turns.scrollHeight;
  }

  #refresh() {
    const runs = Boolean(this.running), stop = byId("stop-button"), hadFocus = document.activeElement === stop;
    stop.hidden = !runs;
    this.turns.classList.toggle("busy", runs);
    byId("send-button").hidden = runs;
    if (!runs && hadFocus) this.input.focus();
  }

  #fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 240)}px`;
  }
}

// "prefill 3584/12000" for people.
function read(comment) {
  const [done, total] = comment.slice(8).split("/").map(Number);
  return `Reading the prompt: ${done} of ${total} tokens`;
}

// What a screen reader is told of an answer that has ended.
function spoken(turn) {
  const calls = turn.calls.map((call) => `Calls ${call.name}.`).join(" ");
  const text = `${turn.content} ${calls}`.trim();
  return text.length > MAX_READ_OUT ? `${text.slice(0, MAX_READ_OUT)} … and more` : text;
}
