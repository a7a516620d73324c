/** Keys of input methods (Chinese, Japanese, Korean). */

import assert from "node:assert/strict";
import { test } from "node:test";

import { isForInputMethod } from "../src/views/dom.js";

test("Enter that confirms a candidate does not send, in Safari either", () => {
  assert.ok(isForInputMethod({ isComposing: true, keyCode: 13 }));
  assert.ok(isForInputMethod({ isComposing: false, keyCode: 229 })); // Safari
  assert.ok(!isForInputMethod({ isComposing: false, keyCode: 13 }));
});
