/**
 * The program of `system_client.ts` as an app around `moa-core.js`: the same questions, files and lines on stdin. Its argument
 * names the engine besides, and a module of onnxruntime-web.
 */

import { appendFileSync, existsSync, renameSync, writeFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

import type { Ort } from "../../src/index.js";
import type { Given } from "../system_client.js";
import { App } from "./app.js";

interface EngineGiven extends Given {
  readonly engine: "quickjs" | "jsc";
  readonly ort: string;
}

type Told = { conditions?: object; offline?: boolean; network?: string };

const given = JSON.parse(process.argv[2]!) as EngineGiven;

async function main(): Promise<void> {
  const module = (await import(pathToFileURL(given.ort).href)) as { default?: Ort } & Ort;
  const ort = module.default ?? module;
  ort.env.wasm.numThreads = 1;
  let answer = 0;
  let written = "";
  const app = await App.start({
    engine: given.engine,
    bundle: given.bundle,
    texts: () => given.store,
    ort,
    onEvent: (_, event) => {
      if (event.event !== "AnswerUpdate") return;
      const spans = event["spans"] as { text: string; origin: string }[];
      if (spans.map(({ text }) => text).join("") !== event["tentative"]) throw new Error("the spans are not the tentative text");
      written = written.slice(0, event["start"] as number) + (event["text"] as string); // a first update starts at 0
      appendFileSync(given.seen, JSON.stringify([answer, written]) + "\n");
    },
  });
  const { chat, pending, storeProblem } = (await app.request("open", {
    url: given.url,
    token: given.token,
    graphs: "web",
    store: "chat",
    settings: { drafting: given.drafting, lateAfterS: 0.3, outageAfterS: 0.1 },
    timing: { pingInterval: 0.5, pingTimeout: 0.5, firstBackoff: 0.05, longestBackoff: 0.2 },
  })) as { chat: number; pending: boolean; storeProblem: string };
  if (storeProblem) throw new Error(storeProblem);
  const lines = createInterface({ input: process.stdin });
  lines.on("line", (line) => {
    const { conditions, network, offline } = JSON.parse(line) as Told;
    if (conditions) void app.request("conditions", { chat, ...conditions });
    if (offline !== undefined) void app.request("workOffline", { chat, offline });
    if (network) void app.request("networkChanged", { chat });
  });
  const state = async () => (await app.request("state", { chat })) as { messages: object[]; tokens: number[] };
  let begun = pending;
  for (answer = Math.floor((await state()).messages.length / 2); answer < given.questions.length; answer++) {
    const { seed, temperature, top_p: topP } = given.samplings[answer]!;
    const asked = { chat, text: given.questions[answer], maxNewTokens: given.length, temperature, topP, seed };
    await (begun ? app.request("pending", { chat }) : app.request("send", asked));
    begun = false;
  }
  const { messages, tokens } = await state();
  writeFileSync(`${given.done}.new`, JSON.stringify({ tokens, messages }));
  renameSync(`${given.done}.new`, given.done);
  console.log(`${app.host.steps} steps`);
  lines.close();
  await app.request("close", { chat });
  await app.end();
  process.exit(0);
}

if (!existsSync(given.done)) await main();
