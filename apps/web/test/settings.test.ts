/** What is stored of settings, and what a chat's mean. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { USUAL_CHAT, USUAL_SETTINGS, loadSettings, newSeed, samplingOf, saveSettings, thinkingOf } from "../src/settings.js";

function storage(text: string | null): { getItem(): string | null } {
  return { getItem: () => text };
}

test("what was stored comes back", () => {
  let text = "";
  const chosen = { ...USUAL_SETTINGS, onDisagreement: "ask", chats: { ...USUAL_CHAT, topP: 0.5 } } as const;
  saveSettings({ setItem: (_, value) => void (text = value) }, chosen);
  assert.deepEqual(loadSettings(storage(text)), chosen);
});

test("what is damaged, missing, or no choice is the usual", () => {
  for (const text of [null, "", "{", "[]", "7", '{"drafting": "nobody", "origins": 3, "chats": 4, "more": 1}']) {
    assert.deepEqual(loadSettings(storage(text)), USUAL_SETTINGS, String(text));
  }
  assert.deepEqual(loadSettings(storage('{"chats": {"temperature": 0.5, "topP": "1"}}')).chats, {
    ...USUAL_CHAT,
    temperature: 0.5,
  });
});

test("words are chosen as the chat says, or as recommended, or greedily", () => {
  const greedy = { temperature: 0, topP: 1, seed: 0n, topK: 0, minP: 0 };
  const recommended = { temperature: 0.2, topP: 0.9 };
  assert.deepEqual(samplingOf(USUAL_CHAT, recommended, 7n), { ...greedy, ...recommended, seed: 7n });
  assert.deepEqual(samplingOf(USUAL_CHAT, null, 7n), greedy);
  const own = { ...USUAL_CHAT, recommended: false, temperature: 0.7, topP: 0.8 };
  assert.deepEqual(samplingOf(own, recommended, 7n), { ...greedy, temperature: 0.7, topP: 0.8, seed: 7n });
  assert.deepEqual(samplingOf({ ...own, temperature: 0 }, recommended, 7n), greedy);
});

test("answers are JSON if the chat says so", () => {
  const grammars = [{ asJson: true }, { asJson: true, schema: "{}" }, { schema: "{}" }].map(
    (own) => samplingOf({ ...USUAL_CHAT, ...own }, null, 7n).grammar,
  );
  assert.deepEqual(grammars, [{ kind: "json_object", text: "" }, { kind: "json_schema", text: "{}" }, undefined]);
});

test("reasoning is switched if the template can", () => {
  const switched = (["model", "on", "off"] as const).map((thinking) => thinkingOf({ ...USUAL_CHAT, thinking }, true));
  assert.deepEqual(switched, [undefined, true, false]);
  assert.equal(thinkingOf({ ...USUAL_CHAT, thinking: "on" }, false), undefined);
});

test("a seed has 63 bits", () => {
  const seeds = Array.from({ length: 50 }, newSeed);
  assert.ok(seeds.every((seed) => seed >= 0n && seed < 2n ** 63n));
  assert.equal(new Set(seeds).size, 50);
});
