/** All tests in one process, in which nothing makes code from texts: as under a strict Content-Security-Policy. */

import assert from "node:assert/strict";
import { test } from "node:test";

import "./bundle.test.js";
import "./chat.test.js";
import "./drafts.test.js";
import "./figures.test.js";
import "./file_store.test.js";
import "./link.test.js";
import "./loop_traces.test.js";
import "./models.test.js";
import "./package.test.js";
import "./session_traces.test.js";
import "./client_table.test.js";
import "./texts.test.js";
import "./utf8.test.js";

test("no code is made from texts", () => {
  assert.throws(() => new Function("return 1"), EvalError);
});
