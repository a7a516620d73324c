/** The device's link to the server as the session sees it, and whose turn it is to speak. */

import type { RowEncoding } from "../wire/moa/v1/session_pb.js";
import { AWAITING, CALLS, type Call, type State } from "./client_table.js";
import type { Policy } from "./events.js";
import type { Fingerprints } from "./handshake.js";
import { Outgoing } from "./outgoing.js";
import { ConversationState, LocalProtocolError } from "./state.js";

/** `handshake`: the Hello is sent, and no Welcome came yet. */
export type LinkState = "down" | "handshake" | "up";

/** A conversation with frames that are to be sent, and what is awaited. */
export class Link extends ConversationState {
  /** Its state. */
  link: LinkState = "down";
  /** Whether the next connection asks for memory rows. */
  wantsRows = true;
  protected rowsUntil = 0; // rows up to here are under way
  protected outgoing = new Outgoing();

  constructor(
    readonly fingerprints: Fingerprints,
    stopTokens: Iterable<number>,
    policy: Policy,
    protected readonly rowEncoding: RowEncoding,
  ) {
    super(stopTokens, policy);
  }

  /** Where the session is, which follows from what it holds. */
  get state(): State {
    if (this.link === "down") return this.answering ? "offlineAnswering" : "down";
    if (this.link === "handshake") return this.answering ? "resuming" : "handshake";
    if (!this.answering) return "idle";
    if (this.outgoing.awaitsRevocation) return "revoking";
    if (this.outgoing.inFlight) return this.awaitingPrefill ? "prompted" : "proposed";
    if (this.creditOpen) return "streaming";
    return this.owesPrompt ? "needsPrompt" : "drafting";
  }

  /** Whether `propose` would send something. */
  get mayPropose(): boolean {
    return this.may("propose");
  }

  /** Whether the server is to speak next: to answer a frame, within the credit, or once it is withdrawn. */
  get awaitingVerdict(): boolean {
    return AWAITING.includes(this.state);
  }

  /** Whether the server goes on by itself, or will once it has the prompt. */
  get creditOpen(): boolean {
    return this.link === "up" && this.answering && this.outgoing.credit > this.known;
  }

  /** The position up to which it may; 0 for none. */
  get credit(): number {
    return this.outgoing.credit;
  }

  /** Whether it goes on by itself, or has not heard yet that it may no longer. */
  get serverMayPush(): boolean {
    return this.creditOpen || this.outgoing.awaitsRevocation;
  }

  /** Whether {@link grantCredit} is allowed. */
  get mayGrantCredit(): boolean {
    return this.may("grantCredit");
  }

  /** Memory rows that are on their way, with nothing that the server waits for between. */
  get rowsComing(): number {
    return this.link === "up" ? Math.max(0, this.rowsUntil - this.rows) : 0;
  }

  /** Of the newest frame that has one. */
  get stamp(): number {
    return this.outgoing.stamp;
  }

  /** Whether the verdict awaited is a Prompt's, which takes the target longer. */
  get awaitingPrefill(): boolean {
    return (this.outgoing.inFlight?.supplied ?? 0) > 0;
  }

  /** What a frame and its answer take on the link, seconds: the server hears it with the next credit. */
  noteRoundTrip(seconds: number): void {
    this.outgoing.roundTripUs = Math.max(1, Math.min(Math.trunc(1e6 * seconds), 2 ** 32 - 1));
  }

  /** Take the frames that are to be sent, in order. */
  framesToSend(): Uint8Array[] {
    return this.outgoing.take();
  }

  /**
   * Let the server go on by itself until `position` tokens are committed; its verdicts come unasked.
   *
   * @throws LocalProtocolError not {@link mayGrantCredit}, or that much is committed.
   */
  grantCredit(position: number): void {
    if (!this.mayGrantCredit || position <= this.known) throw this.refusal("grantCredit", { position });
    this.outgoing.grantCredit(position);
  }

  /** Withdraw the credit; once the server stands, `propose` is allowed. Nothing where there is none. */
  revokeCredit(): void {
    if (this.may("revokeCredit") && this.creditOpen) this.outgoing.revokeCredit();
  }

  /** Send what is in flight once more; both ends drop the copy that proves needless. */
  resend(): boolean {
    return this.may("resend") && this.outgoing.resend();
  }

  // -- the table -------------------------------------------------------------------------------

  protected may(call: Call): boolean {
    return this.state in CALLS[call].nextStates;
  }

  protected refusal(call: Call, said: { [name: string]: number } = {}): LocalProtocolError {
    const all: { [name: string]: number | string } = { link: this.link, known: this.known, ...said };
    const text = CALLS[call].refusal ?? "";
    return new LocalProtocolError(text.replace(/\{(\w+)\}/g, (_, name: string) => String(all[name])));
  }

  /** @throws LocalProtocolError the state action not allow it. */
  protected check(call: Call): void {
    if (!this.may(call)) throw this.refusal(call);
  }

  /** Whether the server lacks tokens that only a Prompt gives it. */
  protected get owesPrompt(): boolean {
    return this.suppliedTokens.length > 0 || this.serverLength < this.committed.length;
  }
}
