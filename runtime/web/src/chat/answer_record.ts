/** One answer from its question to its end: tokens with their origins, text and figures. */

import type { LoopEvent, Pushed, RoundEnded } from "../drafting/events.js";
import type { AnswerFinished, AnswerUpdate, Disagreement, TokenOrigin } from "../events.js";
import type { Host } from "../link/host.js";
import type { Committed, FinishReason, Origin, RolledBack } from "../session/events.js";
import type { ChatTokenizer } from "../text/chat_tokenizer.js";
import { AnswerText, sharedWord } from "./answer_text.js";
import { lengthOf, type Question } from "./conversation.js";
import { copyOf, newStatistics, type Statistics } from "./statistics.js";

/** Tokens written offline. A verdict that is a little late often overtakes a few, about which nobody wants to be asked. */
const WORTH_ASKING = 8;

/** Payload bytes sent and received so far, those of earlier answers included. */
export type BytesMoved = () => readonly [number, number];

/** Made when the question is sent. */
export class AnswerRecord {
  /** Absolute position of the answer's first token. */
  readonly start: number;
  /** Its figures. */
  statistics: Statistics = newStatistics();
  /** What was rolled back in the last {@link Disagreement}. */
  disputed: RolledBack | undefined;
  /** How it ended; null while it runs. */
  ended: FinishReason | null = null;
  private tokens: TokenOrigin[] = [];
  private settled = 0; // how many of them were shown
  private readonly text: AnswerText;
  private rolledBack: RolledBack | undefined;
  private cause: "asked" | "pushed" | "fetched" = "asked"; // how what is committed next came
  private bytesBefore: readonly [number, number];
  private askedAt: number;
  private endedAt: number;

  /** @param question what is answered. */
  constructor(
    private readonly tokenizer: ChatTokenizer,
    readonly question: Question,
    private readonly bytesMoved: BytesMoved,
    private readonly host: Host,
  ) {
    this.start = lengthOf(question);
    this.text = new AnswerText(tokenizer);
    this.bytesBefore = bytesMoved();
    this.askedAt = this.endedAt = host.now();
  }

  /**
   * Go on with the answer of another program: its confirmed tokens, where these came from, and its figures. The time
   * between the programs does not count.
   */
  resume(tokens: readonly number[], origins: readonly Origin[], statistics: Statistics): void {
    this.tokens = tokens.map((token, at) => ({ token, origin: origins[at]!, committed: true }));
    this.statistics = statistics;
    const [up, down] = this.bytesBefore;
    this.bytesBefore = [up - statistics.bytesUp, down - statistics.bytesDown];
    this.askedAt -= statistics.seconds;
  }

  /** Of the confirmed tokens. */
  get origins(): Origin[] {
    return this.tokens.map(({ origin }) => origin);
  }

  /** The answer's figures as they are now. */
  figures(): Statistics {
    const { statistics } = this;
    const [up, down] = this.bytesMoved();
    statistics.bytesUp = up - this.bytesBefore[0];
    statistics.bytesDown = down - this.bytesBefore[1];
    statistics.seconds = this.host.now() - this.askedAt;
    return copyOf(statistics);
  }

  /** Take what the drafting loop tells. */
  hear(event: LoopEvent): void {
    const { statistics } = this;
    switch (event.event) {
      case "Decided":
        this.cause = event.cause;
        break;
      case "Committed":
        this.commit(event);
        break;
      case "RolledBack": // what the target wrote instead is committed next
        this.rolledBack = event;
        statistics.rolledBack += event.tokens.length;
        break;
      case "Drafted":
        statistics.draftSeconds += event.seconds;
        break;
      case "RoundEnded":
      case "Pushed":
        this.countRound(event);
        break;
      case "LinkLost":
        statistics.reconnects++;
        break;
      default:
    }
  }

  private countRound(event: RoundEnded | Pushed): void {
    const { statistics } = this;
    statistics.rounds++;
    statistics.roundTrips.push(event.waitedS);
    statistics.waitSeconds += event.waitedS;
    statistics.serverDrafts = event.event === "Pushed";
    if (statistics.serverDrafts) {
      statistics.serverDrafted += event.drafted;
      statistics.serverAccepted += event.accepted;
    } else {
      statistics.drafted += event.drafted;
      statistics.accepted += event.accepted;
    }
  }

  private commit({ origins, tokens }: Committed): void {
    const { statistics } = this;
    if (tokens.length) statistics.firstTokenSeconds ??= this.host.now() - this.askedAt;
    const kept = origins.filter((origin) => origin === "kept").length;
    const decided = tokens.length - kept;
    statistics.tokens += tokens.length;
    statistics.kept += kept;
    statistics.fetched += this.cause === "fetched" ? decided : 0;
    statistics.pushed += this.cause === "pushed" ? decided : 0;
    statistics.offline += kept + origins.filter((origin) => origin === "offline").length;
    tokens.forEach((token, at) => this.tokens.push({ token, origin: origins[at]!, committed: true }));
  }

  /** The answer as it stands, with tokens and origins that are not confirmed. */
  update(unconfirmed: readonly (readonly [number, Origin])[]): AnswerUpdate {
    const behind = unconfirmed.map(([token, origin]) => ({ token, origin, committed: false }));
    const tokens = [...this.tokens, ...behind];
    const dropped = this.text.show(tokens, this.settled);
    this.settled = this.tokens.length;
    const spans = this.text.spans();
    const textOf = (committed: boolean): string =>
      spans.map((span) => (span.committed === committed ? span.text : "")).join("");
    return {
      event: "AnswerUpdate",
      committed: textOf(true),
      tentative: textOf(false),
      tokens,
      statistics: this.figures(),
      spans,
      dropped,
    };
  }

  /** Whether the commitment that `update` shows took the place of text written offline. */
  disagreement(update: AnswerUpdate): Disagreement | undefined {
    const { rolledBack } = this;
    this.rolledBack = undefined;
    if (!rolledBack) return undefined;
    const { origins, tokens } = rolledBack;
    const { stopTokens } = this.tokenizer;
    const written = tokens.filter((token, at) => origins[at] === "offline" && !stopTokens.has(token));
    if (written.length < WORTH_ASKING) return undefined;
    this.disputed = rolledBack;
    const position = rolledBack.start - this.start;
    const before = this.text.before(position);
    const text = update.committed + update.tentative;
    const shared = sharedWord(before, update.dropped, text.slice(before.length));
    const offset = before.length - shared.length;
    return {
      event: "Disagreement",
      position,
      offset,
      droppedText: shared + update.dropped,
      replacementText: text.slice(offset),
    };
  }

  /** Forget the confirmed tokens from absolute `position` on. */
  takeBack(position: number): void {
    const taken = this.tokens.splice(position - this.start);
    this.settled = Math.min(this.settled, this.tokens.length);
    const kept = taken.filter(({ origin }) => origin === "kept").length;
    this.statistics.tokens -= taken.length;
    this.statistics.kept -= kept;
    this.statistics.takenBack += taken.length - kept;
    this.rolledBack = undefined;
    this.ended = null;
  }

  /** The whole answer. */
  finish(reason: FinishReason): AnswerFinished {
    this.ended = reason;
    const text = this.confirmedText();
    const spans = this.text.spans(true);
    return { event: "AnswerFinished", text, tokens: [...this.tokens], reason, statistics: this.figures(), spans };
  }

  /** The text up to here, nothing tentative. */
  confirmedText(): string {
    this.text.show(this.tokens, this.settled);
    return this.text
      .spans(true)
      .map(({ text }) => text)
      .join("");
  }

  /** The answer has ended. */
  pauseClock(): void {
    this.endedAt = this.host.now();
  }

  /** The answer is being written again; the time between does not count. */
  resumeClock(): void {
    this.askedAt += this.host.now() - this.endedAt;
  }
}
