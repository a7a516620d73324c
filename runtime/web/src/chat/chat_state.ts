/** What is stored of a chat: the session, the turns, and an answer under way. */

import { MoaError, StoreError } from "../errors.js";
import { isSessionId, newSessionId } from "../link/session_id.js";
import { ClientSession, type ClientOptions } from "../session/client.js";
import { ORIGINS, type FinishReason, type Origin } from "../session/events.js";
import type { Fingerprints } from "../session/handshake.js";
import { JsonReader, type SnapshotJson } from "../session/snapshot.js";
import type { Message } from "../text/chat_tokenizer.js";
import { checkedTurn, type TurnsEnd } from "./conversation.js";
import { newStatistics, type Statistics } from "./statistics.js";
import { checkedMarks, markFromJson, markToJson, type Unconfirmed } from "./unconfirmed.js";

export const STATE_VERSION = 1;
const FINISHES = ["stop", "length", "context"] as const;
const MOST_TOKENS = 1 << 24; // of an answer: far more than any context holds

/** An answer whose end the application has not heard. */
export interface AnswerState {
  /** What is answered. */
  readonly question: string;
  /** How many of the tokens before it stayed when it was asked. */
  readonly kept: number;
  /** Absolute position of the answer's first token. */
  readonly start: number;
  /** Of its confirmed tokens. */
  readonly origins: readonly Origin[];
  /** Its figures. */
  readonly statistics: Statistics;
  /** How it ended; null for one that runs, or that the user stopped. */
  readonly ended: FinishReason | null;
}

/** A chat at one moment. */
export interface ChatState {
  /** The verifier's address. Another one is not told the resume token, nor the session id. */
  readonly server: string;
  /** `ClientSession.snapshot`. */
  readonly session: SnapshotJson;
  /** The turns, without those of an answer under way. */
  readonly messages: readonly Message[];
  /** How many committed tokens so many turns take. */
  readonly ends: readonly TurnsEnd[];
  /** The one under way. */
  readonly answer: AnswerState | null;
  /** Those of the turns. */
  readonly unconfirmed: readonly Unconfirmed[];
  /** By which proxies find the verifier that has the conversation. */
  readonly sessionId: string;
}

/** With the keys of Python's; whole numbers above 2^53 - 1 are texts. */
export function stateToJson(state: ChatState): SnapshotJson {
  return {
    version: STATE_VERSION,
    server: state.server,
    messages: state.messages.map(({ role, content }) => ({ role, content })),
    ends: state.ends.map(([turns, length]) => [turns, length]),
    answer: state.answer && answerToJson(state.answer),
    unconfirmed: state.unconfirmed.map(markToJson),
    session_id: state.sessionId,
    session: state.session,
  };
}

/**
 * What {@link stateToJson} made; the session is not looked at.
 *
 * @throws StoreError another version, or it is broken.
 */
export function stateFromJson(data: unknown): ChatState {
  const version = (data as { version?: unknown } | null)?.version ?? STATE_VERSION;
  if (version !== STATE_VERSION) {
    throw new StoreError(
      `the stored chat has version ${JSON.stringify(version)}, this program reads version ${STATE_VERSION}: open it with ` +
        "the version of moa-edge that wrote it",
    );
  }
  try {
    const top = new JsonReader(data, "a chat", broken);
    const messages = top.list("messages").map(checkedTurn);
    return {
      server: top.text("server"),
      session: top.get("session") as SnapshotJson,
      messages,
      ends: top.list("ends").map(endFrom),
      answer: top.get("answer") === null ? null : answerFrom(top.inner("answer")),
      unconfirmed: checkedMarks(top.list("unconfirmed").map((mark) => markFromJson(mark, broken)), messages),
      sessionId: top.has("session_id") ? checkedSessionId(top.text("session_id")) : newSessionId(),
    };
  } catch (error) {
    if (error instanceof StoreError || !(error instanceof MoaError)) throw error;
    throw broken(error.message);
  }
}

/** The session id for the next connections; a new one where they lead elsewhere. */
export function sessionIdFor(state: ChatState, server: string): string {
  return server === state.server ? state.sessionId : newSessionId();
}

/**
 * The session of a state, see `ClientSession.restore`.
 *
 * @param server the verifier's address now.
 * @throws SnapshotError see there.
 * @throws StoreError turns and session do not fit together.
 */
export function restoreSession(
  state: ChatState,
  server: string,
  fingerprints: Fingerprints,
  options: Omit<ClientOptions, "policy">,
): ClientSession {
  const { answer, ends, messages } = state;
  const snapshot = server === state.server ? state.session : { ...state.session, resume_token: "" };
  const session = ClientSession.restore(snapshot, fingerprints, options);
  const committed = session.committed.length;
  const sorted = ends.every(([turns, length], at) => {
    const [before, end] = ends[at - 1] ?? [0, 0];
    return turns > before || (turns === before && length >= end);
  });
  if (!sorted || ends.some(([turns]) => turns > messages.length)) {
    throw broken("its turns have other ends than its tokens");
  }
  if (!answer) {
    if (session.answering) session.cancel(); // and nobody waits for it
  } else if (answer.kept >= answer.start || answer.origins.length !== Math.max(0, committed - answer.start)) {
    throw broken(
      `an answer from ${answer.start} on has ${answer.origins.length} tokens where ${committed} are confirmed`,
    );
  }
  return session;
}

function checkedSessionId(text: string): string {
  if (!isSessionId(text)) throw broken(`${JSON.stringify(text.slice(0, 60))} is no session id, which has 32 hexadecimal digits`);
  return text;
}

function broken(what: string): StoreError {
  return new StoreError(`the stored chat is broken: ${what}`);
}

function answerToJson(answer: AnswerState): SnapshotJson {
  const runs: [Origin, number][] = [];
  for (const origin of answer.origins) {
    if (runs.at(-1)?.[0] === origin) runs.at(-1)![1]++;
    else runs.push([origin, 1]);
  }
  const figures = Object.entries(answer.statistics).map(([name, value]) => [snake(name), value]);
  return {
    question: answer.question,
    kept: answer.kept,
    start: answer.start,
    origins: runs,
    statistics: Object.fromEntries(figures) as SnapshotJson,
    ended: answer.ended,
  };
}

function answerFrom(answer: JsonReader): AnswerState {
  const origins: Origin[] = [];
  for (const run of answer.list("origins")) {
    const [origin, length] = Array.isArray(run) ? (run as unknown[]) : [];
    const known = ORIGINS.find((each) => each === origin);
    if (!known || !isCount(length) || origins.length + length > MOST_TOKENS) throw broken("origins are no runs of tokens");
    for (let count = 0; count < length; count++) origins.push(known);
  }
  return {
    question: checkedTurn({ role: "user", content: answer.get("question") }).content,
    kept: answer.number("kept"),
    start: answer.number("start"),
    origins,
    statistics: statisticsFrom(answer.inner("statistics")),
    ended: answer.get("ended") === null ? null : answer.choice("ended", FINISHES),
  };
}

/** Each figure of the type that a new answer's has; a time that is not known yet is null. */
function statisticsFrom(figures: JsonReader): Statistics {
  const read = Object.entries(newStatistics()).map(([name, usual]) => {
    const key = snake(name);
    const value = figures.get(key);
    if (typeof usual === "boolean") return [name, figures.flag(key)];
    if (Array.isArray(usual)) return [name, figures.list(key).map((each) => seconds(each, key))];
    if (usual === null && value === null) return [name, null];
    return [name, /seconds$/.test(key) ? seconds(value, key) : figures.number(key)];
  });
  return Object.fromEntries(read) as Statistics;
}

function seconds(value: unknown, key: string): number {
  if (typeof value === "number" && value >= 0 && value < Infinity) return value;
  throw broken(`${key} must be 0 or more, not ${JSON.stringify(value)}`);
}

function endFrom(end: unknown): TurnsEnd {
  const [turns, length] = Array.isArray(end) ? (end as unknown[]) : [];
  if (!isCount(turns) || !isCount(length)) throw broken("ends are pairs of turns and tokens");
  return [turns, length];
}

function isCount(value: unknown): value is number {
  return typeof value === "number" && Number.isSafeInteger(value) && value >= 0;
}

function snake(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}
