// Search over the sections of all pages, in the page itself: the index is a script beside it, loaded at the first use.
"use strict";

const MOST = 20;
const AROUND = 70; // characters shown on each side of what was found

const root = document.body.dataset.root;
const asked = document.getElementById("asked");
const answer = document.getElementById("answer");
const found = document.getElementById("found");
let loading = null;

function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `${root}search-index.js`;
    script.onload = () => resolve(globalThis.sections);
    script.onerror = reject;
    document.head.append(script);
  });
  return loading;
}

function score(words, [, , title, heading, text]) {
  const places = [[heading.toLowerCase(), 20], [title.toLowerCase(), 8], [text.toLowerCase(), 1]];
  let sum = 0;
  for (const word of words) {
    const worth = places.reduce((most, [place, weight]) => most + (place.includes(word) ? weight : 0), 0);
    if (!worth) return 0;
    sum += worth;
  }
  return sum;
}

function excerpt(words, text) {
  const lower = text.toLowerCase();
  const at = Math.max(0, Math.min(...words.map((word) => lower.indexOf(word)).filter((place) => place >= 0), text.length));
  const start = Math.max(0, (at === text.length ? 0 : at) - AROUND);
  return `${start ? "… " : ""}${text.slice(start, start + 2 * AROUND)}${start + 2 * AROUND < text.length ? " …" : ""}`;
}

function entry(words, [file, anchor, title, heading, text]) {
  const item = document.createElement("li");
  const link = document.createElement("a");
  link.href = `${root}${file}#${anchor}`;
  link.textContent = heading === title ? title : `${title}: ${heading}`;
  link.addEventListener("click", close);
  const said = document.createElement("span");
  said.textContent = excerpt(words, text);
  item.append(link, said);
  return item;
}

function close() {
  answer.hidden = true;
}

async function search() {
  const words = asked.value.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return close();
  const sections = await load();
  const hits = sections.map((section) => [score(words, section), section]).filter(([worth]) => worth);
  hits.sort(([one], [other]) => other - one);
  document.getElementById("count").textContent = hits.length ? `${hits.length} sections` : "Nothing was found.";
  found.replaceChildren(...hits.slice(0, MOST).map(([, section]) => entry(words, section)));
  answer.hidden = false;
}

document.getElementById("search").hidden = false;
asked.addEventListener("input", search);
asked.addEventListener("focus", load);
asked.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !answer.hidden) found.querySelector("a")?.click();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") close();
  if (event.key === "/" && document.activeElement !== asked) {
    event.preventDefault();
    asked.focus();
  }
});
document.addEventListener("click", (event) => {
  if (!document.getElementById("search").contains(event.target)) close();
});
const query = new URLSearchParams(location.search).get("q");
if (query) {
  asked.value = query;
  search();
}
