/** The drafting loop replays every conversation that Python recorded. */

import { test } from "node:test";

import { replayLoop, type LoopTrace } from "./loop_replay.js";
import { read } from "./vectors.js";

test("loop: walks", () => {
  for (const trace of read<LoopTrace>("loop/walks")) replayLoop(trace);
});
