/**
 * Chats with servers that do what no verifier does, for tests/e2e/web/test_hostile.py: told a port on each line of stdin, it asks
 * there once, and says in JSON how that ended. An uncaught error ends it.
 */

import { createInterface } from "node:readline";

import { WebSocket } from "ws";

import { GrowingRows } from "../src/drafters/kv_buffer.js";
import { Chat, ChatTokenizer, FixedShape, MoaError, budgetOf, type ChatBundle, type DraftTree, type Drafter } from "../src/index.js";
import { nodeHost } from "../src/node/index.js";
import type { KvArray } from "../src/session/memory_rows.js";
import { readJson } from "./vectors.js";

const ANSWER = 12; // tokens asked for
const DEADLINE_S = 1.5;
const CONTEXT = 200;
const TIMING = { openTimeout: 0.5, welcomeTimeout: 0.5, pingInterval: 0.3, pingTimeout: 0.3, firstBackoff: 0.05, longestBackoff: 0.05 };

const tokenizer = new ChatTokenizer(readJson("texts/tokenizer.json"), "{{ messages[0]['content'] }}", {}, [2]);
const bundle: ChatBundle = {
  manifest: {
    fingerprints: { target: "target", tokenizer: "tokenizer", drafter: "drafter" },
    stopTokens: [2],
    vocabSize: 512,
    maxContext: CONTEXT,
  },
  tokenizer: () => Promise.resolve(tokenizer),
};

/** Always drafts the same tokens; its rows are of one head of one number. */
class Guesser implements Drafter {
  readonly needsRows = true;
  readonly stoppingRule = null;
  private readonly held = new GrowingRows({ kvHeads: 1, headDim: 1 });

  get rows(): number {
    return this.held.length;
  }

  addRows(start: number, keys: KvArray, values: KvArray): void {
    this.held.write(start, keys, values);
  }

  truncateRows(length: number): void {
    this.held.truncate(length);
  }

  propose(): DraftTree {
    return { tokens: [7, 8], parents: [0, 1], scores: [-1, -1], steps: [] };
  }
}

/** What a user hears: "answered", "offline: why", "failed: why", "refused: why" where the chat does not even open. */
async function asked(port: number): Promise<string> {
  const chat = await Chat.create(
    bundle,
    { url: `ws://127.0.0.1:${port}`, token: "secret" },
    {
      drafter: new Guesser(),
      controller: new FixedShape(budgetOf(2, 2)),
      settings: { offline: "off", drafting: "device", lateAfterS: 60, prefillLateAfterS: 60 },
      timing: TIMING,
      host: nodeHost(WebSocket),
    },
  );
  try {
    await chat.open();
  } catch (error) {
    return `refused: ${sentence(error)}`;
  } finally {
    setTimeout(() => void chat.close(), 1000 * DEADLINE_S);
  }
  try {
    for await (const event of chat.send("Hi", { maxNewTokens: ANSWER })) {
      if (event.event === "AnswerFinished") return event.tokens.length <= ANSWER ? "answered" : "too many tokens";
      if (event.event === "LinkChanged" && event.status === "offline") return `offline: ${event.detail}`;
    }
    return "waits"; // it was closed
  } catch (error) {
    return `failed: ${sentence(error)}`;
  } finally {
    await chat.close();
  }
}

function sentence(error: unknown): string {
  if (!(error instanceof MoaError)) throw error;
  return error.message;
}

for await (const line of createInterface({ input: process.stdin })) {
  const before = process.memoryUsage().rss;
  const said = await asked(Number(line));
  console.log(JSON.stringify({ said, bytes: process.memoryUsage().rss - before }));
}
