/** The device's link to the server: what goes over it, and what comes of that. */

import {
  Capability,
  RowEncoding,
  type Fault,
  type MemoryRows,
  type ServerMessage,
  type CreditRevoked,
  type Verdict,
  type Welcome,
} from "../wire/moa/v1/session_pb.js";
import { same } from "../sequences.js";
import { transition, type Action } from "./client_table.js";
import type { Decided, Policy, SessionEvent } from "./events.js";
import { digest, type Fingerprints } from "./handshake.js";
import {
  BrokenFrameError,
  checkVerdict,
  echoOf,
  faultOf,
  finishOf,
  classify,
  limitsOf,
  parseServerMessage,
  rowsOf,
} from "./incoming.js";
import { Link } from "./link.js";
import type { Branches } from "./tree.js";

/** The server lacks what a frame builds on; after so many times without a verdict it will never have it. */
const MOST_OUT_OF_SYNC = 8;

/**
 * A conversation and its frames: drafts go out, verdicts come in, and what a link lost is made good.
 *
 * `ClientSession` is the class to use.
 */
export class Exchange extends Link {
  /** Nothing but a new question is asked for by itself, for now; {@link resume} makes up for it. */
  held = false;
  protected resumeToken = "";
  private outOfSync = 0; // faults since the last verdict

  constructor(
    fingerprints: Fingerprints,
    stopTokens: Iterable<number>,
    policy: Policy,
    rowEncoding: RowEncoding,
    private readonly vocabSize: number,
  ) {
    super(fingerprints, stopTokens, policy, rowEncoding);
  }

  /**
   * A new connection is open: greet the server. Whoever keeps snapshots makes one before the Hello is sent.
   *
   * @throws LocalProtocolError the link is not down.
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

  /** The connection is gone. Committed and tentative tokens stay. */
  disconnected(): void {
    this.link = "down";
    this.outgoing.clear();
  }

  /**
   * Send the tentative suffix, at most `most` tokens of it, to be verified. An empty suffix asks the target for one
   * token. Returns whether a frame was made: not while the link is not up, another verdict is awaited, or no answer runs.
   *
   * @param tree sent in place of the suffix, which should be its likeliest path. Should the frame be lost with its link,
   *   or the verifier take chains only, the suffix is proposed in its stead.
   */
  propose(most?: number | null, tree?: Branches | null): boolean {
    if (!this.mayPropose) return false;
    const allowed = Math.min(most ?? Infinity, this.limits.maxDraftTokens);
    if (tree && this.limits.trees) {
      this.outgoing.draft(this.committed.length, tree.tokens.slice(0, allowed), tree.parents.slice(0, allowed));
    } else {
      this.outgoing.draft(this.committed.length, this.tentativeTokens.slice(0, allowed), []);
    }
    return true;
  }

  /** Give the server what a running answer lacks there, unless that is {@link held} back. */
  resume(): SessionEvent[] {
    if (!this.may("resume") || (this.held && this.suppliedTokens.length === this.kept)) return [];
    const replayed = this.committed.length - this.serverLength;
    this.sendPrompt();
    return replayed ? [{ event: "Resumed", replayed }] : [];
  }

  // -- frames from the server ------------------------------------------------------------------

  /** Take one frame; never throws on its content. */
  receive(data: Uint8Array): SessionEvent[] {
    try {
      const message = parseServerMessage(data);
      const { action } = transition(classify(message, this.outgoing.epoch), this.state);
      return [...echoOf(message), ...this.act(action, message.event.value)];
    } catch (error) {
      if (error instanceof BrokenFrameError) return [error.event];
      throw error;
    }
  }

  /** What the table says. It has a rule for a frame only where the rule is for such a frame. */
  private act(action: Action, said: ServerMessage["event"]["value"]): SessionEvent[] {
    switch (action) {
      case "cancelStaleAnswer":
        return this.settle(said as Welcome);
      case "reconcile":
        return this.reconcile(said as Welcome);
      case "commit":
        return this.decided(said as Verdict);
      case "commitIfResent":
        // What was sent twice may be answered twice, and the second answer say more; it is not said again.
        return this.outgoing.repeated ? this.decided(said as Verdict) : [];
      case "endRevocation":
        return this.stand(said as CreditRevoked);
      case "storeRows":
        return this.store(said as MemoryRows);
      case "replay":
        return this.catchUp(said as Fault);
      case "report":
        return [faultOf(said as Fault)];
      case "drop":
      case "passEcho":
        return [];
    }
  }

  /** The link is up; also says whether the server is in the client's epoch. */
  private greeted(welcome: Welcome): { events: SessionEvent[]; sameEpoch: boolean } {
    this.limits = limitsOf(welcome);
    this.link = "up";
    const resumed = this.resumeToken !== "" && welcome.resumeToken === this.resumeToken;
    this.resumeToken = welcome.resumeToken;
    const sameEpoch = welcome.epoch === this.outgoing.epoch;
    this.serverLength = Math.min(Number(welcome.committedLength), this.committed.length);
    this.outgoing.catchUp(welcome.epoch, welcome.connection);
    this.rowsUntil = 0;
    const drafts = welcome.capabilities.includes(Capability.DRAFTS);
    return { events: [{ event: "Welcomed", resumed, drafts }], sameEpoch };
  }

  private settle(welcome: Welcome): SessionEvent[] {
    const { events, sameEpoch } = this.greeted(welcome);
    if (welcome.epoch && !sameEpoch) {
      // An answer that was stopped meanwhile may run there.
      this.outgoing.beginEpoch();
      this.outgoing.cancel(this.serverLength);
    }
    return events;
  }

  private reconcile(welcome: Welcome): SessionEvent[] {
    const { events, sameEpoch } = this.greeted(welcome);
    const agreed = Number(welcome.committedLength);
    if (!sameEpoch || agreed !== this.known) return [...events, ...this.replay()];
    events.push(...this.commitSupplied());
    this.serverLength = agreed;
    if (welcome.verdictFollows) this.outgoing.expect(agreed);
    return [...events, ...this.resumeAnswer()];
  }

  private decided(verdict: Verdict): SessionEvent[] {
    const flight = this.outgoing.inFlight;
    checkVerdict(verdict, this.vocabSize);
    const baseLen = Number(verdict.baseLen);
    const behind = this.known - baseLen;
    if (behind < 0) {
      throw new BrokenFrameError(`the server left out tokens from ${this.known} to ${verdict.baseLen}`);
    }
    const decided = verdict.tokens.slice(behind);
    if (!decided.length || (behind && this.suppliedTokens.length)) return []; // said before
    if (behind && !same(verdict.tokens.slice(0, behind), this.committed.slice(baseLen))) {
      throw new BrokenFrameError("the server decided a position twice, and differently");
    }
    const most = Math.min(this.limits.maxContext, this.maxLength || this.limits.maxContext);
    const end = this.known + decided.length;
    if (end > most) {
      throw new BrokenFrameError(`the server wrote up to position ${end}, and the answer ends at ${most}`);
    }
    this.outgoing.inFlight = undefined;
    this.outOfSync = 0;
    const accepted = Math.max(0, verdict.accepted - behind);
    const computeS = verdict.computeUs / 1e6;
    const sharing = Math.max(1, verdict.sharing);
    let said: Decided;
    let ours = 0; // the server's own drafts are the target's text here
    if (verdict.pushed || !flight) {
      const { drafted, draftsWanted } = verdict;
      const draftS = verdict.draftUs / 1e6;
      const spent = { computeS, draftS };
      said = { event: "Decided", cause: "pushed", supplied: 0, drafted, accepted, ...spent, draftsWanted, sharing };
    } else {
      const { supplied, drafted, asked } = flight;
      const cause = asked ? "asked" : "fetched";
      const spent = { computeS, draftS: 0 };
      said = { event: "Decided", cause, supplied, drafted, accepted, ...spent, draftsWanted: false, sharing };
      ours = accepted;
    }
    const events: SessionEvent[] = [said, ...this.commitSupplied(), ...this.commit(decided, ours)];
    this.rowsUntil = Math.min(Number(verdict.rowsUntil), this.committed.length);
    this.serverLength = this.committed.length;
    const reason = finishOf(verdict.finish);
    if (this.suppliedTokens.length) {
      // By the policy, in place of the target's choice.
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

  private store(message: MemoryRows): SessionEvent[] {
    const end = this.outgoing.rowsHoldUntil(message.epoch, Number(message.start) + message.count);
    const rows = rowsOf(message, this.rows, Math.min(end, this.committed.length));
    if (!rows) return [];
    this.rows = rows.start + rows.keys.count;
    return [rows];
  }

  private stand(standing: CreditRevoked): SessionEvent[] {
    if (standing.serial === BigInt(this.outgoing.serial)) this.outgoing.awaitsRevocation = false;
    return [];
  }

  /** Give the server what it says it lacks. */
  private catchUp(fault: Fault): SessionEvent[] {
    if (!this.known) return [faultOf(fault)];
    this.outOfSync++;
    if (this.outOfSync > MOST_OUT_OF_SYNC) {
      throw new BrokenFrameError(`the server does not take what it says it lacks: ${fault.text}`);
    }
    this.serverLength = Math.min(Number(fault.committedLength), this.committed.length);
    return this.replay();
  }

  // -- answers ---------------------------------------------------------------------------------

  /** Continue a running answer with a server that has all of what it is the answer to. */
  private resumeAnswer(): SessionEvent[] {
    if (this.keepsOffline) return this.replay();
    if (!this.held) this.propose();
    return [];
  }

  /** Have a running answer continued by a server that has `serverLength` of the committed tokens. */
  protected replay(): SessionEvent[] {
    if (this.keepsOffline) this.keepTentative();
    // At least one token is replayed, so that the server has a prompt to answer.
    if (!this.suppliedTokens.length) this.serverLength = Math.min(this.serverLength, this.committed.length - 1);
    this.outgoing.beginEpoch();
    return this.resume();
  }

  /** Give the server every token it lacks: lost committed ones and the supplied ones. */
  protected sendPrompt(): void {
    const baseLen = Math.min(this.serverLength, this.committed.length);
    this.outgoing.prompt(baseLen, [...this.committed.slice(baseLen), ...this.suppliedTokens], {
      rowsFrom: this.rows,
      sampling: this.chosenSampling,
      maxLength: this.maxLength,
      whileAway: this.whileAway,
      answerFrom: this.answerStart,
    });
  }
}
