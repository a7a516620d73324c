/** An answer while it is written: from the runtime's events to a message. */

import type {
  AnswerFinished,
  AnswerUpdate,
  PauseReason,
  Sampling,
  Statistics,
  TextSpan,
  Unconfirmed,
} from "@moa-edge/runtime";

import { message, type Dropped, type Message } from "../chats/message.js";
import { countWords, unconfirmedWords } from "../words.js";
import { figuresOf, remarksOf } from "./figures.js";

/** What is asked: in which chat, and where the answer stands in it. */
export interface Place {
  readonly chat: string;
  /** Of the answer among the chat's messages. */
  readonly position: number;
  readonly question: string;
  /** How the target chooses; null where that is not known. */
  readonly sampling: Sampling | null;
}

export class Answering {
  /** The answer as it stands. */
  message: Message;
  /** Why the device does not write on; null while it does. */
  pause: PauseReason | null = null;
  /**
   * Whether the stored chat has other turns from the question on, which stay until words of this answer are confirmed.
   */
  replaces: boolean;
  private statistics: Statistics | null = null;
  private tokens = 0;
  private committed: string;
  private readonly question: Message;

  /** @param before the answer as it was, where it is continued. */
  constructor(
    readonly place: Place,
    replaces = false,
    private readonly before: Message | null = null,
  ) {
    this.replaces = replaces;
    this.question = message("user", place.question);
    const begun = before ?? message("assistant", "");
    this.message = { ...begun, finished: false, remarks: "", figures: [], cutOff: place.sampling };
    this.committed = begun.content;
  }

  /** The messages of its chat, with question and answer as they stand. */
  shownIn(messages: readonly Message[]): Message[] {
    return [...messages.slice(0, this.place.position - 1), this.question, this.message];
  }

  /** Whether the target has confirmed any words. */
  get confirmed(): boolean {
    return this.committed !== "" || (this.message.finished && this.message.content !== "");
  }

  /**
   * Whether the device has written it to its end without the verifier: nothing more can come before that is back, and the user
   * may ask on.
   */
  get endedAlone(): boolean {
    const alone = this.message.spans.some((span) => span.origin === "offline" && !span.committed);
    return alone && !this.replaces && (this.pause === "end" || this.pause === "length");
  }

  update(event: AnswerUpdate): void {
    const text = event.committed + event.tentative;
    if (text !== this.message.content) this.pause = null;
    this.committed = event.committed;
    this.statistics = event.statistics;
    this.tokens = event.tokens.length;
    const spans = this.withKnown(event.spans);
    const dropped = this.marks(text, spans, event.dropped);
    this.message = { ...this.message, content: text, spans, dropped, finished: false };
  }

  finish(event: AnswerFinished): void {
    this.statistics = event.statistics;
    this.tokens = event.tokens.length;
    this.committed = event.text;
    const spans = this.withKnown(event.spans);
    this.message = {
      ...this.message,
      content: event.text,
      spans,
      dropped: this.marks(event.text, spans, ""),
      finished: true,
      remarks: remarksOf(event.statistics, event.reason),
      figures: this.figures(event.text),
      cutOff: event.reason === "length" ? this.place.sampling : null,
    };
  }

  /** It ended without the verifier, as `text`, which is checked later. */
  setAside(text: string, mark: Unconfirmed): void {
    const shown = this.message.content;
    const rest: TextSpan[] =
      text === shown ? [] : [{ text: text.slice(shown.length), origin: "offline", committed: false }];
    const spans = text.startsWith(shown) ? [...this.message.spans, ...rest] : [];
    this.message = {
      ...this.message,
      content: text,
      spans,
      dropped: this.marks(text, spans, ""),
      finished: true,
      remarks: unconfirmedWords(text),
      unconfirmed: { ...mark, turn: this.place.position },
      cutOff: null,
    };
  }

  /** It ended early: what is not confirmed goes. */
  stop(): void {
    if (this.before !== null && this.committed === this.before.content) {
      this.message = this.before;
      return;
    }
    const text = this.committed;
    let left = text.length;
    const kept: TextSpan[] = [];
    for (const span of this.message.spans) {
      if (left > 0) kept.push({ ...span, text: span.text.slice(0, left) });
      left -= span.text.length;
    }
    this.message = {
      ...this.message,
      content: text,
      spans: kept,
      dropped: this.message.dropped.filter((one) => one.offset <= text.length),
      finished: true,
      remarks: this.statistics === null ? "stopped" : remarksOf(this.statistics, null),
      figures: this.figures(text),
      cutOff: this.place.sampling,
    };
  }

  private figures(text: string): string[] {
    if (this.statistics === null) return [];
    return figuresOf(this.statistics, this.tokens > 0 ? countWords(text) / this.tokens : 0);
  }

  /** What was taken back, now that the answer is `text`: a mark stays while the text before it does. */
  private marks(text: string, spans: readonly TextSpan[], dropped: string): Dropped[] {
    const before = this.message.content;
    const same = commonLength(before, text);
    const marks = this.message.dropped.filter((one) => one.offset <= same);
    if (dropped !== "") marks.push({ offset: placeOf(dropped, before, text), text: dropped });
    // Where the user kept the device's text nothing of it was taken back.
    return marks.filter((one) => !text.startsWith(one.text, one.offset) && !isKept(one.offset, spans));
  }

  /** Of what is continued the origins are stored; the runtime may have forgotten them. */
  private withKnown(spans: readonly TextSpan[]): readonly TextSpan[] {
    const before = this.before;
    const text = spans.map((span) => span.text).join("");
    if (before === null || before.spans.length === 0 || !text.startsWith(before.content)) return spans;
    let skipped = before.content.length;
    const kept: TextSpan[] = [];
    for (const span of spans) {
      if (skipped < span.text.length) kept.push({ ...span, text: span.text.slice(skipped) });
      skipped = Math.max(0, skipped - span.text.length);
    }
    return [...before.spans, ...kept];
  }
}

/** Whether the user kept what stands at an offset. */
function isKept(offset: number, spans: readonly TextSpan[]): boolean {
  for (const span of spans) {
    if (offset < span.text.length) return span.origin === "kept";
    offset -= span.text.length;
  }
  return false;
}

/** Where in `after` the end of `before` stood that was dropped: it may have begun like what stands there now. */
function placeOf(dropped: string, before: string, after: string): number {
  return before.endsWith(dropped)
    ? Math.min(before.length - dropped.length, after.length)
    : commonLength(before, after);
}

function commonLength(one: string, other: string): number {
  let length = 0;
  while (length < one.length && one[length] === other[length]) length++;
  return length;
}
