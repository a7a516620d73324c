/** Frames from the device to the server: their epochs, the one that awaits a verdict, and the credit. */

import { create, toBinary, type MessageInitShape } from "@bufbuild/protobuf";

import {
  ClientMessageSchema,
  type PromptSchema,
  type ResumeSchema,
  type RowEncoding,
} from "../wire/moa/v1/session_pb.js";
import { PROTOCOL_VERSION, type Fingerprints } from "./handshake.js";
import type { Sampling } from "./sampling.js";

const LARGEST_STAMP = 2 ** 32 - 1;

/** The one frame awaiting a verdict. `asked`: it was sent on this connection; else a verdict comes without. */
export interface InFlight {
  readonly frame: Uint8Array;
  readonly drafted: number;
  readonly supplied: number;
  readonly asked: boolean;
}

export interface PromptParts {
  readonly rowsFrom: number;
  readonly sampling: Sampling;
  readonly maxLength: number;
  readonly whileAway: boolean;
  readonly answerFrom: number;
}

type ClientEvent = NonNullable<MessageInitShape<typeof ClientMessageSchema>["event"]>;

/** More epochs than a program begins between two snapshots. */
const LEAP = 1n << 20n;

/** Makes frames and holds them until they are taken. */
export class Outgoing {
  /** What awaits its verdict. */
  inFlight: InFlight | undefined;
  /** The position up to which the server goes on by itself. */
  credit = 0;
  /** Of this connection's newest Credit. */
  serial = 0;
  /** Of the newest frame that has one. */
  stamp = 0;
  /** Of the link, microseconds, for the server; 0 where it is not known. */
  roundTripUs = 0;
  /** The credit was withdrawn, and the server may not have heard yet. */
  awaitsRevocation = false;
  /** Something was sent twice on this connection. */
  repeated = false;
  private cuts: { epoch: bigint; cut: number }[] = []; // epochs of this connection that cut, and where
  private frames: Uint8Array[] = [];
  private step = 1n; // from an epoch to the next

  /**
   * @param epoch of the frames made from now on; each prompt and cancellation begins one.
   * @param connection how many connections there were.
   */
  constructor(
    public epoch = 0n,
    public connection = 0n,
  ) {}

  /**
   * That of a snapshot. The program that made it may have begun more epochs, of which the server has heard: one that begins
   * before the server says so is none of them.
   */
  static restored(epoch: bigint, connection: bigint): Outgoing {
    const outgoing = new Outgoing(epoch, connection);
    outgoing.step = LEAP;
    return outgoing;
  }

  /** The frames made since the last call, in order. */
  take(): Uint8Array[] {
    const frames = this.frames;
    this.frames = [];
    return frames;
  }

  /** The connection is gone, and with it what was under way. */
  clear(): void {
    this.inFlight = undefined;
    this.awaitsRevocation = this.repeated = false;
    this.serial = 0;
    this.cuts = [];
    this.frames = [];
  }

  /**
   * Verdicts on earlier frames do not count any more, nor does the credit.
   *
   * @param cut the conversation's tokens from here on are gone; undefined where all stay.
   */
  beginEpoch(cut?: number): void {
    this.epoch += this.step;
    this.step = 1n;
    this.inFlight = undefined;
    this.endCredit();
    if (cut !== undefined) this.cuts.push({ epoch: this.epoch, cut });
  }

  /**
   * Up to which position rows that were sent at `epoch` are those of the conversation's tokens; `end` if all before it
   * are.
   */
  rowsHoldUntil(epoch: bigint, end: number): number {
    const cuts = this.cuts.filter((each) => each.epoch > epoch).map((each) => each.cut);
    return cuts.length ? Math.min(...cuts) : end;
  }

  /** The server has heard of these. */
  catchUp(epoch: bigint, connection: bigint): void {
    if (epoch > this.epoch) this.epoch = epoch;
    this.step = 1n;
    if (connection > this.connection) this.connection = connection;
  }

  /** Once more what is in flight, and the credit; says whether there is anything. */
  resend(): boolean {
    const before = this.frames.length;
    if (this.inFlight) this.frames.push(this.inFlight.frame);
    if (this.credit || this.awaitsRevocation) this.sendCredit();
    const sent = this.frames.length > before;
    this.repeated ||= sent;
    return sent;
  }

  /**
   * The Hello of the next connection.
   *
   * @param resume the conversation that goes on; its count, epoch and credit are filled in here.
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
    this.frames.push(frameOf({ case: "hello", value }));
  }

  prompt(baseLen: number, tokens: number[], parts: PromptParts): void {
    const value: MessageInitShape<typeof PromptSchema> = {
      epoch: this.epoch,
      baseLen: BigInt(baseLen),
      tokens,
      rowsFrom: BigInt(parts.rowsFrom),
      sampling: { ...parts.sampling },
      maxLength: BigInt(parts.maxLength),
      whileAway: parts.whileAway,
      answerFrom: BigInt(parts.answerFrom),
      stamp: this.nextStamp(),
    };
    this.launch({ case: "prompt", value }, 0, tokens.length);
  }

  /** A Draft; without `parents` the tokens are a chain. */
  draft(baseLen: number, tokens: number[], parents: number[]): void {
    const value = { epoch: this.epoch, baseLen: BigInt(baseLen), tokens, parents, stamp: this.nextStamp() };
    this.launch({ case: "draft", value }, tokens.length, 0);
  }

  /** The server may go on by itself up to `position`. */
  grantCredit(position: number): void {
    this.credit = position;
    this.awaitsRevocation = false;
    this.newCredit();
  }

  /** It may no longer. */
  revokeCredit(): void {
    this.credit = 0;
    this.awaitsRevocation = true;
    this.newCredit();
  }

  /** The answer is over, and with it its credit. */
  endCredit(): void {
    this.credit = 0;
    this.awaitsRevocation = false;
  }

  /** A verdict on what follows `baseLen` tokens comes without being asked for; {@link resend} asks for it. */
  expect(baseLen: number): void {
    const frame = frameOf({ case: "draft", value: { epoch: this.epoch, baseLen: BigInt(baseLen) } });
    this.inFlight = { frame, drafted: 0, supplied: 0, asked: false };
  }

  cancel(baseLen: number): void {
    this.frames.push(frameOf({ case: "cancel", value: { epoch: this.epoch, baseLen: BigInt(baseLen) } }));
  }

  private launch(event: ClientEvent, drafted: number, supplied: number): void {
    this.inFlight = { frame: frameOf(event), drafted, supplied, asked: true };
    this.frames.push(this.inFlight.frame);
  }

  private newCredit(): void {
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
    this.frames.push(frameOf({ case: "credit", value }));
  }

  private nextStamp(): number {
    this.stamp = (this.stamp % LARGEST_STAMP) + 1;
    return this.stamp;
  }
}

function frameOf(event: ClientEvent): Uint8Array {
  return toBinary(ClientMessageSchema, create(ClientMessageSchema, { event }));
}
