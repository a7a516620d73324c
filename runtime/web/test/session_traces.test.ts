/** The session does in every recorded conversation what Python did. */

import { test } from "node:test";

import { replay, type Trace } from "./replaying.js";
import { read } from "./vectors.js";

for (const group of ["scripts", "spelled_out", "walks"]) {
  test(`session: ${group}`, () => {
    for (const trace of read<Trace>(`session/${group}`)) replay(trace);
  });
}
