/** Frames from the server to the device: what they say, and what is wrong with them. */

import { create, fromBinary } from "@bufbuild/protobuf";

import {
  FaultCode,
  Finish,
  LimitsSchema,
  ServerMessageSchema,
  type Fault,
  type MemoryRows,
  type ServerMessage,
  type Verdict,
  type Welcome,
} from "../wire/moa/v1/session_pb.js";
import type { Event } from "./client_table.js";
import type { Echoed, Faulted, FinishReason, RowsReceived } from "./events.js";
import { PROTOCOL_VERSION, type Limits } from "./handshake.js";
import { RowsError, decodeRows, firstRows, type Numbers } from "./rows.js";

/** Why an answer ended; undefined where it goes on. */
export function finishOf(finish: Finish): FinishReason | undefined {
  const reasons: Partial<Record<Finish, FinishReason>> = {
    [Finish.STOP]: "stop",
    [Finish.LENGTH]: "length",
    [Finish.CONTEXT]: "context",
  };
  return reasons[finish];
}

/** A verifier that counts further lies: the counts of a conversation go on from its own, in 64 bits. */
const MOST_COUNTED = 1n << 62n;
/** Nor has any target a longer context. */
const LONGEST_CONTEXT = 1 << 24;
/** Characters of a fault's text that are shown. */
const MOST_SAID = 400;

/** A frame that no verifier of this protocol sends. */
export class BrokenFrameError extends Error {
  constructor(
    text: string,
    private readonly code = "PROTOCOL",
  ) {
    super(text);
  }

  get event(): Faulted {
    return { event: "Faulted", code: this.code, text: this.message, retryAfterMs: 0 };
  }
}

/**
 * One frame.
 *
 * @throws BrokenFrameError it is no message.
 */
export function parseServerMessage(data: Uint8Array): ServerMessage {
  let message: ServerMessage;
  try {
    message = fromBinary(ServerMessageSchema, data);
  } catch {
    throw new BrokenFrameError("the server sent a frame that is no ServerMessage");
  }
  return message;
}

/**
 * What a frame says to a client that is in this epoch.
 *
 * @throws BrokenFrameError it holds no event that is known.
 */
export function classify({ event }: ServerMessage, epoch: bigint): Event {
  switch (event.case) {
    case "verdict":
      return event.value.epoch === epoch ? "verdict" : "stale";
    case "standing":
      return event.value.epoch === epoch ? "creditRevoked" : "stale";
    case "fault":
      if (event.value.epoch !== 0n && event.value.epoch !== epoch) return "stale";
      return event.value.code === FaultCode.OUT_OF_SYNC ? "outOfSync" : "fault";
    case undefined:
      throw new BrokenFrameError("the server sent an event this version does not know");
    default:
      return event.case;
  }
}

/** That of a stamp of the client's, if the frame has one. */
export function echoOf({ event }: ServerMessage): Echoed[] {
  if (event.case !== "verdict" && event.case !== "standing" && event.case !== "pong") return [];
  const { echo } = event.value;
  return echo?.stamp ? [{ event: "Echoed", stamp: echo.stamp, heldS: echo.heldUs / 1e6 }] : [];
}

/**
 * What the verifier allows.
 *
 * @throws BrokenFrameError it speaks another version, or names numbers that cannot be.
 */
export function limitsOf(welcome: Welcome): Limits {
  if (welcome.epoch > MOST_COUNTED || welcome.connection > MOST_COUNTED) {
    throw new BrokenFrameError(`the server counts ${welcome.epoch} epochs and ${welcome.connection} connections`);
  }
  if (welcome.protocolVersion !== PROTOCOL_VERSION) {
    const text = `the verifier speaks protocol version ${welcome.protocolVersion}, this client ${PROTOCOL_VERSION}`;
    throw new BrokenFrameError(text, "VERSION_MISMATCH");
  }
  const { maxContext, maxDraftTokens, maxFrameBytes, idleSeconds, chainsOnly, awaySeconds, keepSeconds } =
    welcome.limits ?? create(LimitsSchema);
  if (maxContext <= 0 || maxContext > LONGEST_CONTEXT) {
    throw new BrokenFrameError(`the server says that its target has a context of ${maxContext} tokens`);
  }
  return { maxContext, maxDraftTokens, maxFrameBytes, idleSeconds, trees: !chainsOnly, awaySeconds, keepSeconds };
}

/** @throws BrokenFrameError it has no tokens, fewer than were accepted, or one that there is not. */
export function checkVerdict(verdict: Verdict, vocabSize: number): void {
  if (!verdict.tokens.length || verdict.accepted > verdict.tokens.length) {
    throw new BrokenFrameError("the server sent a verdict without tokens");
  }
  const largest = verdict.tokens.reduce((a, b) => Math.max(a, b));
  if (largest >= vocabSize) {
    throw new BrokenFrameError(`the server chose token ${largest} of a vocabulary of ${vocabSize}`);
  }
}

/**
 * The memory rows of a frame, if it has some that are of use.
 *
 * @param held rows that the device holds, of the first so many positions. Behind a gap rows are of no use.
 * @param end neither are those from this position on.
 * @throws BrokenFrameError sizes that do not fit together.
 */
export function rowsOf(rows: MemoryRows, held: number, end: number): RowsReceived | undefined {
  let both: { keys: Numbers; values: Numbers };
  try {
    both = decodeRows(rows);
  } catch (error) {
    if (!(error instanceof RowsError)) throw error;
    throw new BrokenFrameError(`the server sent broken memory rows: ${error.message}`);
  }
  const start = Number(rows.start);
  const count = end - start;
  if (start > held || count < 1 || !both.keys.count) return undefined;
  return { event: "RowsReceived", start, keys: firstRows(both.keys, count), values: firstRows(both.values, count) };
}

/** A fault as the application hears of it. */
export function faultOf(fault: Fault): Faulted {
  const code = FaultCode[fault.code] ?? "UNKNOWN";
  const text = shown(fault.text) || `the verifier refused, and said only ${code}`;
  return { event: "Faulted", code, text, retryAfterMs: fault.retryAfterMs };
}

/** A text from outside as it may be shown: nothing in it talks to a terminal. */
function shown(text: string): string {
  const characters = Array.from(text);
  const said = characters.slice(0, MOST_SAID).map((each) => (/^(?: |[^\p{C}\p{Z}])$/u.test(each) ? each : escaped(each)));
  return said.join("") + (characters.length > MOST_SAID ? "..." : "");
}

function escaped(character: string): string {
  const short = { "\n": "\\n", "\r": "\\r", "\t": "\\t" }[character];
  const code = character.codePointAt(0)!;
  const hex = (digits: number): string => code.toString(16).padStart(digits, "0");
  if (short) return short;
  return code < 0x100 ? `\\x${hex(2)}` : code < 0x10000 ? `\\u${hex(4)}` : `\\U${hex(8)}`;
}
