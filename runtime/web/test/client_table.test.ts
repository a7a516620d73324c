/** The transition table of the client session is the same as Python's. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { CALLS, FRAMES, transition, type Call, type Event, type State } from "../src/session/client_table.js";
import { camel, read, snake } from "./vectors.js";

interface CallCase {
  readonly call: string;
  readonly next_states: { [state: string]: string[] };
  readonly refusal: string;
}

interface EventCase {
  readonly event: string;
  readonly transitions: { [state: string]: { action: string; next_states: string[] } };
}

test("client table: calls and frames in every state", () => {
  const cases = read<CallCase | EventCase>("figures/client_table");
  assert.equal(cases.length, Object.keys(CALLS).length + Object.keys(FRAMES).length);
  for (const expected of cases) {
    if ("call" in expected) {
      const { nextStates, refusal = "" } = CALLS[camel(expected.call) as Call];
      const named = Object.entries(nextStates).map(([state, following]) => [snake(state), following.map(snake)]);
      assert.deepEqual({ call: expected.call, next_states: Object.fromEntries(named), refusal }, expected);
    } else {
      const ours = Object.keys(expected.transitions).map((state) => {
        const { action, nextStates } = transition(camel(expected.event) as Event, camel(state) as State);
        return [state, { action: snake(action), next_states: nextStates.map(snake) }];
      });
      assert.deepEqual({ event: expected.event, transitions: Object.fromEntries(ours) }, expected);
    }
  }
});
