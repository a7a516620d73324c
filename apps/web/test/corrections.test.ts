/** Words that the target replaced. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { correctedWords, differences } from "../src/corrections.js";
import { message } from "../src/message.js";
import { numbers, pieces } from "./spans.js";

test("words that are others, gone, or new in between count; what follows the end does not", () => {
  const cases: readonly (readonly [string, string, number])[] = [
    ["red, green and blue", "red, yellow and blue. That is all.", 1],
    ["red and blue", "red and blue", 0],
    ["red, and blue", "red and blue!", 0],
    ["red green blue", "red blue", 1],
    ["red blue", "red and dark blue", 2],
    ["one two three", "four", 3],
    ["one", "", 1],
    ["one", "a longer answer", 1],
    ["the planet's sky", "the planet's sea", 1],
  ];
  for (const [written, after, count] of cases) {
    assert.equal(correctedWords(message("assistant", written), after), count, `${written} -> ${after}`);
  }
});

test("words of the server are no corrections of the device's", () => {
  const spans = pieces(["red ", "corrected"], ["green ", "drafted"], ["blue", "offline", false]);
  const written = message("assistant", "red green blue", { spans });
  assert.equal(correctedWords(written, "red yellow black"), 1);
  assert.equal(correctedWords(written, "yellow green blue"), 0);
});

test("between the differences stands what both have, in order", () => {
  const random = numbers(2);
  const words = (): string[] => Array.from({ length: random(9) }, () => "abc".charAt(random(3)));
  for (let round = 0; round < 300; round++) {
    const [old, now] = [words(), words()];
    let made: string[] = [];
    let at = 0;
    for (const [i1, i2, j1, j2] of differences(old, now)) {
      assert.ok(i2 > i1 || j2 > j1);
      made = [...made, ...old.slice(at, i1), ...now.slice(j1, j2)];
      at = i2;
    }
    assert.deepEqual([...made, ...old.slice(at)], now);
  }
});
