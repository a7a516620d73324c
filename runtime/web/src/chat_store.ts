/** Storing a chat: its place, its state as JSON, and when it is written. */

import type { Message } from "./chat_tokenizer.js";
import {
  checkedMarks,
  checkedTurn,
  markFromJson,
  markToJson,
  type TurnsEnd,
  type Unconfirmed,
} from "./conversation.js";
import { isSessionId, newSessionId } from "./endpoint.js";
import { MoaError, StoreError } from "./errors.js";
import type { Host } from "./host.js";
import { ClientSession, type ClientOptions } from "./session/client.js";
import { ORIGINS, type FinishReason, type Origin } from "./session/events.js";
import type { Fingerprints } from "./session/handshake.js";
import { JsonReader, type SnapshotJson } from "./session/snapshot.js";
import { newStatistics, type Statistics } from "./statistics.js";

/**
 * The place of one chat: written whole or not at all, private to its user, and open in one program at a time.
 * `IndexedDbChatStore` is for browsers, `FileChatStore` for Node.
 */
export interface ChatStore {
  /** Its name in a sentence, such as a file's path. */
  readonly name: string;

  /**
   * Lock it for this program, tab or worker until {@link close}.
   *
   * @returns the content written last; undefined if there is none. Broken content is returned as it is.
   * @throws StoreError it is in use elsewhere, or cannot be read.
   */
  open(): Promise<unknown>;

  /**
   * Replace the content by `content`; it is durable when this is done. One call at a time.
   *
   * @throws StoreError it cannot be written; the old content stays.
   */
  write(content: SnapshotJson): Promise<void>;

  /**
   * Rename the content, which cannot be used; return its new name.
   *
   * @throws StoreError it cannot be renamed.
   */
  setAside(): Promise<string>;

  /** Unlock it. */
  close(): Promise<void>;
}

const STATE_VERSION = 1;
const FINISHES = ["stop", "length", "context", "grammar"] as const;
const MOST_TOKENS = 1 << 24; // of an answer: far more than any context holds

/** An answer whose end the application has not received. */
export interface AnswerState {
  /** The question. */
  readonly question: string;
  /** Committed tokens that stayed when it was asked. */
  readonly kept: number;
  /** Absolute position of the answer's first token. */
  readonly start: number;
  /** Origins of its confirmed tokens. */
  readonly origins: readonly Origin[];
  readonly statistics: Statistics;
  /** How it ended; null if it runs, or the user stopped it. */
  readonly ended: FinishReason | null;
}

/** The state of a chat at one moment. */
export interface ChatState {
  /** The verifier's address. Another verifier gets neither the resume token nor the session id. */
  readonly server: string;
  /** `ClientSession.snapshot`. */
  readonly session: SnapshotJson;
  /** The turns, without those of an answer under way. */
  readonly messages: readonly Message[];
  /** Ends of the turns in the committed tokens. */
  readonly ends: readonly TurnsEnd[];
  /** The answer under way. */
  readonly answer: AnswerState | null;
  /** Marks of unconfirmed turns. */
  readonly unconfirmed: readonly Unconfirmed[];
  /** By it, proxies find the verifier that has the conversation. */
  readonly sessionId: string;
}

/** Return the state as JSON, with the same keys as in Python; integers above 2^53 - 1 are strings. */
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
 * Read the JSON of {@link stateToJson}; the session is not checked.
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

/** Return the session id for the next connections; a new one if the server is another. */
export function sessionIdFor(state: ChatState, server: string): string {
  return server === state.server ? state.sessionId : newSessionId();
}

/**
 * Restore the session of a state, see `ClientSession.restore`.
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
    if (session.answering) session.cancel(); // a stored answer that runs has an `answer`
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

/** Read the types of numbers, which files of earlier versions lack. */
function dtypesFrom(figures: JsonReader): string {
  const value = figures.has("dtype") ? figures.get("dtype") : "";
  if (typeof value !== "string" || !/^[a-z0-9, ]{0,200}$/.test(value)) throw broken("dtype names no types of numbers");
  return value;
}

/** Read the figures, each of the type of a new answer's; a time that is not known yet is null. */
function statisticsFrom(figures: JsonReader): Statistics {
  const read = Object.entries(newStatistics()).map(([name, usual]) => {
    const key = snake(name);
    if (name === "dtype") return [name, dtypesFrom(figures)];
    if (name === "droppedTurns" && !figures.has(key)) return [name, 0]; // likewise
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

const SECONDS_BETWEEN = 1; // writes of changes that are not urgent

/** A write that is waited for. */
interface Write {
  readonly done: Promise<void>;
  readonly end: () => void;
}

/**
 * Write a chat's state into its {@link ChatStore}: urgent changes at once, others about once a second. Without a store it does
 * nothing.
 *
 * One write is under way at a time. All requests meanwhile share the next one, which takes the state as it is then.
 */
export class ChatSaver {
  private store: ChatStore | undefined;
  private wanted: Write | undefined;
  private writing: Promise<void> | undefined;
  private stopTimer: (() => void) | undefined;
  private notRestored = "";
  private notWritten = "";

  /**
   * @param state returns the present state of the chat, which later events must not change. It is called between two events.
   */
  constructor(
    private readonly state: () => SnapshotJson,
    private readonly host: Host,
  ) {}

  /** Whether there is a store. */
  get keeps(): boolean {
    return this.store !== undefined;
  }

  /** Why the chat is not stored, or why the stored one was not continued; empty if all is well. */
  get problem(): string {
    return this.notWritten || this.notRestored;
  }

  /**
   * Store the chat in `store` from now on.
   *
   * @param restore makes a value of the stored content, or throws MoaError.
   * @returns that value; undefined if there is no content, or it cannot be used and is set aside.
   * @throws StoreError it is in use elsewhere, its content can be neither used nor set aside, or there is a store already.
   */
  async open<T>(store: ChatStore, restore: (content: unknown) => T): Promise<T | undefined> {
    if (this.store) throw new StoreError(`the chat is kept in ${this.store.name} already`);
    const content = await store.open();
    let restored: T | undefined;
    try {
      restored = content === undefined ? undefined : restore(content);
    } catch (error) {
      try {
        if (!(error instanceof MoaError)) throw error;
        this.notRestored = `${error.message}; what was stored is now ${await store.setAside()}`;
      } catch (failure) {
        await store.close();
        throw failure;
      }
    }
    this.store = store;
    return restored;
  }

  /** Note a change that may be lost: it is written soon. */
  touch(): void {
    if (!this.store || this.stopTimer || this.wanted) return;
    this.stopTimer = this.host.later(SECONDS_BETWEEN, () => void this.save());
  }

  /** Write the present state; done when it is stored, or could not be written. */
  async save(): Promise<void> {
    this.stopTimer?.();
    this.stopTimer = undefined;
    if (!this.store) return;
    if (!this.wanted) {
      this.wanted = newWrite();
      this.writing ??= this.write(this.store);
    }
    await this.wanted.done;
  }

  /** Write the present state, and unlock the store. */
  async close(): Promise<void> {
    await this.save();
    await this.writing;
    const { store } = this;
    this.store = undefined;
    await store?.close();
  }

  private async write(store: ChatStore): Promise<void> {
    await undefined; // let the present event end first
    try {
      while (this.wanted) {
        const { end } = this.wanted;
        this.wanted = undefined;
        await this.writeOnce(store).finally(end);
      }
    } finally {
      this.writing = undefined;
    }
  }

  private async writeOnce(store: ChatStore): Promise<void> {
    try {
      await store.write(this.state());
      this.notWritten = "";
    } catch (error) {
      // Catch defects, too: otherwise all requests for the next write would wait for ever.
      this.notWritten = error instanceof StoreError ? error.message : `storing it failed unexpectedly: ${String(error)}`;
    }
  }
}

function newWrite(): Write {
  let end = (): void => undefined;
  const done = new Promise<void>((resolve) => (end = resolve));
  return { done, end };
}
