/**
 * An app in Node: the built package, with `onnxruntime-node` in the place of `onnxruntime-react-native`, and the package `ws` in that
 * of React Native's WebSocket. It asks one question, says each update as a line, and leaves with the answer.
 */

import { readFile } from "node:fs/promises";
import { join } from "node:path";

import ort from "onnxruntime-node";
import { WebSocket } from "ws";

import { Chat, Models, chatStore, followApp, openBundle, reactNativeHost, type Ort } from "../src/index.js";

interface Given {
  readonly bundle: string;
  readonly graphs: string;
  readonly url: string;
  readonly token: string;
  readonly question: string;
  readonly length: number;
  readonly seed: string;
  readonly temperature: number;
}

const given = JSON.parse(process.argv[2]!) as Given;
const say = (said: object): void => console.log(JSON.stringify(said));
(globalThis as unknown as { WebSocket: unknown }).WebSocket = WebSocket;

const kept = new Map<string, string>();
const storage = {
  getItem: async (key: string) => kept.get(key) ?? null,
  setItem: async (key: string, text: string) => void kept.set(key, text),
};
const found = await openBundle({
  readText: (file) => readFile(join(given.bundle, file), "utf-8"),
  pathOf: (file) => join(given.bundle, file),
});
const models = await Models.load(found, { ort: ort as unknown as Ort, graphs: given.graphs });
const chat = await Chat.connect(
  found.bundle,
  { url: given.url, token: given.token },
  {
    ...models.forConversation(),
    host: reactNativeHost(),
    store: chatStore(storage, "chat"),
    settings: { drafting: "device", lateAfterS: 0.3, outageAfterS: 0.1 },
    timing: { pingInterval: 0.5, pingTimeout: 0.5, firstBackoff: 0.05, longestBackoff: 0.2 },
  },
);
const stop = followApp(chat, { addEventListener: () => ({ remove: () => undefined }) });
const sampling = { temperature: given.temperature, topP: 0.95, seed: BigInt(given.seed) };
for await (const event of chat.send(given.question, { maxNewTokens: given.length, sampling })) {
  if (event.event === "AnswerUpdate") say({ event: event.event });
  else if (event.event === "LinkChanged") say({ status: event.status });
  else if (event.event === "AnswerFinished") say({ event: event.event, text: event.text, drafted: event.statistics.drafted });
}
stop();
await chat.close();
await models.close();
say({ stored: kept.has("chat") });
process.exit(0);
