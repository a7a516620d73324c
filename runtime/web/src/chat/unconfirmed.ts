/** Answers that the device wrote without the target, as turns of a conversation. */

import { MoaError } from "../errors.js";
import type { Sampling } from "../session/sampling.js";
import { JsonReader, samplingFrom, samplingToJson, type Json } from "../session/snapshot.js";
import type { Message } from "../text/chat_tokenizer.js";
import { checkWishes } from "./wishes.js";

/** A turn whose text, or its end, the target has not confirmed: it is to be checked. */
export interface Unconfirmed {
  /** Index of the answer among the conversation's turns. */
  readonly turn: number;
  /** What the question was asked with: the target's choices depend on it. */
  readonly sampling: Sampling;
  /** Tokens that the answer may have; 0 for no limit. Of an answer that the user stopped, as many as it has. */
  readonly most: number;
}

/** A conversation's turns, and the marks of those that are unconfirmed. */
export interface Turns {
  readonly messages: readonly Message[];
  readonly marks: readonly Unconfirmed[];
}

/** With the keys of Python's. */
export function markToJson({ most, sampling, turn }: Unconfirmed): Json {
  return { turn, sampling: samplingToJson(sampling), most };
}

/**
 * What {@link markToJson} made.
 *
 * @param broken makes the error.
 * @throws MoaError it is broken.
 */
export function markFromJson(data: unknown, broken: (what: string) => MoaError = brokenMark): Unconfirmed {
  const mark = new JsonReader(data, "an unconfirmed turn", broken);
  return { turn: mark.number("turn"), sampling: samplingFrom(mark.inner("sampling")), most: mark.number("most") };
}

/**
 * The marks of these turns, in order.
 *
 * @throws MoaError one that is not of an answer to a question, or that no verifier could check.
 */
export function checkedMarks(marks: readonly Unconfirmed[], turns: readonly Message[]): Unconfirmed[] {
  const known = new Map<number, Unconfirmed>();
  for (const mark of marks) {
    const { most, sampling, turn } = mark;
    if (!isAnswer(turns, turn)) {
      throw new MoaError(`an unconfirmed turn must be an answer behind its question, and turn ${turn} is not`);
    }
    checkWishes(most, sampling);
    known.set(turn, mark);
  }
  return [...known.values()].sort((a, b) => a.turn - b.turn);
}

/** Whether this turn is an answer behind its question. */
export function isAnswer(turns: readonly Message[], turn: number): boolean {
  return turns[turn - 1]?.role === "user" && turns[turn]?.role === "assistant";
}

function brokenMark(what: string): MoaError {
  return new MoaError(`the mark of an unconfirmed turn is broken: ${what}`);
}
