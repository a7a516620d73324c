/** Texts and bytes without the platform are those of the platform. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { decoded, encoded } from "../src/utf8.js";

/** Bytes and code units at the edges of what is valid. */
const BYTES = [0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc1, 0xc2, 0xdf, 0xe0, 0xed, 0xef, 0xf0, 0xf4, 0xf5, 0xff];
const UNITS = [0x41, 0x7f, 0x80, 0x7ff, 0x800, 0xd83d, 0xdbff, 0xdc00, 0xde00, 0xfeff, 0xffff];

/** Return all lists of `length` items. */
function lists(items: readonly number[], length: number): number[][] {
  if (!length) return [[]];
  return lists(items, length - 1).flatMap((list) => items.map((item) => [...list, item]));
}

test("utf8: all short texts of edge cases, and a long one", () => {
  const encoder = new TextEncoder();
  const long = "Grüße, 世界 😀 ".repeat(2000);
  for (const text of [...lists(UNITS, 3).map((units) => String.fromCharCode(...units)), "", long]) {
    const bytes = encoded(text);
    if (Buffer.compare(bytes, encoder.encode(text))) assert.deepEqual(bytes, encoder.encode(text));
  }
  assert.equal(decoded(encoded(long)), long);
});

test("utf8: all short bytes of edge cases", () => {
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  for (const bytes of lists(BYTES, 4)) {
    const data = Uint8Array.from(bytes);
    if (decoded(data) !== decoder.decode(data)) assert.equal(decoded(data), decoder.decode(data), String(bytes));
  }
});
