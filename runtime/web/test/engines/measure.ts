/**
 * Measure the core in an engine: `node measure.js quickjs|jsc BUNDLE`. Prints milliseconds until `moa-core.js` is loaded, of the
 * bundle's tokenizer, and of a step of a draft without its graph; and the engine's memory with all of that, in MB.
 */

import { readFileSync } from "node:fs";
import { join } from "node:path";

import { readManifest } from "../../src/bundle/manifest.js";
import { coreScript, stepsScript } from "./build.js";
import { JavaScriptCore } from "./jsc.js";
import { QuickJs } from "./quickjs.js";

const [engine, bundle] = process.argv.slice(2) as [string, string];
const text = (name: string): string => readFileSync(join(bundle, name), "utf-8");
const { specialTokens: special } = readManifest(text("manifest.json"));
const files = JSON.stringify({ tokenizer: text("tokenizer.json"), template: text("chat_template.jinja"), special });
const given = `globalThis.files = ${files};`;
const [core, steps] = [await coreScript(), await stepsScript()];
const now = (): number => performance.now() / 1000;

if (engine === "quickjs") {
  const quickjs = await QuickJs.create();
  const began = now();
  quickjs.run(core, "moa-core.js");
  const load = { load_ms: 1000 * (now() - began), core_mb: quickjs.memory / 1e6 };
  quickjs.define("program", { now, report: (json: string) => print({ ...load, ...(JSON.parse(json) as object), memory_mb: quickjs.memory / 1e6 }) });
  quickjs.run("globalThis.now = program.now; globalThis.report = program.report;", "start.js");
  quickjs.run(given, "files.js");
  quickjs.run(steps, "steps.js");
} else {
  const start = `globalThis.now = preciseTime; globalThis.report = (json) => say("report", json); const began = preciseTime();`;
  const loaded = 'say("loaded", 1000 * (preciseTime() - began));';
  let all = {};
  const heard = (name: string, value: unknown): void => {
    all = { ...all, ...(name === "loaded" ? { load_ms: value } : (JSON.parse(value as string) as object)) };
  };
  const program = new JavaScriptCore([start, core, loaded, given, steps], heard, ["--footprint"]);
  const said = await program.ended;
  print({ ...all, memory_mb: Number(/Peak Footprint: (\d+)/.exec(said)![1]) / 1e6 });
}

function print(measured: object): void {
  console.log(JSON.stringify(measured, (_, value: unknown) => (typeof value === "number" ? Math.round(1000 * value) / 1000 : value)));
}
