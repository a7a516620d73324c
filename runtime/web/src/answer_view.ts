/** One answer from its question to its end: tokens with their origins, text and figures. */

import type { ChatTokenizer } from "./chat_tokenizer.js";
import { lengthOf, type Question } from "./conversation.js";
import type { LoopEvent, Pushed, RoundEnded } from "./drafting/events.js";
import { AnswerUpdate } from "./events.js";
import type { AnswerFinished, Disagreement, TextSpan, TokenOrigin } from "./events.js";
import type { Host } from "./host.js";
import type { Committed, FinishReason, Origin, RolledBack } from "./session/events.js";
import { copyOf, newStatistics, type Statistics } from "./statistics.js";
import { TextStream } from "./text_stream.js";
import { commonLength } from "./tokens.js";

/** Least offline tokens to ask the user about. A verdict that is a little late often overtakes a few. */
const WORTH_ASKING = 8;

/** Return the payload bytes sent and received so far, with those of earlier answers. */
export type BytesMoved = () => readonly [number, number];

/** One answer's tokens, text and figures. Made when the question is sent. */
export class AnswerRecord {
  /** Absolute position of the answer's first token. */
  readonly start: number;
  statistics: Statistics = newStatistics();
  /** The tokens rolled back in the last {@link Disagreement}. */
  disputed: RolledBack | undefined;
  /** How it ended; null while it runs. */
  ended: FinishReason | null = null;
  private tokens: TokenOrigin[] = [];
  private settled = 0; // number of tokens in the last update
  private readonly text: AnswerText;
  private rolledBack: RolledBack | undefined;
  private cause: "asked" | "pushed" | "fetched" = "asked"; // of the verdict that commits next
  private bytesBefore: readonly [number, number];
  private askedAt: number;
  private endedAt: number;

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
   * Continue the answer of another program: its confirmed tokens, their origins, and its figures. The time between the
   * programs does not count.
   */
  resume(tokens: readonly number[], origins: readonly Origin[], statistics: Statistics): void {
    this.tokens = tokens.map((token, at) => ({ token, origin: origins[at]!, committed: true }));
    this.statistics = statistics;
    const [up, down] = this.bytesBefore;
    this.bytesBefore = [up - statistics.bytesUp, down - statistics.bytesDown];
    this.askedAt -= statistics.seconds;
  }

  /** Origins of the confirmed tokens. */
  get origins(): Origin[] {
    return this.tokens.map(({ origin }) => origin);
  }

  /** Return the answer's present figures. */
  figures(): Statistics {
    const { statistics } = this;
    const [up, down] = this.bytesMoved();
    statistics.bytesUp = up - this.bytesBefore[0];
    statistics.bytesDown = down - this.bytesBefore[1];
    statistics.seconds = this.host.now() - this.askedAt;
    return copyOf(statistics);
  }

  /** Take an event of the drafting loop. */
  hear(event: LoopEvent): void {
    const { statistics } = this;
    switch (event.event) {
      case "Decided":
        this.cause = event.cause;
        break;
      case "Committed":
        this.commit(event);
        break;
      case "RolledBack": // the target's tokens are committed next
        this.rolledBack = event;
        statistics.rolledBack += event.tokens.length;
        break;
      case "Drafted":
        statistics.draftSeconds += event.seconds;
        statistics.drafted += event.unsolicited;
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

  /** Note the type of the target's numbers that a verdict comes from; empty for an unknown one. */
  noteDtype(dtype: string): void {
    const { statistics } = this;
    const known = statistics.dtype.split(", ").at(-1);
    if (dtype !== "" && dtype !== known) statistics.dtype += known === "" ? dtype : `, ${dtype}`;
  }

  private countRound(event: RoundEnded | Pushed): void {
    const { statistics } = this;
    statistics.rounds++;
    statistics.roundTrips.push(event.waitedS);
    statistics.waitSeconds += event.waitedS;
    statistics.streamed = event.event === "Pushed";
    if (event.event === "Pushed" && !event.draftStamp) {
      statistics.serverDrafted += event.drafted;
      statistics.serverAccepted += event.accepted;
    } else {
      statistics.drafted += event.event === "RoundEnded" ? event.sent : 0; // else counted when sent
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

  /** Return the answer as it stands as a first update, with the `unconfirmed` tokens and their origins. */
  update(unconfirmed: readonly (readonly [number, Origin])[]): AnswerUpdate {
    const after = unconfirmed.map(([token, origin]) => ({ token, origin, committed: false }));
    const tokens = [...this.tokens, ...after];
    const dropped = this.text.show(tokens, this.settled);
    this.settled = this.tokens.length;
    return new AnswerUpdate({ tokens, spans: this.text.spans(), statistics: this.figures() }, dropped);
  }

  /** Return the disagreement if the committed tokens that `update` shows replaced text written offline. */
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

  /** End the answer; return its last event. */
  finish(reason: FinishReason): AnswerFinished {
    this.ended = reason;
    const text = this.confirmedText();
    const spans = this.text.spans(this.complete);
    return { event: "AnswerFinished", text, tokens: [...this.tokens], reason, statistics: this.figures(), spans };
  }

  private get complete(): boolean {
    return this.ended === "stop";
  }

  /** Return the confirmed text, without half a character at its end if it was cut. */
  confirmedText(): string {
    this.text.show(this.tokens, this.settled);
    return this.text
      .spans(this.complete)
      .map(({ text }) => text)
      .join("");
  }

  /** Note that the answer has ended. */
  pauseClock(): void {
    this.endedAt = this.host.now();
  }

  /** Note that the answer is being written again; the time between does not count. */
  resumeClock(): void {
    this.askedAt += this.host.now() - this.endedAt;
  }
}

interface Run {
  readonly end: number; // after its last token
  readonly span: TextSpan;
}

/**
 * The text of an answer whose tokens are confirmed, replaced and taken back while it is shown.
 *
 * Only changes since the call before are decoded: after {@link show} of the tokens of "Paris is nice", one of "Paris is big"
 * decodes one token and returns the dropped " nice".
 */
export class AnswerText {
  private readonly stream: TextStream;
  private tokens: TokenOrigin[] = [];
  private pieces: string[] = [];
  private settled = 0; // tokens that are the same as when the runs were made
  private runs: Run[] = [];

  constructor(tokenizer: ChatTokenizer) {
    this.stream = new TextStream(tokenizer);
  }

  /**
   * Take the answer's present tokens; return the text of those that are no longer there.
   *
   * @param settled number of leading tokens that are known to be the same as at the call before.
   */
  show(tokens: readonly TokenOrigin[], settled = 0): string {
    const before = this.tokens.slice(settled).map(({ token }) => token);
    const now = tokens.slice(settled);
    const common = settled + commonLength(before, now.map(({ token }) => token));
    const dropped = this.pieces.slice(common).join("");
    this.stream.truncate(common);
    this.pieces.length = common;
    for (const { token } of tokens.slice(common)) this.pieces.push(this.stream.push(token));
    this.tokens.length = settled;
    for (const each of now) this.tokens.push(each);
    this.settled = Math.min(this.settled, settled);
    return dropped;
  }

  /**
   * Return the text, one span for each run of tokens of one origin and confirmation.
   *
   * @param complete no more tokens follow: an unfinished character at the end becomes a replacement character; otherwise it is
   *   left out.
   */
  spans(complete = false): TextSpan[] {
    // A run that ends with the settled tokens may continue after them.
    while (this.runs.length && (complete || this.runs.at(-1)!.end >= this.settled)) this.runs.pop();
    let end = this.runs.at(-1)?.end ?? 0;
    while (end < this.tokens.length) {
      const { committed, origin } = this.tokens[end]!;
      let text = "";
      for (let next = this.tokens[end]; next?.origin === origin && next.committed === committed; next = this.tokens[end]) {
        text += this.pieces[end++]!;
      }
      if (complete && end === this.tokens.length) text += this.stream.finish();
      this.runs.push({ end, span: { text, origin, committed } });
    }
    this.settled = end;
    return this.runs.map(({ span }) => span).filter(({ text }) => text);
  }

  /** Return the text of the first `count` tokens. */
  before(count: number): string {
    return this.pieces.slice(0, count).join("");
  }
}

/**
 * Return the word at the end of a text that one of its continuations completes: of "in every col" with "ours" or "umn" it is
 * "col", of "in every column" with " of it" and " and row" none.
 */
export function sharedWord(before: string, ...versions: string[]): string {
  const goesOn = versions.some((version) => /^\S/u.test(version));
  return goesOn ? /\S*$/u.exec(before)![0] : "";
}
