/** What is stored of a conversation. */

import type { Message as Turn, Origin, Sampling, TextSpan, Unconfirmed } from "@moa-edge/runtime";

const TITLE_LENGTH = 48;

/** Text that was taken back while an answer was written; `offset` is where in the answer it stood. */
export interface Dropped {
  readonly offset: number;
  readonly text: string;
}

/** One turn. Values are replaced, never changed, so that a view knows by identity what is new. */
export interface Message {
  readonly role: "user" | "assistant";
  readonly content: string;
  /** The content cut by origin; joined they are the content. None where no origins are known. */
  readonly spans: readonly TextSpan[];
  /** What was taken back, by offset. */
  readonly dropped: readonly Dropped[];
  /** False for an answer that is being written, or was when the page ended. */
  readonly finished: boolean;
  /** One line about the answer, perhaps empty. */
  readonly remarks: string;
  /** How it was made, in words. */
  readonly figures: readonly string[];
  /** Of an answer that the device wrote without the verifier, which is still to check it. */
  readonly unconfirmed: Unconfirmed | null;
  /** How the target chose in an answer that can be continued: one of the greatest length, or stopped. */
  readonly cutOff: Sampling | null;
  /** Fingerprint of the target that an answer is of; empty where it is not known. */
  readonly target: string;
}

export function message(role: Message["role"], content: string, more: Partial<Message> = {}): Message {
  const plain = { spans: [], dropped: [], finished: true, remarks: "", figures: [], unconfirmed: null, cutOff: null };
  return { role, content, ...plain, target: "", ...more };
}

/** The message as it is when nobody writes it any more. */
export function settled(one: Message): Message {
  return one.finished ? one : { ...one, finished: true, remarks: "interrupted" };
}

/** Whether it is an answer that was cut off, and that the target has seen. */
export function canGoOn(one: Message): boolean {
  return one.finished && one.cutOff !== null && one.unconfirmed === null;
}

/** What the runtime takes: the instructions, if there are any, and the messages. */
export function turnsOf(system: string, messages: readonly Message[]): Turn[] {
  const before = system === "" ? [] : [{ role: "system", content: system }];
  return [...before, ...messages.map(({ role, content }) => ({ role, content }))];
}

/** A chat's title made from its first question: its first line, cut between words. */
export function titleOf(question: string): string {
  const line = question.split("\n").find((each) => each.trim() !== "") ?? "";
  const words = line.trim().split(/\s+/u).join(" ");
  if (words.length <= TITLE_LENGTH) return words || "New chat";
  const cut = words.slice(0, TITLE_LENGTH);
  return (cut.includes(" ") ? cut.slice(0, cut.lastIndexOf(" ")) : cut) + "…";
}

/** Whether a span was written by the device alone. */
export function isOfDevice(origin: Origin, committed: boolean): boolean {
  return !committed || origin === "offline" || origin === "kept";
}
