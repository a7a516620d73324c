/** A stored message of a conversation. */

import { splitReasoning, type Message as Turn, type Origin, type Sampling, type TextSpan, type Unconfirmed } from "@moa-edge/runtime";

const TITLE_LENGTH = 48;

/** Text that was taken back while an answer was written, and its offset in the answer. */
export interface Dropped {
  readonly offset: number;
  readonly text: string;
}

/** One turn. Objects are replaced, never changed, so that a view detects changes by identity. */
export interface Message {
  readonly role: "user" | "assistant";
  readonly content: string;
  /** The content cut by origin; joined they are the content. Empty if no origins are known. */
  readonly spans: readonly TextSpan[];
  /** Texts that were taken back, by offset. */
  readonly dropped: readonly Dropped[];
  /** False for an answer that is being written, or was when the page ended. */
  readonly finished: boolean;
  /** One line about the answer, perhaps empty. */
  readonly remarks: string;
  /** Statistics of the answer, in words. */
  readonly figures: readonly string[];
  /** The mark of an answer that the device wrote without the verifier, and that is still to be checked. */
  readonly unconfirmed: Unconfirmed | null;
  /** Sampling of an answer that can be continued: one cut off at its greatest length, or stopped. */
  readonly cutOff: Sampling | null;
  /** Fingerprint of the answer's target; empty if it is not known. */
  readonly target: string;
  /** Whether the prompt ended with the mark that opens reasoning, so that the content begins inside. */
  readonly begun: boolean;
}

export function message(role: Message["role"], content: string, more: Partial<Message> = {}): Message {
  const plain = { spans: [], dropped: [], finished: true, remarks: "", figures: [], unconfirmed: null, cutOff: null };
  return { role, content, ...plain, target: "", begun: false, ...more };
}

/** Return the message of an answer that is no longer written. */
export function settled(one: Message): Message {
  return one.finished ? one : { ...one, finished: true, remarks: "interrupted" };
}

/** Return the reasoning of an answer, and what follows it, each with its spans and texts that were taken back. */
export function parted(one: Message): { reasoning: Message | null; answer: Message } {
  const { begun, content, finished } = one;
  const { answer, reasoning } = splitReasoning(content, begun, finished);
  if (answer === content) return { reasoning: null, answer: one };
  const start = content.length - answer.length;
  const from = content.indexOf(reasoning, MARK.exec(content)![0].length);
  const before = { ...one, dropped: one.dropped.filter(({ offset }) => offset < start) };
  const after = { ...one, dropped: one.dropped.filter(({ offset }) => offset >= start) };
  const thought = reasoning === "" ? null : cut(before, from, from + reasoning.length);
  return { reasoning: thought, answer: cut(after, start, content.length) };
}

const MARK = /^[ \t\n\r]*(?:<think>)?/u;

/** Return a part of a message: its content, with spans and texts that were taken back. */
function cut(one: Message, from: number, to: number): Message {
  const spans: TextSpan[] = [];
  let at = 0;
  for (const span of one.spans) {
    const text = span.text.slice(Math.max(0, from - at), Math.max(0, to - at));
    if (text !== "") spans.push({ ...span, text });
    at += span.text.length;
  }
  const dropped = one.dropped.map(({ offset, text }) => ({ offset: Math.min(Math.max(offset, from), to) - from, text }));
  return { ...one, content: one.content.slice(from, to), spans, dropped };
}

/** Return whether it is an answer that was cut off, and that the target has seen. */
export function canGoOn(one: Message): boolean {
  return one.finished && one.cutOff !== null && one.unconfirmed === null;
}

/** Return the turns for the runtime: the instructions, if there are any, and the messages. */
export function turnsOf(system: string, messages: readonly Message[]): Turn[] {
  const before = system === "" ? [] : [{ role: "system", content: system }];
  return [...before, ...messages.map(({ role, content }) => ({ role, content }))];
}

/** Return a chat's title, made from the first line of its first question, cut between words. */
export function titleOf(question: string): string {
  const line = question.split("\n").find((each) => each.trim() !== "") ?? "";
  const words = line.trim().split(/\s+/u).join(" ");
  if (words.length <= TITLE_LENGTH) return words || "New chat";
  const cut = words.slice(0, TITLE_LENGTH);
  return (cut.includes(" ") ? cut.slice(0, cut.lastIndexOf(" ")) : cut) + "…";
}

/** Return whether a span was written by the device alone. */
export function isOfDevice(origin: Origin, committed: boolean): boolean {
  return !committed || origin === "offline" || origin === "kept";
}
