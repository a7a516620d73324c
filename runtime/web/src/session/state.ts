/** The conversation as the device has it, whatever the link does. */

import { append, commonLength } from "../sequences.js";
import type { Committed, FinishReason, Origin, Policy, RolledBack, SessionEvent } from "./events.js";
import { USUAL_LIMITS, type Limits } from "./handshake.js";
import { GREEDY, type Sampling } from "./sampling.js";

/** The application called something that the session's state does not allow. */
export class LocalProtocolError extends Error {
  override readonly name = "LocalProtocolError";
}

/**
 * Committed prefix, supplied tokens of a prompt under way, tentative suffix; and how the answer may go on.
 *
 * Nothing in it knows of frames: `ClientSession` sends and receives them, and is the class to use.
 */
export class ConversationState {
  /** The verifier's, as it said last. */
  limits: Limits = USUAL_LIMITS;
  /** Tokens that the target has confirmed. */
  committed: number[] = [];
  /** Whether an answer runs. */
  answering = false;
  /** Memory rows that the device holds, of the first so many committed tokens. */
  rows = 0;
  protected suppliedTokens: number[] = [];
  protected kept = 0; // how many of the supplied, at their end, are offline tokens kept by policy
  protected tentativeTokens: number[] = [];
  protected origins: Origin[] = [];
  protected begunAt: number | null = null; // committed length at which the last answer began
  protected chosenSampling: Sampling = GREEDY;
  protected maxLength = 0;
  protected whileAway = true;
  protected serverLength = 0; // how much of the committed prefix the server has
  private readonly stopTokens: ReadonlySet<number>;

  /** @param policy what becomes of text written offline; may be set at any time. */
  constructor(
    stopTokens: Iterable<number>,
    public policy: Policy,
  ) {
    this.stopTokens = new Set(stopTokens);
  }

  // -- what is known ---------------------------------------------------------------------------

  /** Tokens the target has not seen or not answered yet. */
  get tentative(): readonly number[] {
    return this.tentativeTokens;
  }

  /** The whole conversation as the device sees it: what a drafter continues. */
  get tokens(): number[] {
    return [...this.committed, ...this.suppliedTokens, ...this.tentativeTokens];
  }

  /** How the target chooses in the last answer. */
  get sampling(): Sampling {
    return this.chosenSampling;
  }

  /** Position at which the last answer began; 0 where there is none. */
  get answerStart(): number {
    return this.begunAt ?? 0;
  }

  /** How many tokens the whole conversation has. */
  get length(): number {
    return this.known + this.tentativeTokens.length;
  }

  /** Tokens of a prompt under way. */
  get supplied(): number {
    return this.suppliedTokens.length;
  }

  /** Answer tokens behind the committed prefix with their origins: kept ones, then tentative ones. */
  get unconfirmed(): [number, Origin][] {
    const kept = this.keptTokens.map((token): [number, Origin] => [token, "kept"]);
    return [...kept, ...this.tentativeTokens.map((token, at): [number, Origin] => [token, this.origins[at]!])];
  }

  /** Why the device stopped writing: an end-of-turn token, or as much as was asked for; null to go on. */
  get tentativeFinish(): FinishReason | null {
    const last = this.tentativeTokens.at(-1);
    if (last !== undefined && this.stopTokens.has(last)) return "stop";
    return this.room === 0 ? "length" : null;
  }

  /** Tokens that the answer may still have behind the tentative ones; null without a limit. */
  get room(): number | null {
    return this.maxLength ? Math.max(0, this.maxLength - this.length) : null;
  }

  /** What the last answer may have; 0 for no limit. */
  get maxNewTokens(): number {
    return this.maxLength ? this.maxLength - this.answerStart : 0;
  }

  // -- a call that sends nothing -----------------------------------------------------------------

  /** All tentative tokens behind the first `after` were written during an outage; says whether there are any. */
  declareOffline(after: number): boolean {
    this.origins = this.origins.map((origin, at) => (at < after ? origin : "offline"));
    return this.tentativeTokens.length > after;
  }

  /** Those of `tokens` that can be supplied at position `start`: context and answer have room for what the target says. */
  keepable(tokens: readonly number[], start: number): number[] {
    const withoutStops = tokens.filter((token) => !this.stopTokens.has(token));
    const end = Math.min(this.limits.maxContext, this.maxLength || this.limits.maxContext);
    return withoutStops.slice(0, Math.max(0, end - 1 - start));
  }

  // -- what a session does with the tokens -------------------------------------------------------

  /** Positions of committed and supplied tokens. */
  protected get known(): number {
    return this.committed.length + this.suppliedTokens.length;
  }

  /** Whether the policy keeps tokens that were written offline. */
  protected get keepsOffline(): boolean {
    return this.policy === "keep" && this.origins.includes("offline");
  }

  private get keptTokens(): number[] {
    return this.suppliedTokens.slice(this.suppliedTokens.length - this.kept);
  }

  /** The server took the supplied tokens. */
  protected commitSupplied(): SessionEvent[] {
    const kept = this.keptTokens;
    append(this.committed, this.suppliedTokens);
    this.dropSupplied();
    if (!kept.length) return [];
    return [
      { event: "Committed", start: this.committed.length - kept.length, tokens: kept, origins: kept.map(() => "kept") },
    ];
  }

  /**
   * Extend the prefix by a verdict's tokens; the suffix stays as far as it agrees.
   *
   * @param accepted how many of the tokens were in the draft: of a tree perhaps on another path than the suffix.
   */
  protected commit(decided: number[], accepted: number): SessionEvent[] {
    const start = this.committed.length;
    const agreed = commonLength(decided, this.tentativeTokens);
    const rest = this.tentativeTokens.slice(agreed);
    const restOrigins = this.origins.slice(agreed);
    const disagrees = rest.length > 0 && agreed < decided.length;
    const offline = this.policy === "keep" && restOrigins.includes("offline");
    // Such a verdict was so late that the device has written on meanwhile.
    const keeps = disagrees && offline && this.keepable(rest, start + agreed).length > 0;
    const tokens = keeps ? decided.slice(0, agreed) : decided;
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
  protected keepTentative(): void {
    const kept = this.keepable(this.tentativeTokens, this.known);
    append(this.suppliedTokens, kept);
    this.kept += kept.length;
    this.tentativeTokens = [];
    this.origins = [];
  }

  protected dropTentative(): SessionEvent[] {
    const tokens = this.tentativeTokens;
    const origins = this.origins;
    this.tentativeTokens = [];
    this.origins = [];
    return tokens.length ? [{ event: "RolledBack", start: this.known, tokens, origins }] : [];
  }

  protected dropSupplied(): void {
    this.suppliedTokens = [];
    this.kept = 0;
  }

  protected cut(length: number): void {
    this.committed.length = length;
    this.rows = Math.min(this.rows, length);
    this.serverLength = Math.min(this.serverLength, length);
  }
}
