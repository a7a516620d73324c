/**
 * Drives Chromium for tests in Python: one JSON object a line on stdin, and an answer to each on stdout.
 *
 * `{"do": "click", "args": ["page", "#send"]}` gives `{"value": ...}` or `{"error": "..."}`; `COMMANDS` lists what there is.
 * node driver.mjs PACKAGE CHROMIUM: playwright-core is one of those of PACKAGE, a package.json.
 */

import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [modules, executablePath] = process.argv.slice(2);
const { chromium } = createRequire(modules)("playwright-core");

const PATIENCE_MS = 60_000;
/** The most of any command: what a page evaluates has no limit of Playwright's. */
const LONGEST_MS = 2 * PATIENCE_MS;
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const contexts = new Map(); // by name: a person's browser, with what it keeps
const pages = new Map(); // by name

const COMMANDS = {
  /** A browser with storage of its own, in which pages have these settings at first; `options` are Playwright's. */
  async context(name, settings, options) {
    const context = await browser.newContext({ viewport: { width: 390, height: 844 }, hasTouch: true, ...options });
    context.setDefaultTimeout(PATIENCE_MS);
    await context.addInitScript((first) => (localStorage.settings ??= first), JSON.stringify(settings));
    contexts.set(name, { context, requests: [] });
    context.on("request", (request) => contexts.get(name).requests.push(request.url()));
  },
  async open(name, contextName) {
    const page = await contexts.get(contextName).context.newPage();
    const said = [];
    page.on("console", (message) => said.push(`${message.type()}: ${message.text()}`));
    page.on("pageerror", (error) => said.push(`uncaught: ${error.message}`));
    pages.set(name, { page, said });
  },
  /** Close a context with its pages and workers, which go on computing otherwise. */
  async leave(name) {
    await contexts.get(name).context.close();
  },
  /** URLs that a context has asked for since the last call. */
  async requests(name) {
    return contexts.get(name).requests.splice(0);
  },
  async offline(name, offline) {
    await contexts.get(name).context.setOffline(offline);
  },
  /** What a page has written to its console since the last call. */
  async said(name) {
    return pages.get(name).said.splice(0);
  },
  /** End a page's process, as a phone does that is short of memory. */
  async kill(name) {
    const { page } = pages.get(name);
    const session = await page.context().newCDPSession(page);
    const crashed = page.waitForEvent("crash");
    await Promise.race([session.send("Page.crash").catch(() => undefined), crashed]);
    await crashed;
    await page.close();
  },
  /** Let the pages of an origin store this many bytes. */
  async quota(name, url, quotaSize) {
    const session = await pages.get(name).page.context().newCDPSession(pages.get(name).page);
    await session.send("Storage.overrideQuotaForOrigin", { origin: new URL(url).origin, quotaSize });
  },
  async goto(name, url) {
    await pages.get(name).page.goto(url);
  },
  async reload(name) {
    await pages.get(name).page.reload();
  },
  async close(name) {
    await pages.get(name).page.close();
  },
  async click(name, selector) {
    await pages.get(name).page.locator(selector).click();
  },
  async fill(name, selector, text) {
    await pages.get(name).page.locator(selector).fill(text);
  },
  async press(name, key) {
    await pages.get(name).page.keyboard.press(key);
  },
  async select(name, selector, value) {
    await pages.get(name).page.locator(selector).selectOption(value);
  },
  /** Wait for an element that is seen, with this text in it. */
  async wait(name, selector, text) {
    const all = pages.get(name).page.locator(selector);
    await (text === undefined ? all : all.filter({ hasText: text })).first().waitFor();
  },
  /** Wait for an element with this text, whether it is seen or not. */
  async wait_hidden(name, selector, text) {
    await pages.get(name).page.locator(selector).filter({ hasText: text }).waitFor({ state: "attached" });
  },
  /** Wait until no such element is seen. */
  async gone(name, selector) {
    await pages.get(name).page.locator(selector).first().waitFor({ state: "hidden" });
  },
  async texts(name, selector) {
    return pages.get(name).page.locator(selector).allTextContents();
  },
  async evaluate(name, expression) {
    return pages.get(name).page.evaluate(expression);
  },
  async resize(name, width, height) {
    await pages.get(name).page.setViewportSize({ width, height });
  },
  async screenshot(name, path) {
    await pages.get(name).page.screenshot({ path });
  },
  /** The tree that screen readers are given. */
  async aria(name) {
    return pages.get(name).page.locator("body").ariaSnapshot();
  },
};

/** Fail after the most that a command may take. */
function late(command) {
  const text = `${command} took longer than ${LONGEST_MS / 1000} s`;
  return new Promise((_, reject) => setTimeout(() => reject(new Error(text)), LONGEST_MS).unref());
}

for await (const line of createInterface({ input: process.stdin })) {
  const { do: command, args } = JSON.parse(line);
  try {
    const value = await Promise.race([COMMANDS[command](...args), late(command)]);
    process.stdout.write(`${JSON.stringify({ value: value ?? null })}\n`);
  } catch (error) {
    process.stdout.write(`${JSON.stringify({ error: String(error) })}\n`);
  }
}
await browser.close();
