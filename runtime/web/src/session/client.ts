/** The device's end of a conversation. */

import { append } from "../sequences.js";
import { RowEncoding } from "../wire/moa/v1/session_pb.js";
import type { Origin, Policy, SessionEvent } from "./events.js";
import { Exchange } from "./exchange.js";
import type { Fingerprints } from "./handshake.js";
import { Outgoing } from "./outgoing.js";
import type { Sampling } from "./sampling.js";
import { snapshotFromJson, snapshotToJson, type SnapshotJson } from "./snapshot.js";
import { LocalProtocolError } from "./state.js";

const ANY_TOKEN = 2 ** 32;

export interface ClientOptions {
  readonly stopTokens: Iterable<number>;
  readonly policy?: Policy;
  readonly rowEncoding?: RowEncoding;
  /** Of the target: ids from there on are refused. */
  readonly vocabSize?: number;
}

/**
 * Committed prefix, supplied tokens of a prompt under way, tentative suffix; and the link's state.
 *
 * The application adds tentative tokens with {@link extend} whenever its drafter has some, calls {@link propose} when it
 * wants them verified, hands in what arrives ({@link receive}) and sends what {@link framesToSend} holds. Going offline
 * changes nothing but that nothing is sent: the suffix grows.
 *
 * What a call does in which state, and what an arriving frame: `client_table.ts`.
 */
export class ClientSession extends Exchange {
  constructor(fingerprints: Fingerprints, options: ClientOptions) {
    const { stopTokens, policy = "rollback", rowEncoding = RowEncoding.INT8, vocabSize = ANY_TOKEN } = options;
    super(fingerprints, stopTokens, policy, rowEncoding, vocabSize);
  }

  /**
   * Add the client's own tokens (the user's turn) and ask for an answer; works offline too.
   *
   * @param maxNewTokens the answer's length limit, 0 for none.
   * @param whileAway whether the server may finish the answer while there is no link.
   * @throws LocalProtocolError an answer still runs, or there are no tokens.
   */
  prompt(tokens: readonly number[], sampling: Sampling, maxNewTokens = 0, whileAway = true): void {
    this.check("prompt");
    if (!tokens.length) throw new LocalProtocolError("a prompt needs at least one token");
    this.suppliedTokens = [...tokens];
    this.kept = 0;
    this.chosenSampling = sampling;
    this.begunAt = this.known;
    this.maxLength = maxNewTokens ? this.begunAt + maxNewTokens : 0;
    this.whileAway = whileAway;
    this.answerSupplied();
  }

  /**
   * Have an answer that has ended go on, as if its limit had been larger; works offline too.
   *
   * @param tokens what follows the committed ones, up to the answer's end; perhaps none.
   * @param answerStart the position of its first token.
   * @param maxNewTokens by how many it may become longer, 0 for no limit.
   * @throws LocalProtocolError an answer still runs, or this one has no tokens.
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
    for (const token of tokens) this.committed.push(token);
    this.chosenSampling = sampling;
    this.whileAway = whileAway;
    this.begunAt = answerStart;
    this.maxLength = maxNewTokens ? this.committed.length + maxNewTokens : 0;
    this.answering = true;
    // As after a server lost an answer that ran: it is given what it lacks, and decides what follows.
    this.replay();
  }

  /**
   * Append what the drafter wrote.
   *
   * @throws LocalProtocolError no answer runs.
   */
  extend(tokens: readonly number[], origin: Extract<Origin, "drafted" | "offline">): void {
    this.check("extend");
    append(this.tentativeTokens, tokens);
    append(this.origins, tokens.map(() => origin));
  }

  /** End the answer where the target has confirmed it; a prompt the server has not answered is taken back. */
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
   * Forget committed tokens from position `length` on: the next prompt continues from there. Nothing is sent: a Prompt
   * names the position that it continues from.
   *
   * @throws LocalProtocolError an answer runs, or fewer tokens are committed.
   */
  rewind(length: number): void {
    this.check("rewind");
    if (length < 0 || length > this.committed.length) {
      throw new LocalProtocolError(`can't rewind to ${length}: ${this.committed.length} tokens are committed`);
    }
    this.begunAt = null;
    this.cut(length);
  }

  /**
   * Take the last answer, running or ended, back to position `start` and have the target go on behind `tokens`, which
   * become kept ones. End-of-turn tokens among them are left out: where the turn ends is the target's. So are those for
   * which its context has no room.
   *
   * @throws LocalProtocolError `start` lies outside the answer, or there are no tokens to keep.
   */
  keep(start: number, tokens: readonly number[]): SessionEvent[] {
    const kept = this.keepable(tokens, start);
    if (this.begunAt === null || start < this.begunAt || start > this.committed.length) {
      throw new LocalProtocolError(`can't keep tokens from ${start} on: no answer of the target has that position`);
    }
    if (!kept.length) throw new LocalProtocolError("can't keep an empty text");
    const events = this.dropTentative();
    this.cut(start);
    this.suppliedTokens = kept;
    this.kept = kept.length;
    this.answerSupplied();
    return events;
  }

  /** Ask for an answer behind the supplied tokens, now or once the link is up. */
  private answerSupplied(): void {
    this.answering = true;
    this.outgoing.beginEpoch(this.committed.length);
    if (this.link === "up") this.sendPrompt();
  }

  // -- when the program is closed --------------------------------------------------------------

  /**
   * All that {@link restore} needs, as JSON has it; at any time, and nothing changes. It holds the conversation's tokens
   * and its resume token: keep it as private as the text.
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
      answerStart: this.begunAt,
      sampling: this.chosenSampling,
      maxLength: this.maxLength,
      whileAway: this.whileAway,
    };
    return snapshotToJson(saved, this.fingerprints);
  }

  /**
   * The session of a snapshot, with its link down and without memory rows.
   *
   * The snapshot may be older than the end of its program: the next connection says which tokens it holds, and the server
   * goes on behind those that it has too.
   *
   * @param fingerprints of the bundle now. The drafter may be another: the text is the target's.
   * @throws SnapshotError another version, another target or tokenizer, or no snapshot of a session.
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
    session.begunAt = saved.answerStart;
    session.chosenSampling = saved.sampling;
    session.maxLength = saved.maxLength;
    session.whileAway = saved.whileAway;
    session.resumeToken = saved.resumeToken;
    session.outgoing = Outgoing.restored(saved.epoch, saved.connection);
    return session;
  }
}
