/** Frames of the client session: those from the server are parsed and checked, those to the server are built. */

import { create, fromBinary, toBinary, type MessageInitShape } from "@bufbuild/protobuf";

import {
  ClientMessageSchema,
  FaultCode,
  Finish,
  LimitsSchema,
  ServerMessageSchema,
  type Fault,
  type MemoryRows,
  type PromptSchema,
  type ResumeSchema,
  type RowEncoding,
  type ServerMessage,
  type Verdict,
  type Welcome,
} from "../wire/moa/v1/session_pb.js";
import type { Event } from "./client_table.js";
import type { Echoed, Faulted, FinishReason, RowsReceived } from "./events.js";
import { PROTOCOL_VERSION, type Fingerprints, type Limits } from "./handshake.js";
import { RowsError, decodeRows, firstRows, type KvArray } from "./memory_rows.js";
import { GRAMMAR_KINDS, type Sampling } from "./sampling.js";

// -- frames from the server ------------------------------------------------------------------------

/** Largest epoch and connection number that a Welcome may name: the client counts on from them, in 64 bits. */
const MAX_COUNT = 1n << 62n;
/** Largest context that a Welcome may name, in tokens. */
const MAX_CONTEXT = 1 << 24;
/** Characters of a fault's text that are shown. */
const MAX_FAULT_TEXT = 400;

/** A frame violates the protocol. `code`: the code of the event that reports it. */
export class BrokenFrameError extends Error {
  constructor(
    text: string,
    private readonly code = "PROTOCOL",
  ) {
    super(text);
  }

  /** The event that reports the error to the application. */
  get event(): Faulted {
    return { event: "Faulted", code: this.code, text: this.message, retryAfterMs: 0 };
  }
}

/**
 * Parse one frame.
 *
 * @throws BrokenFrameError if the frame is not a ServerMessage.
 */
export function parseServerMessage(data: Uint8Array): ServerMessage {
  try {
    return fromBinary(ServerMessageSchema, data);
  } catch {
    throw new BrokenFrameError("the server sent a frame that is no ServerMessage");
  }
}

/**
 * Return the table's event for a frame that arrives in `epoch`.
 *
 * @throws BrokenFrameError if the event is unknown.
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

/** Return why the answer ended; undefined if it continues. */
export function finishReason(finish: Finish): FinishReason | undefined {
  const reasons: Partial<Record<Finish, FinishReason>> = {
    [Finish.STOP]: "stop",
    [Finish.LENGTH]: "length",
    [Finish.CONTEXT]: "context",
    [Finish.GRAMMAR]: "grammar",
  };
  return reasons[finish];
}

/** Return an Echoed event if the frame echoes a stamp of the client, else an empty list. */
export function parseEcho({ event }: ServerMessage): Echoed[] {
  if (event.case !== "verdict" && event.case !== "standing" && event.case !== "pong") return [];
  const { echo } = event.value;
  return echo?.stamp ? [{ event: "Echoed", stamp: echo.stamp, heldS: echo.heldUs / 1e6 }] : [];
}

/**
 * Return the verifier's limits.
 *
 * @throws BrokenFrameError if the protocol version differs, or a number is out of range.
 */
export function parseLimits(welcome: Welcome): Limits {
  if (welcome.epoch > MAX_COUNT || welcome.connection > MAX_COUNT) {
    throw new BrokenFrameError(`the server counts ${welcome.epoch} epochs and ${welcome.connection} connections`);
  }
  if (welcome.protocolVersion !== PROTOCOL_VERSION) {
    const text = `the verifier speaks protocol version ${welcome.protocolVersion}, this client ${PROTOCOL_VERSION}`;
    throw new BrokenFrameError(text, "VERSION_MISMATCH");
  }
  const { maxContext, maxDraftTokens, maxFrameBytes, idleSeconds, chainsOnly, awaySeconds, keepSeconds } =
    welcome.limits ?? create(LimitsSchema);
  if (maxContext <= 0 || maxContext > MAX_CONTEXT) {
    throw new BrokenFrameError(`the server reports a context of ${maxContext} tokens`);
  }
  return { maxContext, maxDraftTokens, maxFrameBytes, idleSeconds, trees: !chainsOnly, awaySeconds, keepSeconds };
}

/** Return the type of the target's numbers, such as "int4"; empty if the verifier names none that is a plain word. */
export function parseDtype(welcome: Welcome): string {
  return /^[a-z0-9]{1,16}$/.test(welcome.dtype) ? welcome.dtype : "";
}

/**
 * Check a verdict's tokens.
 *
 * @throws BrokenFrameError if there are none or fewer than were accepted, or if one is outside the vocabulary.
 */
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
 * Decode a frame's memory rows.
 *
 * @param held number of rows that the device holds. Rows after a gap are useless.
 * @param end position from which on rows are useless.
 * @returns the rows before `end`; undefined if there are none, or if they begin after `held`.
 * @throws BrokenFrameError if the sizes in the frame disagree.
 */
export function parseRows(rows: MemoryRows, held: number, end: number): RowsReceived | undefined {
  let both: { keys: KvArray; values: KvArray };
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

/** Return the event that reports a fault to the application. */
export function parseFault(fault: Fault): Faulted {
  const code = FaultCode[fault.code] ?? "UNKNOWN";
  const text = printable(fault.text) || `the verifier refused with ${code}`;
  return { event: "Faulted", code, text, retryAfterMs: fault.retryAfterMs };
}

/** Shorten a text of the server and escape its control characters, which could command a terminal. */
function printable(text: string): string {
  const characters = Array.from(text);
  const isPrintable = (each: string): boolean => /^(?: |[^\p{C}\p{Z}])$/u.test(each);
  const shown = characters.slice(0, MAX_FAULT_TEXT).map((each) => (isPrintable(each) ? each : escaped(each)));
  return shown.join("") + (characters.length > MAX_FAULT_TEXT ? "..." : "");
}

/** Escape a character as Python does. */
function escaped(character: string): string {
  const short = { "\n": "\\n", "\r": "\\r", "\t": "\\t" }[character];
  const code = character.codePointAt(0)!;
  const hex = (digits: number): string => code.toString(16).padStart(digits, "0");
  if (short) return short;
  return code < 0x100 ? `\\x${hex(2)}` : code < 0x10000 ? `\\u${hex(4)}` : `\\U${hex(8)}`;
}

// -- frames to the server --------------------------------------------------------------------------

const LARGEST_STAMP = 2 ** 32 - 1;
/** First step of the epoch after a restore; more than the number of epochs that a program begins between snapshots. */
const EPOCH_LEAP = 1n << 20n;

/** The frame that awaits a verdict. */
export interface InFlight {
  /** The serialised Prompt or Draft. */
  readonly frame: Uint8Array;
  /** Number of drafted tokens in it. */
  readonly drafted: number;
  /** Number of tokens in it that the client supplied. */
  readonly supplied: number;
  /** False if the frame was not sent, because the Welcome already announced the verdict. */
  readonly asked: boolean;
}

/** Fields of a Prompt. */
export interface PromptFields {
  readonly rowsFrom: number;
  readonly sampling: Sampling;
  readonly maxLength: number;
  readonly whileAway: boolean;
  readonly answerFrom: number;
}

type ClientEvent = NonNullable<MessageInitShape<typeof ClientMessageSchema>["event"]>;

/** Builds the frames of a client session and holds them until they are taken. */
export class OutgoingFrames {
  /** The frame that awaits its verdict, if any. */
  inFlight: InFlight | undefined;
  /** Position up to which the server may push verdicts; 0 for none. */
  credit = 0;
  /** The credit is revoked, and the server has not confirmed it. */
  awaitsRevocation = false;
  /** Serial of the newest Credit of this connection. */
  serial = 0;
  /** Whether a frame was sent twice on this connection. */
  repeated = false;
  /** Stamp of the newest frame that has one. */
  stamp = 0;
  /** Round trip time of the link for the next Credit, microseconds; 0 if unknown. */
  roundTripUs = 0;
  private truncations: { epoch: bigint; length: number }[] = []; // of this connection: length left at an epoch's begin
  private epochStep = 1n;
  private frames: Uint8Array[] = [];

  /**
   * @param epoch epoch of new frames; every Prompt and Cancel begins one.
   * @param connection number of connections so far.
   */
  constructor(
    public epoch = 0n,
    public connection = 0n,
  ) {}

  /**
   * Restore from a snapshot. The old process may have used later epochs, so the next epoch skips ahead by 2^20 unless a
   * Welcome names the server's epoch before.
   */
  static restored(epoch: bigint, connection: bigint): OutgoingFrames {
    const outgoing = new OutgoingFrames(epoch, connection);
    outgoing.epochStep = EPOCH_LEAP;
    return outgoing;
  }

  /** Remove and return the frames built since the last call, in order. */
  take(): Uint8Array[] {
    const frames = this.frames;
    this.frames = [];
    return frames;
  }

  /** Drop the state of a lost connection: frames, the awaited verdict, serials. */
  clear(): void {
    this.inFlight = undefined;
    this.awaitsRevocation = this.repeated = false;
    this.serial = 0;
    this.truncations = [];
    this.frames = [];
  }

  /**
   * Begin an epoch: verdicts on earlier frames are void, and so is the credit.
   *
   * @param truncatedTo length to which the conversation was truncated; undefined if it was not.
   */
  beginEpoch(truncatedTo?: number): void {
    this.epoch += this.epochStep;
    this.epochStep = 1n;
    this.inFlight = undefined;
    this.endCredit();
    if (truncatedTo !== undefined) this.truncations.push({ epoch: this.epoch, length: truncatedTo });
  }

  /** Return the position up to which memory rows sent in `epoch` are valid; `end` if nothing was truncated. */
  rowsValidUntil(epoch: bigint, end: number): number {
    const later = this.truncations.filter((each) => each.epoch > epoch).map((each) => each.length);
    return later.length ? Math.min(...later) : end;
  }

  /** Adopt the counters of a Welcome if they are larger. */
  syncCounters(epoch: bigint, connection: bigint): void {
    if (epoch > this.epoch) this.epoch = epoch;
    this.epochStep = 1n;
    if (connection > this.connection) this.connection = connection;
  }

  /** Send the frame in flight and the newest Credit again; return whether there was either. */
  resend(): boolean {
    const before = this.frames.length;
    if (this.inFlight) this.frames.push(this.inFlight.frame);
    if (this.credit || this.awaitsRevocation) this.sendCredit();
    const sent = this.frames.length > before;
    this.repeated ||= sent;
    return sent;
  }

  /**
   * Send Hello on the next connection.
   *
   * @param resume the conversation to continue; its connection, epoch and credit are filled in here.
   */
  hello(fingerprints: Fingerprints, rowEncoding: RowEncoding, resume: MessageInitShape<typeof ResumeSchema>): void {
    this.connection++;
    const { connection, epoch } = this;
    const value = {
      protocolVersion: PROTOCOL_VERSION,
      newestVersion: PROTOCOL_VERSION,
      fingerprints: { ...fingerprints },
      rowEncoding,
      resume: { ...resume, connection, epoch, credit: BigInt(this.credit) },
    };
    this.frames.push(serialised({ case: "hello", value }));
  }

  /** Send Prompt. */
  prompt(baseLen: number, tokens: number[], fields: PromptFields): void {
    const { grammar, logitBias = [], repetitionPenalty = 1, ...sampling } = fields.sampling;
    const value: MessageInitShape<typeof PromptSchema> = {
      epoch: this.epoch,
      baseLen: BigInt(baseLen),
      tokens,
      rowsFrom: BigInt(fields.rowsFrom),
      sampling: {
        ...sampling,
        repetitionPenalty: repetitionPenalty === 1 ? 0 : repetitionPenalty,
        logitBias: Object.fromEntries(logitBias),
        ...(grammar ? { grammar: { kind: GRAMMAR_KINDS.indexOf(grammar.kind) + 1, text: grammar.text } } : {}),
      },
      maxLength: BigInt(fields.maxLength),
      whileAway: fields.whileAway,
      answerFrom: BigInt(fields.answerFrom),
      stamp: this.nextStamp(),
    };
    this.sendAwaited({ case: "prompt", value }, 0, tokens.length);
  }

  /** Send Draft; without `parents` the tokens are a chain, without `confidences` their probabilities are unknown. */
  draft(baseLen: number, tokens: number[], parents: number[], confidences?: Uint8Array<ArrayBuffer>): void {
    this.sendAwaited(this.draftOf(baseLen, tokens, parents, confidences), tokens.length, 0);
  }

  /** Send an unsolicited Draft. */
  unsolicited(baseLen: number, tokens: number[], parents: number[], confidences: Uint8Array<ArrayBuffer>): void {
    this.frames.push(serialised(this.draftOf(baseLen, tokens, parents, confidences, true)));
  }

  /** Await a verdict that the Welcome announced; {@link resend} asks for it with an empty Draft. */
  expectVerdict(baseLen: number): void {
    const frame = serialised({ case: "draft", value: { epoch: this.epoch, baseLen: BigInt(baseLen) } });
    this.inFlight = { frame, drafted: 0, supplied: 0, asked: false };
  }

  /** Send Credit up to `position`. */
  grantCredit(position: number): void {
    this.credit = position;
    this.awaitsRevocation = false;
    this.sendNewCredit();
  }

  /** Send Credit of position 0 and await CreditRevoked. */
  revokeCredit(): void {
    this.credit = 0;
    this.awaitsRevocation = true;
    this.sendNewCredit();
  }

  /** Drop the credit of an answer that is over; nothing is sent. */
  endCredit(): void {
    this.credit = 0;
    this.awaitsRevocation = false;
  }

  /** Send Cancel. */
  cancel(baseLen: number): void {
    this.frames.push(serialised({ case: "cancel", value: { epoch: this.epoch, baseLen: BigInt(baseLen) } }));
  }

  private draftOf(
    baseLen: number,
    tokens: number[],
    parents: number[],
    confidences = new Uint8Array(),
    unsolicited = false,
  ): ClientEvent {
    const stamp = this.nextStamp();
    const value = { epoch: this.epoch, baseLen: BigInt(baseLen), tokens, parents, stamp, unsolicited, confidences };
    return { case: "draft", value };
  }

  private sendAwaited(event: ClientEvent, drafted: number, supplied: number): void {
    this.inFlight = { frame: serialised(event), drafted, supplied, asked: true };
    this.frames.push(this.inFlight.frame);
  }

  private sendNewCredit(): void {
    this.serial++;
    this.sendCredit();
  }

  private sendCredit(): void {
    const { epoch, roundTripUs } = this;
    const value = {
      epoch,
      position: BigInt(this.credit),
      serial: BigInt(this.serial),
      stamp: this.nextStamp(),
      roundTripUs,
    };
    this.frames.push(serialised({ case: "credit", value }));
  }

  private nextStamp(): number {
    this.stamp = (this.stamp % LARGEST_STAMP) + 1;
    return this.stamp;
  }
}

function serialised(event: ClientEvent): Uint8Array {
  return toBinary(ClientMessageSchema, create(ClientMessageSchema, { event }));
}
