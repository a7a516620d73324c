/** The client session: the device's end of a conversation, a state machine without I/O. */

import { append, commonLength, same } from "../tokens.js";
import {
  Capability,
  RowEncoding,
  type CreditRevoked,
  type Fault,
  type MemoryRows,
  type ServerMessage,
  type Verdict,
  type Welcome,
} from "../wire/moa/v1/session_pb.js";
import {
  BrokenFrameError,
  OutgoingFrames,
  checkVerdict,
  classify,
  finishReason,
  parseDtype,
  parseEcho,
  parseFault,
  parseLimits,
  parseRows,
  parseServerMessage,
} from "./client_frames.js";
import { AWAITING, CALLS, transition, type Action, type Call, type State } from "./client_table.js";
import type { Committed, Decided, FinishReason, Origin, Policy, RolledBack, SessionEvent } from "./events.js";
import { USUAL_LIMITS, digest, type Fingerprints, type Limits } from "./handshake.js";
import { GREEDY, type Sampling } from "./sampling.js";
import { snapshotFromJson, snapshotToJson, type SnapshotJson } from "./snapshot.js";
import { encodeConfidences, likeliestChain, type DraftTree } from "./tree.js";

/** Consecutive OUT_OF_SYNC faults that are answered by a replay; the next one is reported. */
const MAX_OUT_OF_SYNC = 8;
const ANY_TOKEN = 2 ** 32;

/** The application made a call that the session's state does not allow. */
export class LocalProtocolError extends Error {
  override readonly name = "LocalProtocolError";
}

/** State of the connection to the server. `handshake`: Hello sent, no Welcome yet. */
export type LinkState = "down" | "handshake" | "up";

export interface ClientOptions {
  /** Tokens that end an answer. */
  readonly stopTokens: Iterable<number>;
  /** What happens to offline tokens that the target does not choose; `rollback` by default. */
  readonly policy?: Policy;
  /** Encoding of memory rows on the wire; int8 by default. */
  readonly rowEncoding?: RowEncoding;
  /** Size of the target's vocabulary; larger token ids are refused. */
  readonly vocabSize?: number;
}

/**
 * One conversation on the device: a committed prefix, supplied tokens of a pending prompt, a tentative suffix.
 *
 * The application appends drafted tokens ({@link extend}), has them verified ({@link propose}), passes in every frame
 * that arrives ({@link receive}) and sends the frames of {@link framesToSend}. While the device is offline, the suffix
 * grows and nothing is sent; there is no other code path for it.
 *
 * What calls and frames do in each state is defined by `client_table.ts`.
 */
export class ClientSession {
  // The conversation.
  /** Tokens that the target has confirmed. */
  committed: number[] = [];
  private suppliedTokens: number[] = [];
  private kept = 0; // number of supplied tokens, at their end, that are offline tokens kept by policy
  private tentativeTokens: number[] = [];
  private origins: Origin[] = [];
  // The answer.
  /** Whether an answer is running. */
  answering = false;
  private answerBegan: number | null = null; // committed length at which the last answer began
  private answerSampling: Sampling = GREEDY;
  private maxLength = 0;
  private whileAway = true;
  // The connection.
  /** State of the connection. */
  link: LinkState = "down";
  /** Limits of the verifier, as of the last Welcome. */
  limits: Limits = USUAL_LIMITS;
  /** Type of the numbers of the verifier's target; empty if it is unknown. */
  dtype = "";
  /** Capabilities of the last Welcome; null before the first. */
  capabilities: readonly Capability[] | null = null;
  /** If set, only a new prompt is requested from the server; {@link resume} makes up for it. */
  held = false;
  /** Whether the next connection asks for memory rows. */
  wantsRows = true;
  /** Number of memory rows that the device holds, for the first tokens of the conversation. */
  rows = 0;
  /** What happens to offline tokens that the target does not choose; may be set at any time. */
  policy: Policy;
  private readonly stopTokens: ReadonlySet<number>;
  private readonly rowEncoding: RowEncoding;
  private readonly vocabSize: number;
  private rowsUntil = 0; // rows before this position are in flight
  private resumeToken = "";
  private serverLength = 0; // length of the committed prefix that the server has
  private outOfSync = 0; // faults since the last verdict
  private outgoing = new OutgoingFrames();

  constructor(
    readonly fingerprints: Fingerprints,
    options: ClientOptions,
  ) {
    this.stopTokens = new Set(options.stopTokens);
    this.policy = options.policy ?? "rollback";
    this.rowEncoding = options.rowEncoding ?? RowEncoding.INT8;
    this.vocabSize = options.vocabSize ?? ANY_TOKEN;
  }

  // -- the conversation ----------------------------------------------------------------------------

  /** Tokens that the target has not seen or not answered yet. */
  get tentative(): readonly number[] {
    return this.tentativeTokens;
  }

  /** All tokens of the conversation: committed, supplied, tentative. A drafter continues them. */
  get tokens(): number[] {
    return [...this.committed, ...this.suppliedTokens, ...this.tentativeTokens];
  }

  /** Number of {@link tokens}. */
  get length(): number {
    return this.known + this.tentativeTokens.length;
  }

  /** Number of supplied tokens of a pending prompt. */
  get supplied(): number {
    return this.suppliedTokens.length;
  }

  /** Answer tokens after the committed prefix with their origins: first the kept ones, then the tentative ones. */
  get unconfirmed(): [number, Origin][] {
    const kept = this.keptTokens.map((token): [number, Origin] => [token, "kept"]);
    return [...kept, ...this.tentativeTokens.map((token, at): [number, Origin] => [token, this.origins[at]!])];
  }

  /** Whether the server reads unsolicited drafts and confidences, as of the last Welcome. */
  get takesUnsolicited(): boolean {
    return this.capabilities?.includes(Capability.UNSOLICITED_DRAFTS) ?? false;
  }

  /** Sampling of the last answer. */
  get sampling(): Sampling {
    return this.answerSampling;
  }

  /** Position at which the last answer began; 0 if there is none. */
  get answerStart(): number {
    return this.answerBegan ?? 0;
  }

  /** Length limit of the last answer, tokens; 0 for none. */
  get maxNewTokens(): number {
    return this.maxLength ? this.maxLength - this.answerStart : 0;
  }

  /** Number of tokens that the answer may have after the tentative ones; null without a limit. */
  get room(): number | null {
    return this.maxLength ? Math.max(0, this.maxLength - this.length) : null;
  }

  /** Why the tentative suffix is complete: an end-of-turn token or the length limit; null if it is not. */
  get tentativeFinish(): FinishReason | null {
    const last = this.tentativeTokens.at(-1);
    if (last !== undefined && this.stopTokens.has(last)) return "stop";
    return this.room === 0 ? "length" : null;
  }

  // -- the state -------------------------------------------------------------------------------------

  /** The session's state, derived from the link, the answer, the frame in flight and the credit. */
  get state(): State {
    if (this.link === "down") return this.answering ? "offlineAnswering" : "down";
    if (this.link === "handshake") return this.answering ? "resuming" : "handshake";
    if (!this.answering) return "idle";
    if (this.outgoing.awaitsRevocation) return "revoking";
    if (this.outgoing.inFlight) return this.awaitingPrefill ? "prompted" : "proposed";
    if (this.creditOpen) return "streaming";
    const serverLacksTokens = this.suppliedTokens.length > 0 || this.serverLength < this.committed.length;
    return serverLacksTokens ? "needsPrompt" : "drafting";
  }

  /** Whether {@link propose} would send a frame. */
  get mayPropose(): boolean {
    return this.may("propose");
  }

  /** Whether {@link sendUnsolicited} is allowed. */
  get maySendUnsolicited(): boolean {
    return this.takesUnsolicited && this.may("sendUnsolicited");
  }

  /** Whether {@link grantCredit} is allowed. */
  get mayGrantCredit(): boolean {
    return this.may("grantCredit");
  }

  /** Whether the next frame is due from the server: an answer, a pushed verdict, or CreditRevoked. */
  get awaitingVerdict(): boolean {
    return AWAITING.includes(this.state);
  }

  /** Whether the awaited verdict is on a Prompt, which takes the target longer. */
  get awaitingPrefill(): boolean {
    return (this.outgoing.inFlight?.supplied ?? 0) > 0;
  }

  /** Position up to which the server may push verdicts; 0 without credit. */
  get credit(): number {
    return this.outgoing.credit;
  }

  /** Whether the server pushes verdicts, or will after it has the prompt. */
  get creditOpen(): boolean {
    return this.link === "up" && this.answering && this.outgoing.credit > this.known;
  }

  /** Whether pushed verdicts may still arrive: the credit is open, or its revocation is not confirmed. */
  get serverMayPush(): boolean {
    return this.creditOpen || this.outgoing.awaitsRevocation;
  }

  /** Number of memory rows that follow without a further request. */
  get rowsComing(): number {
    return this.link === "up" ? Math.max(0, this.rowsUntil - this.rows) : 0;
  }

  /** Stamp of the newest frame that has one. */
  get stamp(): number {
    return this.outgoing.stamp;
  }

  /** Number of tokens that are not tentative: committed and supplied. */
  private get known(): number {
    return this.committed.length + this.suppliedTokens.length;
  }

  private may(call: Call): boolean {
    return this.state in CALLS[call].nextStates;
  }

  /** @throws LocalProtocolError if the state does not allow the call. */
  private check(call: Call): void {
    if (!this.may(call)) throw this.refusal(call);
  }

  private refusal(call: Call, values: { [name: string]: number } = {}): LocalProtocolError {
    const all: { [name: string]: number | string } = { link: this.link, known: this.known, ...values };
    const text = CALLS[call].refusal ?? "";
    return new LocalProtocolError(text.replace(/\{(\w+)\}/g, (_, name: string) => String(all[name])));
  }

  // -- calls: answers --------------------------------------------------------------------------------

  /**
   * Append the user's turn and ask for an answer; works offline too.
   *
   * @param tokens tokens of the user's turn.
   * @param sampling how the target chooses the answer's tokens.
   * @param maxNewTokens length limit of the answer, 0 for none.
   * @param whileAway whether the server may finish the answer while the device is disconnected.
   * @throws LocalProtocolError if an answer is running, or there are no tokens.
   */
  prompt(tokens: readonly number[], sampling: Sampling, maxNewTokens = 0, whileAway = true): void {
    this.check("prompt");
    if (!tokens.length) throw new LocalProtocolError("a prompt needs at least one token");
    this.suppliedTokens = [...tokens];
    this.kept = 0;
    this.answerSampling = sampling;
    this.answerBegan = this.known;
    this.maxLength = maxNewTokens ? this.answerBegan + maxNewTokens : 0;
    this.whileAway = whileAway;
    this.answerSupplied();
  }

  /**
   * Continue a finished answer as if its length limit had been larger; works offline too.
   *
   * @param tokens tokens between the committed ones and the end of the answer; may be empty.
   * @param answerStart position of the answer's first token.
   * @param sampling how the target chooses the next tokens.
   * @param maxNewTokens number of tokens that may be added, 0 for no limit.
   * @param whileAway as for {@link prompt}.
   * @throws LocalProtocolError if an answer is running, or this one is empty.
   */
  continueAnswer(
    tokens: readonly number[],
    answerStart: number,
    sampling: Sampling,
    maxNewTokens = 0,
    whileAway = true,
  ): void {
    this.check("continueAnswer");
    if (answerStart <= 0 || answerStart >= this.committed.length + tokens.length) {
      throw new LocalProtocolError(`can't continue an answer from ${answerStart} on: it has no tokens`);
    }
    append(this.committed, tokens);
    this.answerSampling = sampling;
    this.whileAway = whileAway;
    this.answerBegan = answerStart;
    this.maxLength = maxNewTokens ? this.committed.length + maxNewTokens : 0;
    this.answering = true;
    // As if the server had lost a running answer: replay its tokens, the server decides what follows.
    this.replay();
  }

  /**
   * Append drafted tokens to the tentative suffix.
   *
   * @throws LocalProtocolError if no answer is running.
   */
  extend(tokens: readonly number[], origin: Extract<Origin, "drafted" | "offline">): void {
    this.check("extend");
    append(this.tentativeTokens, tokens);
    append(this.origins, tokens.map(() => origin));
  }

  /** Mark all tentative tokens after the first `after` as written offline; return whether there are any. */
  declareOffline(after: number): boolean {
    this.origins = this.origins.map((origin, at) => (at < after ? origin : "offline"));
    return this.tentativeTokens.length > after;
  }

  /** End the answer at the last committed token; withdraw a prompt that the server has not answered. */
  cancel(): SessionEvent[] {
    const events = this.dropTentative();
    this.dropSupplied();
    this.answering = false;
    this.outgoing.beginEpoch(this.committed.length);
    if (this.link === "up") {
      this.outgoing.cancel(this.committed.length);
      this.serverLength = Math.min(this.serverLength, this.committed.length);
    }
    return events;
  }

  /**
   * Drop committed tokens from position `length` on; the next prompt continues from there. Nothing is sent, because a
   * Prompt names the position that it continues from.
   *
   * @throws LocalProtocolError if an answer is running, or fewer tokens are committed.
   */
  rewind(length: number): void {
    this.check("rewind");
    if (length < 0 || length > this.committed.length) {
      throw new LocalProtocolError(`can't rewind to ${length}: ${this.committed.length} tokens are committed`);
    }
    this.answerBegan = null;
    this.truncate(length);
  }

  /**
   * Truncate the last answer at `start`, keep `tokens` there and have the target continue after them. The answer may be
   * running or finished. End-of-turn tokens are left out, because the target decides where the turn ends, and so are
   * tokens for which the context has no room.
   *
   * @throws LocalProtocolError if `start` is outside the answer, or no tokens are left to keep.
   */
  keep(start: number, tokens: readonly number[]): SessionEvent[] {
    const kept = this.keepable(tokens, start);
    if (this.answerBegan === null || start < this.answerBegan || start > this.committed.length) {
      throw new LocalProtocolError(`can't keep tokens from ${start} on: no answer of the target has that position`);
    }
    if (!kept.length) throw new LocalProtocolError("can't keep an empty text");
    const events = this.dropTentative();
    this.truncate(start);
    this.suppliedTokens = kept;
    this.kept = kept.length;
    this.answerSupplied();
    return events;
  }

  /**
   * Return those of `tokens` that {@link keep} can supply at `start`: without end-of-turn tokens, and leaving room in
   * context and answer for one token of the target.
   */
  keepable(tokens: readonly number[], start: number): number[] {
    if (this.sampling.grammar) return []; // which it may violate
    const withoutStops = tokens.filter((token) => !this.stopTokens.has(token));
    const end = Math.min(this.limits.maxContext, this.maxLength || this.limits.maxContext);
    return withoutStops.slice(0, Math.max(0, end - 1 - start));
  }

  // -- calls: the connection -------------------------------------------------------------------------

  /**
   * Send Hello on a new connection. An application that keeps snapshots saves one before it sends the frame.
   *
   * @throws LocalProtocolError if the link is not down.
   */
  connect(): void {
    this.check("connect");
    this.link = "handshake";
    const known = [this.committed];
    if (this.suppliedTokens.length) known.push([...this.committed, ...this.suppliedTokens]);
    this.outgoing.hello(this.fingerprints, this.wantsRows ? this.rowEncoding : RowEncoding.UNSPECIFIED, {
      token: this.resumeToken,
      marks: known.map((tokens) => ({ length: BigInt(tokens.length), digest: digest(tokens) })),
      answering: this.answering,
      rows: BigInt(this.rows),
    });
  }

  /** Take the link down. Committed and tentative tokens stay. */
  disconnected(): void {
    this.link = "down";
    this.outgoing.clear();
  }

  /**
   * Send the tentative suffix as a Draft; an empty suffix asks the target for one token.
   *
   * @param most maximal number of tokens to send; the verifier's limit if omitted.
   * @param tree sent instead of the suffix, which should be its likeliest path. If the frame is lost with its
   *   connection, or if the verifier takes chains only, the suffix is sent instead.
   * @param claims whether all scores of the tree are the drafter's; if not, no confidences are sent.
   * @returns whether a frame was built: only in the state `drafting`.
   */
  propose(most?: number | null, tree?: DraftTree | null, claims = true): boolean {
    if (!this.mayPropose) return false;
    const allowed = Math.min(most ?? Infinity, this.limits.maxDraftTokens);
    if (tree && this.limits.trees) this.outgoing.draft(this.committed.length, ...this.partsOf(tree, allowed, claims));
    else this.outgoing.draft(this.committed.length, this.tentativeTokens.slice(0, allowed), []);
    return true;
  }

  /**
   * Send a Draft that asks for nothing: the server may verify it before it continues. The tentative suffix and the state
   * stay as they are.
   *
   * @param tree of it as many tokens are sent as the verifier takes; only the likeliest path if it takes chains only.
   * @param baseLen position of the tree's first token, at most the number of committed tokens.
   * @returns the frame's stamp, which the verdict on it names.
   * @throws LocalProtocolError if {@link maySendUnsolicited} is false, or the position is outside the answer.
   */
  sendUnsolicited(tree: DraftTree, baseLen: number): number {
    if (!this.maySendUnsolicited || baseLen < this.answerStart || baseLen > this.committed.length) {
      throw this.refusal("sendUnsolicited", { position: baseLen });
    }
    const sent = this.limits.trees ? tree : likeliestChain(tree);
    this.outgoing.unsolicited(baseLen, ...this.partsOf(sent, this.limits.maxDraftTokens));
    return this.outgoing.stamp;
  }

  /** Return the fields of a Draft with at most `allowed` tokens of `tree`. */
  private partsOf(tree: DraftTree, allowed: number, claims = true): [number[], number[], Uint8Array<ArrayBuffer>] {
    const confidences = this.takesUnsolicited && claims ? encodeConfidences(tree) : new Uint8Array();
    return [tree.tokens.slice(0, allowed), tree.parents.slice(0, allowed), confidences.slice(0, allowed)];
  }

  /**
   * Let the server push verdicts until `position` tokens are committed.
   *
   * @throws LocalProtocolError if {@link mayGrantCredit} is false, or the position is not after the known tokens.
   */
  grantCredit(position: number): void {
    if (!this.mayGrantCredit || position <= this.known) throw this.refusal("grantCredit", { position });
    this.outgoing.grantCredit(position);
  }

  /** Revoke open credit; {@link propose} is allowed after CreditRevoked arrived. Does nothing without credit. */
  revokeCredit(): void {
    if (this.may("revokeCredit") && this.creditOpen) this.outgoing.revokeCredit();
  }

  /** Set the link's round trip time, seconds, which the next Credit tells the server. */
  noteRoundTrip(seconds: number): void {
    this.outgoing.roundTripUs = Math.max(1, Math.min(Math.trunc(1e6 * seconds), 2 ** 32 - 1));
  }

  /**
   * Send the frame in flight and the newest Credit again; both ends drop duplicates.
   *
   * @returns whether a frame was built.
   */
  resend(): boolean {
    return this.may("resend") && this.outgoing.resend();
  }

  /** Send the server the tokens that it lacks, unless {@link held} forbids it. */
  resume(): SessionEvent[] {
    if (!this.may("resume") || (this.held && this.suppliedTokens.length === this.kept)) return [];
    const replayed = this.committed.length - this.serverLength;
    this.sendPrompt();
    return replayed ? [{ event: "Resumed", replayed }] : [];
  }

  /** Remove and return the frames to send, in order. */
  framesToSend(): Uint8Array[] {
    return this.outgoing.take();
  }

  // -- frames from the server ------------------------------------------------------------------------

  /** Process one frame. Never throws because of its content: a broken frame becomes a Faulted event. */
  receive(data: Uint8Array): SessionEvent[] {
    try {
      const message = parseServerMessage(data);
      const { action } = transition(classify(message, this.outgoing.epoch), this.state);
      return [...parseEcho(message), ...this.act(action, message.event.value)];
    } catch (error) {
      if (error instanceof BrokenFrameError) return [error.event];
      throw error;
    }
  }

  /** The casts are safe: the table has an action only for events of that type. */
  private act(action: Action, value: ServerMessage["event"]["value"]): SessionEvent[] {
    switch (action) {
      case "cancelStaleAnswer":
        return this.cancelStaleAnswer(value as Welcome);
      case "reconcile":
        return this.reconcile(value as Welcome);
      case "commit":
        return this.commitVerdict(value as Verdict);
      case "commitIfResent":
        // A frame that was sent twice may get two verdicts, and the second one may have more tokens.
        return this.outgoing.repeated ? this.commitVerdict(value as Verdict) : [];
      case "endRevocation":
        if ((value as CreditRevoked).serial === BigInt(this.outgoing.serial)) this.outgoing.awaitsRevocation = false;
        return [];
      case "storeRows":
        return this.storeRows(value as MemoryRows);
      case "replay":
        return this.replayMissing(value as Fault);
      case "report":
        return [parseFault(value as Fault)];
      case "drop":
      case "passEcho":
        return [];
    }
  }

  /** Bring the link up; return the events, and whether the server is in the client's epoch. */
  private welcomed(welcome: Welcome): { events: SessionEvent[]; sameEpoch: boolean } {
    this.limits = parseLimits(welcome);
    this.dtype = parseDtype(welcome);
    this.link = "up";
    const resumed = this.resumeToken !== "" && welcome.resumeToken === this.resumeToken;
    this.resumeToken = welcome.resumeToken;
    const sameEpoch = welcome.epoch === this.outgoing.epoch;
    this.serverLength = Math.min(Number(welcome.committedLength), this.committed.length);
    this.outgoing.syncCounters(welcome.epoch, welcome.connection);
    this.rowsUntil = 0;
    this.capabilities = welcome.capabilities;
    const drafts = welcome.capabilities.includes(Capability.DRAFTS);
    return { events: [{ event: "Welcomed", resumed, drafts }], sameEpoch };
  }

  private cancelStaleAnswer(welcome: Welcome): SessionEvent[] {
    const { events, sameEpoch } = this.welcomed(welcome);
    if (welcome.epoch && !sameEpoch) {
      // An answer that was cancelled offline may still run at the server.
      this.outgoing.beginEpoch();
      this.outgoing.cancel(this.serverLength);
    }
    return events;
  }

  private reconcile(welcome: Welcome): SessionEvent[] {
    const { events, sameEpoch } = this.welcomed(welcome);
    const agreed = Number(welcome.committedLength);
    if (!sameEpoch || agreed !== this.known) return [...events, ...this.replay()];
    events.push(...this.commitSupplied());
    this.serverLength = agreed;
    if (welcome.verdictFollows) this.outgoing.expectVerdict(agreed);
    if (this.keepsOfflineText) return [...events, ...this.replay()];
    if (!this.held) this.propose();
    return events;
  }

  private commitVerdict(verdict: Verdict): SessionEvent[] {
    const flight = this.outgoing.inFlight;
    checkVerdict(verdict, this.vocabSize);
    const baseLen = Number(verdict.baseLen);
    const overlap = this.known - baseLen;
    if (overlap < 0) {
      throw new BrokenFrameError(`the server left out tokens from ${this.known} to ${verdict.baseLen}`);
    }
    const added = verdict.tokens.slice(overlap);
    if (!added.length || (overlap && this.suppliedTokens.length)) return []; // a duplicate
    if (overlap && !same(verdict.tokens.slice(0, overlap), this.committed.slice(baseLen))) {
      throw new BrokenFrameError("the server decided a position twice, with different tokens");
    }
    const end = this.known + added.length;
    const limit = Math.min(this.limits.maxContext, this.maxLength || this.limits.maxContext);
    if (end > limit) {
      throw new BrokenFrameError(`the server wrote up to position ${end}, but the answer ends at ${limit}`);
    }
    this.outgoing.inFlight = undefined;
    this.outOfSync = 0;
    const accepted = Math.max(0, verdict.accepted - overlap);
    const computeS = verdict.computeUs / 1e6;
    let decided: Decided;
    const { draftStamp } = verdict;
    let acceptedHere = accepted;
    if (verdict.pushed || !flight) {
      const { drafted } = verdict;
      const rest = { computeS, draftS: verdict.draftUs / 1e6, draftStamp, sent: 0 };
      decided = { event: "Decided", cause: "pushed", supplied: 0, drafted, accepted, ...rest };
      if (!draftStamp) acceptedHere = 0; // the server's own drafts count as the target's text
    } else {
      const { supplied, asked, drafted: sent } = flight;
      const cause = asked ? "asked" : "fetched";
      const drafted = draftStamp ? Math.min(verdict.drafted, sent) : sent;
      const rest = { computeS, draftS: 0, draftStamp, sent };
      decided = { event: "Decided", cause, supplied, drafted, accepted, ...rest };
    }
    const events: SessionEvent[] = [decided, ...this.commitSupplied(), ...this.commit(added, acceptedHere)];
    this.rowsUntil = Math.min(Number(verdict.rowsUntil), this.committed.length);
    this.serverLength = this.committed.length;
    const reason = finishReason(verdict.finish);
    if (this.suppliedTokens.length) {
      // The policy `keep` overruled the target's choice.
      this.outgoing.beginEpoch(this.committed.length);
      events.push(...this.resume());
    } else if (reason) {
      events.push(...this.dropTentative());
      this.answering = false;
      this.outgoing.endCredit();
      events.push({ event: "Finished", reason });
    }
    return events;
  }

  private storeRows(message: MemoryRows): SessionEvent[] {
    const end = this.outgoing.rowsValidUntil(message.epoch, Number(message.start) + message.count);
    const rows = parseRows(message, this.rows, Math.min(end, this.committed.length));
    if (!rows) return [];
    this.rows = rows.start + rows.keys.count;
    return [rows];
  }

  /** Send the server the tokens that it reports missing. */
  private replayMissing(fault: Fault): SessionEvent[] {
    if (!this.known) return [parseFault(fault)];
    this.outOfSync++;
    if (this.outOfSync > MAX_OUT_OF_SYNC) {
      throw new BrokenFrameError(`the server still lacks tokens that were replayed: ${fault.text}`);
    }
    this.serverLength = Math.min(Number(fault.committedLength), this.committed.length);
    return this.replay();
  }

  // -- prompts ---------------------------------------------------------------------------------------

  /** Ask for an answer to the supplied tokens, now or after the link came up. */
  private answerSupplied(): void {
    this.answering = true;
    this.outgoing.beginEpoch(this.committed.length);
    if (this.link === "up") this.sendPrompt();
  }

  /** Have a running answer continued by a server that has `serverLength` of the committed tokens. */
  private replay(): SessionEvent[] {
    if (this.keepsOfflineText) this.keepTentative();
    // A Prompt needs at least one token: send the last committed one again.
    if (!this.suppliedTokens.length) this.serverLength = Math.min(this.serverLength, this.committed.length - 1);
    this.outgoing.beginEpoch();
    return this.resume();
  }

  /** Send a Prompt with all tokens that the server lacks: lost committed ones and the supplied ones. */
  private sendPrompt(): void {
    const baseLen = Math.min(this.serverLength, this.committed.length);
    this.outgoing.prompt(baseLen, [...this.committed.slice(baseLen), ...this.suppliedTokens], {
      rowsFrom: this.rows,
      sampling: this.answerSampling,
      maxLength: this.maxLength,
      whileAway: this.whileAway,
      answerFrom: this.answerStart,
    });
  }

  // -- tokens ----------------------------------------------------------------------------------------

  /** Whether the tentative suffix has offline tokens that the policy keeps; none that a grammar may forbid. */
  private get keepsOfflineText(): boolean {
    return this.policy === "keep" && !this.sampling.grammar && this.origins.includes("offline");
  }

  private get keptTokens(): number[] {
    return this.suppliedTokens.slice(this.suppliedTokens.length - this.kept);
  }

  /** Commit the supplied tokens, which the server has. */
  private commitSupplied(): SessionEvent[] {
    const kept = this.keptTokens;
    append(this.committed, this.suppliedTokens);
    this.dropSupplied();
    if (!kept.length) return [];
    return [
      { event: "Committed", start: this.committed.length - kept.length, tokens: kept, origins: kept.map(() => "kept") },
    ];
  }

  /**
   * Append a verdict's tokens to the prefix; the suffix stays as far as it agrees.
   *
   * @param added the verdict's new tokens.
   * @param accepted number of tokens that were drafted here, possibly on a branch of the tree beside the suffix.
   */
  private commit(added: number[], accepted: number): SessionEvent[] {
    const start = this.committed.length;
    const agreed = commonLength(added, this.tentativeTokens);
    const rest = this.tentativeTokens.slice(agreed);
    const restOrigins = this.origins.slice(agreed);
    const disagrees = rest.length > 0 && agreed < added.length;
    const offline = this.policy === "keep" && restOrigins.includes("offline");
    // The verdict was so late that the device has continued offline meanwhile.
    const keeps = disagrees && offline && this.keepable(rest, start + agreed).length > 0;
    const tokens = keeps ? added.slice(0, agreed) : added;
    const origins = tokens.map(
      (_, at): Origin => (at < agreed ? this.origins[at]! : at < accepted ? "drafted" : "corrected"),
    );
    append(this.committed, tokens);
    this.tentativeTokens = rest;
    this.origins = restOrigins;
    const committed: Committed = { event: "Committed", start, tokens, origins };
    if (keeps) {
      this.keepTentative();
    } else if (disagrees) {
      this.tentativeTokens = [];
      this.origins = [];
      const dropped: RolledBack = { event: "RolledBack", start: start + agreed, tokens: rest, origins: restOrigins };
      return [dropped, committed];
    }
    return [committed];
  }

  /** Turn the tentative suffix into supplied tokens. */
  private keepTentative(): void {
    const kept = this.keepable(this.tentativeTokens, this.known);
    append(this.suppliedTokens, kept);
    this.kept += kept.length;
    this.tentativeTokens = [];
    this.origins = [];
  }

  private dropTentative(): SessionEvent[] {
    const tokens = this.tentativeTokens;
    const origins = this.origins;
    this.tentativeTokens = [];
    this.origins = [];
    return tokens.length ? [{ event: "RolledBack", start: this.known, tokens, origins }] : [];
  }

  private dropSupplied(): void {
    this.suppliedTokens = [];
    this.kept = 0;
  }

  private truncate(length: number): void {
    this.committed.length = length;
    this.rows = Math.min(this.rows, length);
    this.serverLength = Math.min(this.serverLength, length);
  }

  // -- snapshots -------------------------------------------------------------------------------------

  /**
   * Return the session as JSON values for {@link restore}; allowed at any time, changes nothing. The snapshot contains
   * the conversation's tokens and its resume token: keep it as private as the text.
   */
  snapshot(): SnapshotJson {
    const saved = {
      policy: this.policy,
      limits: this.limits,
      resumeToken: this.resumeToken,
      epoch: this.outgoing.epoch,
      connection: this.outgoing.connection,
      committed: [...this.committed],
      supplied: [...this.suppliedTokens],
      kept: this.kept,
      tentative: [...this.tentativeTokens],
      origins: [...this.origins],
      answering: this.answering,
      answerStart: this.answerBegan,
      sampling: this.answerSampling,
      maxLength: this.maxLength,
      whileAway: this.whileAway,
    };
    return snapshotToJson(saved, this.fingerprints);
  }

  /**
   * Restore a session from a snapshot, with its link down and without memory rows.
   *
   * The snapshot may be older than the end of its process: the next connection names the tokens that it has, and the
   * server continues after those that it has too.
   *
   * @param fingerprints those of the present bundle. The drafter may differ, because the text is the target's.
   * @throws SnapshotError if it is not a snapshot, or has another version, target or tokenizer.
   */
  static restore(snapshot: unknown, fingerprints: Fingerprints, options: Omit<ClientOptions, "policy">): ClientSession {
    const saved = snapshotFromJson(snapshot, fingerprints, options.vocabSize ?? ANY_TOKEN);
    const session = new ClientSession(fingerprints, { ...options, policy: saved.policy });
    session.limits = saved.limits;
    session.committed = saved.committed;
    session.answering = saved.answering;
    session.suppliedTokens = saved.supplied;
    session.kept = saved.kept;
    session.tentativeTokens = saved.tentative;
    session.origins = saved.origins;
    session.answerBegan = saved.answerStart;
    session.answerSampling = saved.sampling;
    session.maxLength = saved.maxLength;
    session.whileAway = saved.whileAway;
    session.resumeToken = saved.resumeToken;
    session.outgoing = OutgoingFrames.restored(saved.epoch, saved.connection);
    return session;
  }
}
