/** Replay the vectors in an engine: `node replay_in.js quickjs|jsc [hermes]`; say each test and its problem, a JSON array a line. */

import { replayScript, vectorsScript } from "./build.js";
import { JavaScriptCore } from "./jsc.js";
import { QuickJs } from "./quickjs.js";

const [engine, build] = process.argv.slice(2);
const scripts = [vectorsScript(), await replayScript(build === "hermes")];
const print = (json: string): void => console.log(json);

if (engine === "quickjs") {
  const quickjs = await QuickJs.create();
  quickjs.define("program", { report: print });
  quickjs.run("globalThis.report = program.report;", "start.js");
  for (const script of scripts) quickjs.run(script, "replay.js");
} else {
  const start = 'globalThis.report = (json) => say("report", json);';
  const program = new JavaScriptCore([start, ...scripts], (_, json) => print(json as string));
  await program.ended;
}
