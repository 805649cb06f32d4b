// The page in a real browser: node look.mjs CHROMIUM FOLDER URL URL_WITH_A_KEY URL_WITH_MODELS KEY
//
// Does with it what a person does, and looks: at what is there, at every message of the console, at every request, and
// with axe-core at what it is for those who do not see it. Each state is left in FOLDER as a picture.
// tests/web/test_page.py serves the model, whose tokens are given by the seed.

import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";

const [browserPath, folder, url, lockedUrl, severalUrl, key] = process.argv.slice(2);
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const DESKTOP = { width: 1280, height: 800 }, PHONE = { width: 360, height: 740 };
const TOOLS = JSON.stringify([{ type: "function", function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } } } } }]);
const SEEDS = { markdown: "1", call: "2", result: "3", long: "4", short: "5" };

const MIXED = `# A\n\ntext **bold\nand** \`code\` [l](https://a.test/b)\n- one\n  1. two\n\n     three\n- four\n\n### B\n> quote\n> - in it\n\n| a | b |\n|---|:-:|\n| 1 | *2* |\n\n~~~js\nlet a = 1;\n\nlet b;\n~~~\nend\n\n***\nlast`;

const told = { errors: [], foreign: [], violations: [], stop_ms: 0, took: {} };
const began = performance.now();
const profile = mkdtempSync(join(tmpdir(), "page-"));
const context = await chromium.launchPersistentContext(profile, {
  executablePath: browserPath, args: FLAGS, viewport: DESKTOP, colorScheme: "light", acceptDownloads: true,
  permissions: ["clipboard-read", "clipboard-write"],
});

function listen(page, isExpected = () => false) {
  page.setDefaultTimeout(30000);
  page.on("console", (said) => { if (["error", "warning"].includes(said.type()) && !isExpected(said.text())) told.errors.push(said.text()); });
  page.on("pageerror", (fault) => told.errors.push(String(fault)));
  page.on("request", (request) => {
    if (![url, lockedUrl, severalUrl].includes(new URL(request.url()).origin) && !request.url().startsWith("blob:")) told.foreign.push(request.url());
  });
  return page;
}

async function look(page, name) {
  await page.screenshot({ path: join(folder, `${name}.png`) });
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  for (const { id, help, nodes } of violations) told.violations.push({ state: name, id, help, where: nodes.map((node) => `${node.target} ${node.any[0]?.message ?? ""}`) });
  const { scrollWidth, clientWidth } = await page.evaluate(({ scrollWidth, clientWidth } = document.documentElement) => ({ scrollWidth, clientWidth }));
  assert.ok(scrollWidth <= clientWidth, `${name} is ${scrollWidth - clientWidth} pixels too wide`);
}

const set = async (page, fields) => {
  await page.click("#settings-button");
  for (const [id, value] of Object.entries(fields)) await page.fill(id, value);
  await page.click("#settings button.primary");
};
const seeded = (page, seed) => set(page, { "#set-seed": seed });
const ended = (page) => page.waitForSelector("#stop-button", { state: "hidden" });
const send = async (page, text) => {
  await page.fill("#message", text);
  await page.press("#message", "Enter");
};
const turns = (page) => page.locator(".turn:not(.results)").count();

async function chat(page) {
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("model").textContent === "tiny");
  assert.equal(await page.evaluate(() => document.activeElement.id), "message");
  await look(page, "chat-empty");
  await page.click("#settings-button");
  await page.fill("#tools", "[{");
  await page.click("#settings button.primary");
  assert.match(await page.textContent("#tools-error"), /Not JSON/);
  await page.fill("#system", "Be brief.");
  await look(page, "settings");
  await page.keyboard.press("Escape");
  await set(page, { "#system": "Be brief.", "#set-temperature": "0.5", "#set-seed": SEEDS.markdown, "#tools": TOOLS });
  assert.match(await page.textContent("#settings-summary"), /system prompt · temperature 0.5 · seed 1 · tools: get_weather/);
}

async function markdown(page) {
  await page.focus("#message");
  await page.keyboard.type("Show me");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("everything");
  await page.keyboard.press("Enter");
  const lengths = new Set();
  while (await page.isVisible("#stop-button")) lengths.add(await page.evaluate(() => document.querySelector(".turn.assistant .text")?.textContent.length ?? 0));
  assert.ok(lengths.size > 2, `the answer came in ${lengths.size} sizes: it was not streamed`);
  assert.equal(await page.textContent(".turn.user .text"), "Show me\neverything");
  const text = page.locator(".turn.assistant .text");
  assert.equal(await text.locator("img, script, iframe").count(), 0);
  assert.match(await text.textContent(), /<img src=x onerror=alert\(1\)>/);
  assert.deepEqual(await text.locator("a").evaluateAll((links) => links.map((link) => link.getAttribute("href"))), ["https://example.org/a"]);
  for (const tag of ["h3", "strong", "em", "del", "ul ul", "ol", "blockquote", "table", "pre code", "hr"]) assert.ok(await text.locator(tag).count(), `no ${tag}`);
  assert.match(await page.textContent(".turn.assistant .stats"), /\d+ tokens · [\d.]+ tok\/s · prompt \d+/);
  assert.ok(!(await page.locator(".reasoning").evaluate((node) => node.open)), "reasoning is folded");
  await text.locator(".code button").first().click();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "def add(a, b):\n    return a + b");
  assert.match(await page.textContent("#announcer"), /^Answer: /);
  await page.click(".reasoning summary");
  await page.evaluate(() => document.getElementById("turns").scrollTo(0, 0));
  await look(page, "chat-markdown");
}

// What a model might write to hold the page up or to get into it; and growing text is the same as whole text.
async function hostile(page) {
  const told = await page.evaluate(async (whole) => {
    const { Rendered } = await import("/web/markdown.js");
    const shown = (texts) => {
      const root = document.createElement("div"), rendered = new Rendered(root);
      for (const text of texts) rendered.update(text);
      return root;
    };
    const parts = ["[", "![", "[a](", "*a ", "**a", "_a_", "`", "``a", "> ", "- ", "  - a\n", "|", "|a|\n", "~~", "\\", "<http://", "# a\n", "1. ", "```\n"];
    const slow = parts.filter((part) => {
      const began = performance.now();
      shown([part.repeat(8000)]);
      return performance.now() - began > 3000;
    });
    const prefixes = Array.from({ length: whole.length }, (_, i) => whole.slice(0, i + 1));
    const links = ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", "data:text/html,x", "vbscript:x", "file:///etc/passwd", "//evil.test", "/slots"];
    const made = shown(links.map((link) => `[a](${link}) <${link}> ![b](${link})`)).querySelectorAll("a, img").length;
    return { slow, same: shown(prefixes).isEqualNode(shown([whole])), made };
  }, MIXED);
  assert.deepEqual(told, { slow: [], same: true, made: 0 });
}

async function calls(page) {
  await seeded(page, SEEDS.call);
  await send(page, "What is the weather in Paris?");
  await ended(page);
  const made = page.locator(".turn.assistant .calls").last();
  assert.match(await made.textContent(), /get_weather/);
  assert.deepEqual(JSON.parse(await made.locator("code").textContent()), { city: "Paris" });
  await look(page, "chat-tools");
  await seeded(page, SEEDS.result);
  await page.fill(".results textarea", "18 degrees, rain");
  await page.click(".results button.primary");
  await ended(page);
  assert.equal(await page.textContent(".turn.tool .text"), "18 degrees, rain");
  assert.match(await page.locator(".turn.assistant .text").last().textContent(), /umbrella/);
}

async function stop(page) {
  await seeded(page, SEEDS.long);
  for (const way of ["click", "Escape"]) {
    await send(page, "Count");
    await page.waitForFunction(() => [...document.querySelectorAll(".turn.assistant .text")].at(-1).textContent.length > 20);
    if (way === "click") await look(page, "chat-streaming");
    assert.ok(await page.isVisible("#stop-button"), "it had ended by itself");
    const at = performance.now();
    if (way === "click") await page.click("#stop-button");
    else await page.keyboard.press("Escape");
    await ended(page);
    await page.waitForFunction(async () => !(await (await fetch("/slots")).json()).some((slot) => slot.is_processing));
    told.stop_ms = Math.max(told.stop_ms, Math.round(performance.now() - at));
    assert.match(await page.locator(".stats").last().textContent(), /stopped/);
  }
  assert.ok(told.stop_ms < 1000, `it stopped after ${told.stop_ms} ms`);
}

async function again(page) {
  await seeded(page, SEEDS.short);
  await page.locator(".turn.user").nth(1).getByRole("button", { name: "Edit" }).click();
  await page.fill(".edit textarea", "Say hello");
  await page.keyboard.press("Enter");
  await ended(page);
  assert.equal(await turns(page), 4);
  await page.locator(".turn.assistant").last().getByRole("button", { name: "Regenerate" }).click();
  await ended(page);
  assert.equal(await turns(page), 4);
  assert.equal(await page.locator(".turn.assistant .text").last().textContent(), "Hello.");
}

async function kept(page) {
  await page.getByRole("button", { name: "Rename" }).click();
  await page.fill("#ask-text", "A name of its own");
  await page.click("#ask-yes");
  await page.waitForFunction(() => document.querySelector(".choose").textContent === "A name of its own");
  const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Export as JSON" }).click()]);
  const exported = JSON.parse(readFileSync(await file.path(), "utf8"));
  assert.deepEqual([exported.title, exported.messages.length, exported.messages[0].role], ["A name of its own", 5, "system"]);
  await page.click("#new-button");
  await send(page, "Another");
  await ended(page);
  await page.reload();
  assert.deepEqual(await page.locator(".choose").allTextContents(), ["Another", "A name of its own"]);
  await page.locator(".choose").first().click();
  await page.getByRole("button", { name: "Delete" }).click();
  await look(page, "chat-delete");
  await page.click("#ask-yes");
  await page.waitForFunction(() => document.querySelectorAll(".choose").length === 1);
  assert.equal(await turns(page), 4);
}

async function load() {
  const asked = Array.from({ length: 6 }, (_, i) => fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    body: JSON.stringify({ messages: [{ role: "user", content: `${i} ${"word ".repeat(60 + 30 * i)}` }], seed: 4, max_tokens: 150 + 40 * i }),
  }).then((answer) => answer.json()));
  return Promise.all(asked);
}

async function engine(page) {
  await page.click('.views a[href="#engine"]');
  await page.waitForSelector("#connection.good");
  const answers = load();
  await page.waitForFunction(() => document.querySelectorAll(".timeline li").length >= 6 && document.querySelector("#queue li"));
  await page.waitForFunction(() => document.querySelector(".timeline .fill.decode") && /[1-9]/.test(document.querySelectorAll("#tiles strong")[2].textContent));
  assert.match(await page.locator("#tiles dd").first().textContent(), /^2 of 2/);
  await page.waitForFunction(() => document.querySelector("#timeline").textContent.match(/· length/g)?.length > 1);
  await look(page, "engine-load");
  await page.locator("section", { has: page.locator("#timeline") }).screenshot({ path: join(folder, "engine-timeline.png") });
  await page.setViewportSize({ width: 1000, height: 1600 });
  await page.screenshot({ path: join(folder, "engine-whole.png") });
  await page.setViewportSize(DESKTOP);
  for (const answer of await answers) assert.equal(answer.choices[0].finish_reason, "length");
  await page.waitForFunction(() => document.querySelectorAll("#tiles dd")[0].textContent.startsWith("0 of 2"));
  assert.ok(await page.locator("#ttft .histogram tr").count() > 1);
  assert.match(await page.locator("#rates svg").first().getAttribute("aria-label"), /at most [1-9]/);
  assert.match(await page.locator(".timeline li").first().textContent(), /waited .* prompt tokens.* tokens in .* length/);
}

async function states(page, name, viewport, scheme) {
  await page.setViewportSize(viewport);
  await page.emulateMedia({ colorScheme: scheme, reducedMotion: "reduce" });
  for (const [view, hash] of [["engine", "#engine"], ["chat", "#chat"]]) {
    await page.evaluate((to) => { location.hash = to; }, hash);
    if (view === "engine") await page.waitForSelector("#connection.good");
    await page.evaluate(() => document.getElementById("turns").scrollTo(0, 0));
    await look(page, `${view}-${name}`);
  }
  await page.click("#settings-button");
  await look(page, `settings-${name}`);
  await page.keyboard.press("Escape");
  if (viewport !== PHONE) return;
  await page.click("#list-button");
  await look(page, `list-${name}`);
  await page.keyboard.press("Escape");
  assert.equal(await page.evaluate(() => document.activeElement.id), "list-button");
}

async function keyboard(page) {
  await page.setViewportSize(DESKTOP);
  await page.reload();
  await page.waitForSelector(".choose");
  await page.focus("#skip");
  const reached = ["skip"];
  for (let i = 0; i < 40 && reached.at(-1) !== "send-button"; i += 1) {
    await page.keyboard.press("Tab");
    reached.push(await page.evaluate(() => {
      const at = document.activeElement, { outlineStyle } = getComputedStyle(at);
      return outlineStyle === "none" ? `no outline: ${at.outerHTML.slice(0, 80)}` : at.id || at.textContent;
    }));
  }
  const order = ["skip", "Chat", "Engine", "theme-button", "new-button", "A name of its own", "Rename", "turns", "message", "settings-button", "send-button"];
  assert.deepEqual(reached.filter((one) => order.includes(one) || one.startsWith("no outline")), order);
  await page.click("#theme-button");
  await page.click("#theme-button");
  assert.equal(await page.evaluate(() => getComputedStyle(document.body).colorScheme), "dark");
  await page.click("#theme-button");
}

async function locked() {
  const page = listen(await context.newPage(), (text) => text.includes("401"));
  await page.goto(lockedUrl);
  await page.waitForSelector("#key-dialog[open]");
  await look(page, "key");
  await page.fill("#key", key);
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.getElementById("model").textContent === "tiny");
  await send(page, "Hello");
  await ended(page);
  assert.equal(await page.locator(".turn .error:visible").count(), 0);
  await page.click('.views a[href="#engine"]');
  await page.waitForSelector("#connection.good");
  await page.setViewportSize(PHONE);
  await page.click('.views a[href="#chat"]');
  await look(page, "key-phone");
  await page.close();
}

async function several() {
  const page = listen(await context.newPage());
  await page.setViewportSize(DESKTOP);
  await page.goto(severalUrl);
  await page.waitForSelector("#models:visible");
  assert.deepEqual(await page.locator("#models option").allTextContents(), ["tiny", "other"]);
  await page.selectOption("#models", "other");
  await send(page, "Hello");
  await ended(page);
  assert.equal(await page.locator(".turn .error:visible").count(), 0);
  await page.click('.views a[href="#engine"]');
  await page.waitForSelector("#connection.good");
  await look(page, "several");
  const { data } = await page.evaluate(async () => (await fetch("/v1/models")).json());
  assert.deepEqual(data.map(({ id, status }) => [id, status.value]), [["tiny", "unloaded"], ["other", "loaded"]]);
  await page.setViewportSize(PHONE);
  await look(page, "several-phone");
  await page.reload();
  await page.waitForSelector("#models:visible");
  assert.equal(await page.inputValue("#models"), "other");
  await page.close();
}

try {
  const page = listen(context.pages()[0]);
  const steps = {
    chat, markdown, hostile, calls, stop, again, kept, engine,
    dark: () => states(page, "dark", DESKTOP, "dark"),
    phone: () => states(page, "phone", PHONE, "light"),
    phoneDark: () => states(page, "phone-dark", PHONE, "dark"),
    keyboard, locked, several,
  };
  for (const [name, step] of Object.entries(steps)) {
    const at = performance.now();
    await step(page);
    told.took[name] = Math.round(performance.now() - at);
  }
} catch (fault) {
  await context.pages().at(-1).screenshot({ path: join(folder, "fault.png") });
  throw fault;
} finally {
  await context.close();
  rmSync(profile, { recursive: true, force: true });
  told.seconds = Math.round((performance.now() - began) / 100) / 10;
  console.log(JSON.stringify(told, null, 1));
}
