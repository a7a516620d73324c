/** Places of rendered text in its Markdown. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { align } from "../src/views/markdown.js";

test("each character of rendered text has an offset in the source, and offsets never decrease", () => {
  assert.deepEqual(align("a", "**a** b", 0), [2]);
  assert.deepEqual(align(" b", "**a** b", 3), [5, 6]);
  assert.deepEqual(align("x & y", "# x &amp; y", 0), [2, 3, 4, 9, 10]);
  assert.deepEqual(align("2", "| 1 | ~~2~~ |", 3), [8]);
  const offsets = align("not there at all", "something else", 9);
  assert.ok(offsets.every((offset, at) => offset < 14 && (at === 0 || offset >= offsets[at - 1]!)));
});
