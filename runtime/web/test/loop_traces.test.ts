/** The drafting loop does in every recorded conversation what Python did. */

import { test } from "node:test";

import { replayLoop, type LoopTrace } from "./loop_replaying.js";
import { read } from "./vectors.js";

test("loop: walks", () => {
  for (const trace of read<LoopTrace>("loop/walks")) replayLoop(trace);
});
