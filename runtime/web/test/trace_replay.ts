/** Replays a trace of a client session and names the first difference from Python. */

import assert from "node:assert/strict";

import type { JsonValue } from "@bufbuild/protobuf";

import { ClientSession, LocalProtocolError, SnapshotError } from "../src/index.js";
import type { DraftTree, Fingerprints, Origin, Policy, Sampling, SessionEvent } from "../src/index.js";
import { asMessage, bytesOf, eventOf, said } from "./trace_json.js";
import { camel, plain, type Value } from "./vectors.js";

type Args = { [key: string]: Value };

export interface Step {
  readonly call?: string;
  readonly set?: string;
  readonly value?: Value;
  readonly args?: Args;
  readonly returns?: Value;
  readonly events?: Value[];
  readonly raises?: { error: string; text?: string };
  readonly frames?: JsonValue[];
  readonly state?: { [key: string]: Value };
}

export interface Trace {
  readonly name: string;
  readonly steps: Step[];
}

/** Result of a call as the fields of a step. */
type Outcome = Pick<Step, "returns" | "events" | "raises" | "frames">;

const TELLING = new Set(["resume", "cancel", "keep", "receive"]);

/** @throws AssertionError with the trace, the step, and what differs. */
export function replay(trace: Trace): void {
  let client: ClientSession | undefined;
  let state: { [key: string]: Value } = {};
  trace.steps.forEach((step, number) => {
    const where = `${trace.name}, step ${number}, ${step.call ?? `set ${step.set}`}`;
    const made = step.call === "create" || step.call === "restore" ? begun(step) : undefined;
    client = made?.client ?? client;
    const got: Outcome = made ? made.outcome : played(client!, step);
    const frames = step.frames && !got.frames ? framesOf(client!) : got.frames;
    const { returns, events, raises } = step;
    const outcome = { returns: got.returns, events: got.events, raises: got.raises, frames };
    assert.deepEqual(outcome, { returns, events, raises, frames: step.frames?.map(asMessage) }, where);
    state = { ...state, ...step.state };
    if (client) assert.deepEqual(stateOf(client, Object.keys(state)), state, where);
  });
}

function begun(step: Step): { client?: ClientSession; outcome: Outcome } {
  const args = step.args!;
  const fingerprints = args["fingerprints"] as unknown as Fingerprints;
  const options = {
    stopTokens: args["stop_tokens"] as number[],
    rowEncoding: args["row_encoding"] as number,
    vocabSize: args["vocab_size"] as number,
  };
  if (step.call === "create") {
    return { client: new ClientSession(fingerprints, { ...options, policy: args["policy"] as Policy }), outcome: {} };
  }
  try {
    return { client: ClientSession.restore(args["snapshot"], fingerprints, options), outcome: {} };
  } catch (error) {
    return { outcome: { raises: raised(error) } };
  }
}

function played(client: ClientSession, step: Step): Outcome {
  if (step.set) {
    Object.assign(client, { [camel(step.set)]: step.value });
    return {};
  }
  const args = step.args ?? {};
  try {
    const result = CALLS[step.call!]!(client, args);
    if (step.call === "frames_to_send") return { frames: (result as Uint8Array[]).map(said) };
    if (result === undefined) return {};
    if (!TELLING.has(step.call!)) return { returns: plain(result) };
    const events = (result as SessionEvent[]).map(eventOf);
    return events.length ? { events } : {};
  } catch (error) {
    return { raises: raised(error) };
  }
}

const CALLS: { [name: string]: (client: ClientSession, args: Args) => unknown } = {
  connect: (client) => client.connect(),
  disconnected: (client) => client.disconnected(),
  prompt: (client, args) =>
    client.prompt(
      args["tokens"] as number[],
      samplingOf(args["sampling"] as Args),
      args["max_new_tokens"] as number,
      args["while_away"] as boolean,
    ),
  continue_answer: (client, args) =>
    client.continueAnswer(
      args["tokens"] as number[],
      args["answer_start"] as number,
      samplingOf(args["sampling"] as Args),
      args["max_new_tokens"] as number,
      args["while_away"] as boolean,
    ),
  extend: (client, args) => client.extend(args["tokens"] as number[], args["origin"] as Extract<Origin, "drafted">),
  declare_offline: (client, args) => client.declareOffline(args["after"] as number),
  propose: (client, args) =>
    client.propose(args["most"] as number | null, args["tree"] as unknown as DraftTree | null),
  send_unsolicited: (client, args) =>
    client.sendUnsolicited(args["tree"] as unknown as DraftTree, args["base_len"] as number),
  grant_credit: (client, args) => client.grantCredit(args["position"] as number),
  revoke_credit: (client) => client.revokeCredit(),
  resend: (client) => client.resend(),
  resume: (client) => client.resume(),
  cancel: (client) => client.cancel(),
  rewind: (client, args) => client.rewind(args["length"] as number),
  keep: (client, args) => client.keep(args["start"] as number, args["tokens"] as number[]),
  snapshot: (client) => client.snapshot(),
  receive: (client, args) => client.receive(bytesOf(args["data"] as { bytes?: string })),
  frames_to_send: (client) => client.framesToSend(),
  note_round_trip: (client, args) => client.noteRoundTrip(args["seconds"] as number),
};

function samplingOf(said: Args): Sampling {
  const number = (key: string): number => said[key] as number;
  const seed = BigInt(said["seed"] as number | string);
  return { temperature: number("temperature"), topP: number("top_p"), seed, topK: number("top_k"), minP: number("min_p") };
}

function framesOf(client: ClientSession): JsonValue[] {
  return client.framesToSend().map(said);
}

function raised(error: unknown): { error: string; text?: string } {
  if (error instanceof SnapshotError) return { error: error.name };
  if (error instanceof LocalProtocolError) return { error: error.name, text: error.message };
  throw error;
}

function stateOf(client: ClientSession, keys: string[]): { [key: string]: Value } {
  const saved = client.snapshot();
  const asked = client as unknown as { [key: string]: unknown };
  return Object.fromEntries(keys.map((key) => [key, key in saved ? saved[key]! : plain(asked[camel(key)])]));
}
