/** The table of a client session is Python's. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { CALLS, FRAMES, rowOf, type Call, type Heard, type State } from "../src/session/client_states.js";
import { camel, plain, read, snake } from "./vectors.js";

interface CallCase {
  readonly call: string;
  readonly leads: { [state: string]: string[] };
  readonly refusal: string;
}

interface FrameCase {
  readonly frame: string;
  readonly rows: { [state: string]: { does: string; leads: string[] } };
}

test("states: the table", () => {
  const cases = read<CallCase | FrameCase>("figures/client_states");
  assert.equal(cases.length, Object.keys(CALLS).length + Object.keys(FRAMES).length);
  for (const said of cases) {
    if ("call" in said) {
      const { leads, refusal = "" } = CALLS[camel(said.call) as Call];
      assert.deepEqual({ call: said.call, leads: plain(leads), refusal }, said);
    } else {
      const states = Object.keys(said.rows) as State[];
      const rows = states.map((state) => [state, rowOf(camel(said.frame) as Heard, state)] as const);
      const ours = rows.map(([state, { does, leads }]) => [state, { does: snake(does), leads: [...leads] }]);
      assert.deepEqual({ frame: said.frame, rows: Object.fromEntries(ours) }, said);
    }
  }
});
