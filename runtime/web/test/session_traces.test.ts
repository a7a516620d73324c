/** The session replays every conversation that Python recorded. */

import { test } from "node:test";

import { replay, type Trace } from "./trace_replay.js";
import { read } from "./vectors.js";

for (const group of ["scripts", "spelled_out", "walks"]) {
  test(`session: ${group}`, () => {
    for (const trace of read<Trace>(`session/${group}`)) replay(trace);
  });
}
