/** Origins by words. The cases are those of tests/unit/chat/desktop/test_whole_words.py. */

import assert from "node:assert/strict";
import { test } from "node:test";

import type { TextSpan } from "@moa-edge/runtime";

import { wholeDropped, wholeWords } from "../src/whole_words.js";
import { numbers, pieces } from "./spans.js";

const [D, S, O, K] = ["drafted", "corrected", "offline", "kept"] as const;

test("a word has the weakest claim of its parts", () => {
  const cases = [
    [pieces(["The col", D], ["our", S], [" is", D]), pieces(["The ", D], ["colour", S], [" is", D])],
    [pieces(["a col", S], ["o", O], ["ur", D], [".", D]), pieces(["a ", S], ["colour", O], [".", D])],
    [pieces(["col", O], ["our", K]), pieces(["colour", K])],
    [pieces(["col", O], ["our", D, false]), pieces(["colour", D, false])],
    [pieces(["don", D], ["'t", S], [" go", D]), pieces(["don't", S], [" go", D])],
    [pieces(["one", D], [" two", S]), pieces(["one", D], [" two", S])],
    [pieces(["**bo", D], ["ld**", S]), pieces(["**", D], ["bold", S], ["**", S])],
    [pieces(["颜色", D], ["是", S]), pieces(["颜色", D], ["是", S])],
    [pieces(["x_", D], ["1+y", S], ["2", D]), pieces(["x_1", S], ["+", S], ["y2", S])],
    [pieces(["𝕒", D], ["𝕓", S]), pieces(["𝕒𝕓", S])], // letters of two UTF-16 code units
    [[], []],
  ];
  for (const [tokens, words] of cases) assert.deepEqual(wholeWords(tokens!), words);
});

test("nothing is lost and no word is divided", () => {
  const random = numbers(1);
  for (let round = 0; round < 300; round++) {
    const spans = Array.from({ length: random(8) }, (): TextSpan => {
      const text = Array.from({ length: 1 + random(4) }, () => "ab c'-色.".charAt(random(8))).join("");
      return { text, origin: [D, S, O, K][random(4)]!, committed: random(2) === 0 };
    });
    const made = wholeWords(spans);
    const textOf = (cut: readonly TextSpan[]): string => cut.map(({ text }) => text).join("");
    assert.equal(textOf(made), textOf(spans));
    assert.ok(made.every(({ text }) => text !== ""));
    made.slice(1).forEach((right, at) => {
      const left = made[at]!;
      const same = left.origin === right.origin && left.committed === right.committed;
      assert.ok(same || !(/[abc]$/u.test(left.text) && /^[abc]/u.test(right.text)));
    });
    assert.deepEqual(wholeWords(made), made);
  }
});

test("what was taken back is a whole word", () => {
  const cases: readonly (readonly [string, number, string, number, string])[] = [
    ["a boat", 4, "ld", 2, "bold"],
    ["bold", 4, "er", 0, "bolder"],
    ["so it is", 5, "'s", 3, "it's"],
    ["so it is", 5, "'", 5, "'"],
    ["so it", 9, "self", 3, "itself"],
    ["", 9, "self", 0, "self"],
    ["a boat", 1, " ship", 2, "ship"],
    ["a boat.", 6, " ship", 6, " ship"],
    ["a boat", 2, "ship", 2, "ship"],
    ["see that", 7, " the Earth", 4, "tha the Earth"],
  ];
  for (const [content, offset, text, start, shown] of cases) {
    assert.deepEqual(wholeDropped([{ offset, text }], content), [{ offset: start, text: shown }]);
  }
});
