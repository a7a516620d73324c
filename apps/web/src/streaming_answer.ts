/** An answer while it is written or checked: from the runtime's events to a message. */

import type {
  AnswerFinished,
  AnswerUpdate,
  PauseReason,
  Sampling,
  Statistics,
  TextSpan,
  Unconfirmed,
} from "@moa-edge/runtime";

import { message, type Dropped, type Message } from "./message.js";
import { CHECKING, countWords, figuresOf, remarksOf, unconfirmedWords } from "./strings.js";

/** The question of an answer, and the answer's place in its chat. */
export interface Place {
  readonly chat: string;
  /** Index of the answer among the chat's messages. */
  readonly position: number;
  readonly question: string;
  /** Sampling of the answer; null if it is not known. */
  readonly sampling: Sampling | null;
  /** Whether the prompt ends with the mark that opens reasoning. */
  readonly begun: boolean;
}

/** The message of an answer while it is written. */
export class StreamingAnswer {
  /** The answer as it stands. */
  message: Message;
  /** Why the device does not write on; null while it does. */
  pause: PauseReason | null = null;
  /**
   * Whether the stored chat has other messages from the question on, which stay until words of this answer are confirmed.
   */
  replaces: boolean;
  private statistics: Statistics | null = null;
  private tokens = 0;
  private committed: string;
  private readonly question: Message;

  /** @param before the present answer if it is continued. */
  constructor(
    readonly place: Place,
    replaces = false,
    private readonly before: Message | null = null,
  ) {
    this.replaces = replaces;
    this.question = message("user", place.question);
    const begun = before ?? message("assistant", "", { begun: place.begun });
    this.message = { ...begun, finished: false, remarks: "", figures: [], cutOff: place.sampling };
    this.committed = begun.content;
  }

  /** Return the chat's messages, with this question and answer. */
  shownIn(messages: readonly Message[]): Message[] {
    return [...messages.slice(0, this.place.position - 1), this.question, this.message];
  }

  /** Whether the target has confirmed any words. */
  get confirmed(): boolean {
    return this.committed !== "" || (this.message.finished && this.message.content !== "");
  }

  /**
   * Whether the device has written it to its end without the verifier. No more can come before the verifier is back, so the user
   * may ask another question.
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
      remarks: remarksOf(event.statistics, event.reason, spans),
      figures: this.figures(event.text),
      cutOff: event.reason === "length" ? this.place.sampling : null,
    };
  }

  /** End it without the verifier, as `text`, which is checked later. */
  setAside(text: string, mark: Unconfirmed): void {
    const shown = this.message.content;
    const rest: TextSpan[] =
      text === shown ? [] : [{ text: text.slice(shown.length), origin: "offline", committed: false }];
    const spans = text.startsWith(shown) ? [...this.message.spans, ...rest] : [];
    const confirmed = spans.map((span) => (span.committed ? span.text : "")).join("");
    this.message = {
      ...this.message,
      content: text,
      spans,
      dropped: this.marks(text, spans, ""),
      finished: true,
      // The first words may be the target's own: it confirmed them before it went away.
      remarks: unconfirmedWords(countWords(text) - countWords(confirmed)),
      unconfirmed: { ...mark, turn: this.place.position },
      cutOff: null,
    };
  }

  /** End it early, without its unconfirmed text. */
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
      remarks: this.statistics === null ? "stopped" : remarksOf(this.statistics, null, kept),
      figures: this.figures(text),
      cutOff: this.place.sampling,
    };
  }

  private figures(text: string): string[] {
    if (this.statistics === null) return [];
    return figuresOf(this.statistics, this.tokens > 0 ? countWords(text) / this.tokens : 0);
  }

  /** Return the marks of text that was taken back, now that the answer is `text`: a mark stays as long as the text before it. */
  private marks(text: string, spans: readonly TextSpan[], dropped: string): Dropped[] {
    const before = this.message.content;
    const same = commonLength(before, text);
    const marks = this.message.dropped.filter((one) => one.offset <= same);
    if (dropped !== "") marks.push({ offset: placeOf(dropped, before, text), text: dropped });
    // If the user kept the device's text, nothing was taken back there.
    return marks.filter((one) => !text.startsWith(one.text, one.offset) && !isKept(one.offset, spans));
  }

  /** Return spans with the stored origins of a continued answer, which the runtime may have forgotten. */
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

/** An answer written offline while it is checked. The stored one stays until the check is done. */
export class CheckedAnswer extends StreamingAnswer {
  done = false;

  /** @param written the answer as the device wrote it. */
  constructor(
    place: Place,
    readonly written: Message,
    readonly mark: Unconfirmed,
  ) {
    super(place, true);
    this.message = { ...written, dropped: [] };
  }

  /** The stored answer is replaced as a whole, not by its first confirmed words. */
  override get confirmed(): boolean {
    return false;
  }

  override get endedAlone(): boolean {
    return false;
  }

  override shownIn(messages: readonly Message[]): Message[] {
    return messages.with(this.place.position, this.done ? this.message : { ...this.written, remarks: CHECKING });
  }

  override finish(event: AnswerFinished): void {
    super.finish(event);
    const spans = withConfirmedOrigins(this.message.spans, this.written);
    this.message = { ...this.message, spans, unconfirmed: null };
    this.done = true;
  }
}

/**
 * Return the checked text's spans, in which text that the target had confirmed in `written` keeps its origin. A check hands
 * the whole answer to the target, so that all of it seems to be the device's.
 */
export function withConfirmedOrigins(spans: readonly TextSpan[], written: Message): TextSpan[] {
  const known = written.spans.flatMap((span) => Array.from({ length: span.text.length }, () => span));
  const text = spans.map((span) => span.text).join("");
  const same = known.length === 0 ? 0 : commonLength(text, written.content);
  const found: TextSpan[] = [];
  let at = 0;
  for (const span of spans) {
    for (const letter of span.text.split("")) {
      const origin = at < same && known[at]!.committed ? known[at]!.origin : span.origin;
      const last = found.at(-1);
      if (last?.origin === origin) found[found.length - 1] = { ...last, text: last.text + letter };
      else found.push({ text: letter, origin, committed: true });
      at++;
    }
  }
  return found;
}

/** Return whether the user kept the text at an offset. */
function isKept(offset: number, spans: readonly TextSpan[]): boolean {
  for (const span of spans) {
    if (offset < span.text.length) return span.origin === "kept";
    offset -= span.text.length;
  }
  return false;
}

/** Return the offset in `after` of the dropped end of `before`, which may have the same beginning as the new text. */
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
