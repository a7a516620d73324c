/**
 * A program that asks two questions one after the other, and is killed at any moment: the next one goes on from its file.
 *
 * The tests in tests/e2e/web start it, with a JSON object of {@link Given} as argument, and tell it on stdin what its host knows,
 * a JSON object a line: `{"conditions": {...}}`, `{"offline": true}`, `{"network": "changed"}`.
 */

import { appendFileSync, existsSync, renameSync, writeFileSync } from "node:fs";
import { createInterface } from "node:readline";

import { WebSocket } from "ws";

import { Chat, NgramDrafter, type Conditions, type Drafting } from "../src/index.js";
import { FileChatStore, nodeHost, openBundle } from "../src/node/index.js";

export interface Given {
  readonly bundle: string;
  readonly url: string;
  readonly token: string;
  readonly questions: string[];
  readonly drafting: Drafting;
  readonly length: number;
  /** Of each question; the seed is a text. */
  readonly samplings: { temperature: number; top_p: number; seed: string }[];
  readonly store: string;
  /** Gets confirmed text that was shown, a JSON line each. */
  readonly seen: string;
  /** Gets tokens and turns at the end. */
  readonly done: string;
}

type Told = { conditions?: Partial<Conditions>; offline?: boolean; network?: string };

const given = JSON.parse(process.argv[2]!) as Given;

async function main(): Promise<void> {
  const bundle = await openBundle(given.bundle);
  const chat = await Chat.connect(
    bundle,
    { url: given.url, token: given.token },
    {
      drafter: new NgramDrafter(bundle.manifest.stopTokens),
      settings: { drafting: given.drafting, lateAfterS: 0.3, outageAfterS: 0.1 },
      timing: { pingInterval: 0.5, pingTimeout: 0.5, firstBackoff: 0.05, longestBackoff: 0.2 },
      store: new FileChatStore(given.store),
      host: nodeHost(WebSocket),
      wait: false,
    },
  );
  if (chat.storeProblem) throw new Error(chat.storeProblem);
  const lines = createInterface({ input: process.stdin });
  lines.on("line", (line) => {
    const { conditions, network, offline } = JSON.parse(line) as Told;
    if (conditions) chat.tellConditions(conditions);
    if (offline !== undefined) void chat.workOffline(offline);
    if (network) void chat.networkChanged();
  });
  for (let answer = Math.floor(chat.messages.length / 2); answer < given.questions.length; answer++) {
    const { seed, temperature, top_p: topP } = given.samplings[answer]!;
    const options = { maxNewTokens: given.length, sampling: { temperature, topP, seed: BigInt(seed) } };
    for await (const event of chat.pending() ?? chat.send(given.questions[answer]!, options)) {
      if (chat.question !== given.questions[answer]) throw new Error(`it is asked ${chat.question}`);
      if (event.event === "AnswerUpdate") appendFileSync(given.seen, JSON.stringify([answer, event.committed]) + "\n");
    }
  }
  writeFileSync(`${given.done}.new`, JSON.stringify({ tokens: chat.tokens, messages: chat.messages }));
  renameSync(`${given.done}.new`, given.done);
  lines.close();
  await chat.close();
}

if (!existsSync(given.done)) await main();
