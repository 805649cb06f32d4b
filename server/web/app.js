// The page: which view is shown, the theme, the key, and what is served.

import { json, keepKey, theKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Engine } from "./engine.js";
import { about, learnModels } from "./models.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { fresh, keep, listed, load } from "./store.js";

const THEME = "mlxcel.theme", THEMES = ["system", "light", "dark"];
const RETRY_MS = 1500, LOOK_MS = 3000;

let learning;
let conversation = load(listed()[0]?.id) ?? fresh();
const current = () => conversation;

const chat = new Chat(() => sidebar.refresh());
const sidebar = new Sidebar({ open, gone: (id) => chat.drop(id), current });
const settings = new Settings(current, () => {
  settings.refresh();
  if (conversation.turns.length) keep(conversation);
});
const engine = new Engine();

function open(id) {
  const running = chat.running?.conversation;
  conversation = running && running.id === id ? running : (id && load(id)) || fresh();
  chat.show(conversation);
  sidebar.refresh();
  settings.refresh();
  location.hash = "#chat";
  byId("message").focus();
}

// Shows the view that the address names, the chat where it names none.
function route() {
  const isEngine = location.hash === "#engine";
  for (const [id, isShown] of [["chat-view", !isEngine], ["list", !isEngine], ["list-button", !isEngine], ["engine-view", isEngine]]) {
    byId(id).hidden = !isShown;
  }
  document.title = isEngine ? "Engine · mlxcel" : "mlxcel";
  byId("skip").textContent = isEngine ? "Skip to the engine" : "Skip to the conversation";
  for (const link of document.querySelectorAll(".views a")) {
    if ((link.hash === "#engine") === isEngine) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  watch();
}

// The engine is watched only while somebody can see it.
function watch() {
  if (location.hash === "#engine" && !document.hidden) engine.start();
  else engine.stop();
}

function setTheme(theme) {
  const button = byId("theme-button");
  document.documentElement.dataset.theme = theme;
  button.setAttribute("aria-label", `Theme: ${theme}`);
  button.title = `Theme: ${theme}`;
  localStorage.setItem(THEME, theme);
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
}

function askForKey() {
  const dialog = byId("key-dialog");
  byId("key-button").hidden = false;
  if (dialog.open) return;
  byId("key-why").textContent = theKey()
    ? "The server does not take this key. It is kept until this tab is closed."
    : "This server asks for a key. It is kept until this tab is closed.";
  byId("key").value = theKey();
  dialog.showModal();
}

function takeKey() {
  keepKey(byId("key").value.trim());
  learn();
  watch();
}

// Another model is looked at from here on.
function turnTo() {
  engine.stop();
  watch();
  learn();
}

// Learns what is served; asks again while the model loads, or until somebody has one of several loaded.
async function learn() {
  clearTimeout(learning);
  try {
    if (!(await learnModels(turnTo))) {
      learning = setTimeout(learn, LOOK_MS);
      return;
    }
    const props = await json(about("/props"));
    byId("model").textContent = props.model_alias;
    byId("model").title = props.model_alias;
    settings.serverSays(props.default_generation_settings.params);
    engine.serves(props);
  } catch (fault) {
    if (fault.status === 401) return;
    byId("model").textContent = fault.status === 503 ? "the model is being loaded" : "the server cannot be reached";
    learning = setTimeout(learn, RETRY_MS);
  }
}

setTheme(THEMES.find((theme) => theme === localStorage.getItem(THEME)) ?? "system");
byId("theme-button").onclick = nextTheme;
byId("key-button").onclick = askForKey;
byId("key-cancel").onclick = () => byId("key-dialog").close();
byId("key-dialog").querySelector("form").addEventListener("submit", takeKey);
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  (location.hash === "#engine" ? byId("engine-view") : byId("message")).focus();
});
document.addEventListener("key-needed", askForKey);
document.addEventListener("visibilitychange", watch);
addEventListener("hashchange", route);
if (theKey()) byId("key-button").hidden = false;
chat.show(conversation);
sidebar.refresh();
settings.refresh();
route();
learn();
if (location.hash !== "#engine") byId("message").focus();
