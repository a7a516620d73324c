#!/usr/bin/env node
// Time a drafting step of a bundle's graphs in a headless Chromium, on WebAssembly with one thread.
//
//   node bench.mjs --bundle DIR --ort FOLDER
//
// DIR is what `moa-export --target web` wrote, FOLDER holds ort.wasm.bundle.min.mjs (the folder `dist` of onnxruntime-web).
// A context of N means N cached tokens and N memory rows, all random; every new token is a query. Times are milliseconds.
import { spawn, spawnSync } from "node:child_process";
import { createReadStream } from "node:fs";
import { mkdtemp, readFile, rm, stat } from "node:fs/promises";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { extname, join, normalize, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const BROWSERS = ["chromium", "chromium-browser", "google-chrome"];
const ENGINE = "ort.wasm.bundle.min.mjs";
const TYPES = { ".html": "text/html", ".mjs": "text/javascript", ".wasm": "application/wasm" };
const PAGE = '<!doctype html><meta charset="utf-8"><script type="module" src="/bench_worker.mjs"></script>';
const CONTEXTS = [16, 128, 512];
const WARM_UP = 3;
const SILENT_MS = 300_000;

class Refused extends Error {}

function readOptions() {
  try {
    return parseArgs({
      options: {
        bundle: { type: "string" },
        ort: { type: "string" },
        browser: { type: "string" },
        contexts: { type: "string" }, // 16, 128 and 512 by default, as far as the target holds them
        tokens: { type: "string", default: "1,8" },
        repeats: { type: "string", default: "30" },
        writer: { type: "boolean", default: false },
        json: { type: "boolean", default: false },
      },
    });
  } catch (error) {
    console.error(`bench: error: ${error.message}`);
    process.exit(2);
  }
}

/** Check the options. Throws Refused. */
async function settingsOf({ bundle, ort, browser, contexts, tokens, repeats, writer }) {
  if (!bundle || !ort) throw new Refused("--bundle DIR and --ort FOLDER are needed");
  const manifest = await readJson(join(bundle, "manifest.json"));
  const graphs = { drafter: manifest.targets?.web };
  if (!graphs.drafter) throw new Refused(`${bundle} has no graph for browsers: export it with --target web`);
  if (writer && manifest.web_writer) graphs.writer = manifest.web_writer;
  if (!(await isFile(join(ort, ENGINE)))) throw new Refused(`there is no ${ENGINE} in ${ort}`);
  const sizes = { tokens: numbersOf("tokens", tokens, 1, 64), repeats: numbersOf("repeats", repeats, 1, 10_000)[0] };
  const most = manifest.max_context - Math.max(...sizes.tokens);
  const asked = contexts ? numbersOf("contexts", contexts, 1, most) : CONTEXTS.filter((each) => each <= most);
  return { bundle, ort, manifest, graphs, browser: browserOf(browser), contexts: asked, ...sizes };
}

function numbersOf(name, text, least, most) {
  const numbers = text.split(",").map(Number);
  if (!numbers.every((each) => Number.isInteger(each) && least <= each && each <= most))
    throw new Refused(`--${name} must be whole numbers from ${least} to ${most} with commas between them, not ${text}`);
  return numbers;
}

function browserOf(named) {
  const found = (named ? [named] : BROWSERS).find((each) => spawnSync(each, ["--version"]).status === 0);
  if (!found) throw new Refused(`${named ?? "Chromium"} is not installed; name a Chromium with --browser`);
  return found;
}

/** Time each graph at each size. */
async function measure(settings) {
  const { bundle, manifest, graphs, contexts, tokens, repeats } = settings;
  const page = await openPage(settings);
  try {
    const result = { target: manifest.target, repeats, graphs: {} };
    for (const [name, { file, details }] of Object.entries(graphs)) {
      const { load_ms, ...engine } = await page.ask({ do: "load", graph: `/bundle/${file}`, session: details?.session ?? {} });
      const steps = [];
      for (const context of contexts)
        for (const count of tokens) {
          await page.ask({ do: "prepare", tokens: count, context, vocab: manifest.vocab_size });
          const { ms } = await page.ask({ do: "time", repeats, warmUp: WARM_UP });
          steps.push({ context, tokens: count, ms: percentile(ms, 0.5), least_ms: percentile(ms, 0), p95_ms: percentile(ms, 0.95) });
        }
      Object.assign(result, engine);
      result.graphs[name] = { bytes: (await stat(join(bundle, file))).size, load_ms: round(load_ms), steps };
    }
    return result;
  } finally {
    await page.close();
  }
}

/** Start the server and the browser. The page asks for /next, a job each time, and posts its answer to /said. */
async function openPage({ bundle, ort, browser }) {
  const here = fileURLToPath(new URL(".", import.meta.url));
  const folders = { "/ort/": ort, "/bundle/": bundle, "/": here };
  let job, idle, answered, failed;
  const hand = () => {
    if (!job || !idle) return;
    idle.end(JSON.stringify(job));
    job = idle = undefined;
  };
  const server = createServer(async (request, response) => {
    response.setHeader("Cache-Control", "no-store");
    if (request.url === "/next") {
      idle = response;
      hand();
    } else if (request.url === "/said") {
      const chunks = [];
      for await (const chunk of request) chunks.push(chunk);
      response.end();
      const answer = JSON.parse(Buffer.concat(chunks).toString());
      if (answer.error) failed?.(new Refused(`the browser failed: ${answer.error}`));
      else answered?.(answer);
    } else if (request.url === "/") response.setHeader("Content-Type", TYPES[".html"]).end(PAGE);
    else {
      const start = Object.keys(folders).find((each) => request.url.startsWith(each));
      const root = normalize(folders[start] + sep);
      const path = normalize(join(root, decodeURIComponent(request.url.slice(start.length))));
      if (!path.startsWith(root) || !(await isFile(path))) return void response.writeHead(404).end();
      response.setHeader("Content-Type", TYPES[extname(path)] ?? "application/octet-stream");
      createReadStream(path).pipe(response);
    }
  });
  await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
  const profile = await mkdtemp(join(tmpdir(), "moa-bench-"));
  const flags = ["--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", `--user-data-dir=${profile}`];
  if (process.getuid?.() === 0) flags.push("--no-sandbox"); // Chromium has no sandbox for root
  const process_ = spawn(browser, [...flags, `http://127.0.0.1:${server.address().port}/`], { stdio: "ignore" });
  const ended = new Promise((done) => process_.on("exit", done));
  process_.on("exit", (code) => failed?.(new Refused(`${browser} ended by itself (${code})`)));
  return {
    ask: (next) =>
      new Promise((resolve, reject) => {
        const timer = setTimeout(() => reject(new Refused("the browser was silent for 300 seconds")), SILENT_MS);
        const settle = (end) => (value) => (clearTimeout(timer), end(value));
        [job, answered, failed] = [next, settle(resolve), settle(reject)];
        hand();
      }),
    close: async () => {
      failed = undefined;
      process_.kill();
      await ended;
      server.closeAllConnections?.();
      server.close();
      await rm(profile, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 });
    },
  };
}

function tableOf({ graphs, version, agent, repeats }) {
  const rows = [["graph", "context", "tokens", "ms", "least", "p95"]];
  for (const [name, { steps }] of Object.entries(graphs))
    for (const { context, tokens, ms, least_ms, p95_ms } of steps) rows.push([name, context, tokens, ms, least_ms, p95_ms]);
  const widths = rows[0].map((_, column) => Math.max(...rows.map((row) => String(row[column]).length)));
  const lines = rows.map((row) => row.map((cell, column) => String(cell).padStart(widths[column])).join("  "));
  const notes = Object.entries(graphs).map(([name, { bytes, load_ms }]) => `${name}: ${(bytes / 1e6).toFixed(1)} MB, loaded in ${load_ms} ms`);
  return [...lines, ...notes, `medians of ${repeats} steps, onnxruntime-web ${version} in ${agent}`].join("\n");
}

const round = (ms) => Math.round(ms * 1000) / 1000;
const percentile = (ms, share) => round([...ms].sort((a, b) => a - b)[Math.min(ms.length - 1, Math.floor(share * ms.length))]);

async function readJson(path) {
  try {
    return JSON.parse(await readFile(path, "utf8"));
  } catch (error) {
    throw new Refused(`${path} cannot be read: ${error.message}`);
  }
}

const isFile = async (path) => (await stat(path).catch(() => undefined))?.isFile() ?? false;

const { values: options } = readOptions();
try {
  const result = await measure(await settingsOf(options));
  console.log(options.json ? JSON.stringify(result) : tableOf(result));
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  console.error(`bench: error: ${error.message}`);
  process.exitCode = 2;
}
