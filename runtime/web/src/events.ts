/** Events that a chat sends to its application. */

import type { FinishReason, Origin } from "./session/events.js";
import type { Statistics } from "./statistics.js";
import { commonLength } from "./tokens.js";

/** One token of the answer, with its origin, and whether the target has confirmed it. */
export interface TokenOrigin {
  readonly token: number;
  readonly origin: Origin;
  readonly committed: boolean;
}

/** A stretch of the answer's text of one origin. A character of several tokens belongs to its last one. */
export interface TextSpan {
  readonly text: string;
  readonly origin: Origin;
  readonly committed: boolean;
}

/** An answer as it was at an update. */
export interface WholeAnswer {
  /** All tokens, the tentative ones last. */
  readonly tokens: readonly TokenOrigin[];
  /** The text, cut at each change of origin or confirmation. */
  readonly spans: readonly TextSpan[];
  readonly statistics: Statistics;
}

function textOf({ spans }: WholeAnswer, committed: boolean): string {
  return spans.map((span) => (span.committed === committed ? span.text : "")).join("");
}

/**
 * What is new in the answer. `committed`, `spans`, `tokens` and `statistics` are those of the whole answer at this update; as
 * getters they are not part of its JSON.
 */
export class AnswerUpdate {
  readonly event = "AnswerUpdate";
  /** Text that the target has confirmed since the update before. Joined they are the answer. */
  readonly text: string;
  /** Text after it that may still change. A character that lacks tokens is in neither. */
  readonly tentative: string;
  /**
   * Offset of `text` in the answer, in UTF-16 code units. It is less than the length of the text so far only if the user has
   * replaced confirmed text (`Chat.keepMine`).
   */
  readonly start: number;
  readonly #whole: WholeAnswer;

  /**
   * @param before all confirmed text of the update before.
   * @param dropped tentative text of the update before that was rolled back; mostly empty.
   */
  constructor(whole: WholeAnswer, readonly dropped = "", before = "") {
    const committed = textOf(whole, true);
    this.start = committed.startsWith(before) ? before.length : commonLength(before, committed); // nearly always the first
    this.text = committed.slice(this.start);
    this.tentative = textOf(whole, false);
    this.#whole = whole;
  }

  /** Return it as the update after one with this confirmed text. */
  since(before: string): AnswerUpdate {
    return new AnswerUpdate(this.#whole, this.dropped, before);
  }

  /** All text that the target has confirmed. */
  get committed(): string {
    return textOf(this.#whole, true);
  }

  get tokens(): readonly TokenOrigin[] {
    return this.#whole.tokens;
  }

  get spans(): readonly TextSpan[] {
    return this.#whole.spans;
  }

  get statistics(): Statistics {
    return this.#whole.statistics;
  }
}

/** The link's state, as a user should see it; `reconnecting`: a connection is being made. */
export interface LinkChanged {
  readonly event: "LinkChanged";
  readonly status: "online" | "reconnecting" | "offline";
  /** What has happened, a clause for the user. */
  readonly detail: string;
  /** Seconds until the next attempt; null if there will be none. */
  readonly retryInS: number | null;
  /** Whether the link is up, but a verdict is late, so that the device writes on. */
  readonly late: boolean;
}

/**
 * The target's text differs from the text written offline, by some words at least (policy `ask`).
 *
 * The answer continues with the target's version; `Chat.keepMine` restores the device's.
 */
export interface Disagreement {
  readonly event: "Disagreement";
  /** Index of the first token of the answer that differs. */
  readonly position: number;
  /** Offset of the first word that differs in the answer's text, in UTF-16 code units, as `slice` counts. */
  readonly offset: number;
  /** Text that the device had written from that word on. */
  readonly droppedText: string;
  /** The target's version, as far as it is known. */
  readonly replacementText: string;
}

/** Why the device does not write on. */
export type PauseReason = "limit" | "end" | "length" | "unsure" | "unprepared" | "background" | "low power" | "grammar" | "off";

/** The device does not write on, mostly because the verifier is away; the answer continues when that has changed. */
export interface Paused {
  readonly event: "Paused";
  readonly reason: PauseReason;
}

/** The last event of an answer. */
export interface AnswerFinished {
  readonly event: "AnswerFinished";
  /** The whole text. */
  readonly text: string;
  readonly tokens: readonly TokenOrigin[];
  readonly reason: FinishReason;
  readonly statistics: Statistics;
  /** As in {@link WholeAnswer}. */
  readonly spans: readonly TextSpan[];
}

export type ChatEvent = AnswerUpdate | LinkChanged | Disagreement | Paused | AnswerFinished;
