/**
 * An app around `moa-core.js` that asks while an answer is being written, and then stops the earlier answer, late:
 * `node asking_again.js quickjs|jsc BUNDLE URL TOKEN`; prints the events of both answers and the chat's state.
 */

import { App } from "./app.js";

const [engine, bundle, url, token] = process.argv.slice(2) as ["quickjs" | "jsc", string, string, string];
const events: [number, string][] = [];
let heard: () => void = () => undefined;
const begun = new Promise<void>((resolve) => (heard = resolve));

const app = await App.start({
  engine,
  bundle,
  texts: () => "",
  ort: undefined,
  onEvent: (request, { event }) => {
    events.push([request, event]);
    if (event === "AnswerUpdate") heard();
  },
});
const { chat } = (await app.request("open", { url, token, wait: true })) as { chat: number };
const first = app.request("send", { chat, text: "Name three primary colours.", maxNewTokens: 200, answer: "first" });
await begun;
const second = app.request("send", { chat, text: "And now?", maxNewTokens: 12, answer: "second" });
await app.request("stop", { chat, answer: "first" });
await Promise.all([first, second]);
const state = await app.request("state", { chat });
console.log(JSON.stringify({ events, state }));
await app.request("close", { chat });
await app.end();
process.exit(0);
