/** The turns of a chat, and the committed tokens of each. */

import { HistoryRewrittenError, type ChatTokenizer, type Message } from "./chat_tokenizer.js";
import { ChatError, MoaError } from "./errors.js";
import type { Sampling } from "./session/sampling.js";
import { JsonReader, samplingFrom, samplingToJson, shown, type Json } from "./session/snapshot.js";
import { commonLength, same } from "./tokens.js";
import { checkRequest } from "./validate.js";

/** A question in its conversation. */
export interface Question {
  /** The turns, the question included. */
  readonly messages: readonly Message[];
  /** Leading committed tokens that stay. */
  readonly kept: number;
  /** Tokens that follow them, at least one. */
  readonly supplied: readonly number[];
  /** Oldest turns that are not among the tokens; a system message is. None when omitted. */
  readonly dropped?: number;
}

/** Return the number of tokens before the answer. */
export function lengthOf({ kept, supplied }: Question): number {
  return kept + supplied.length;
}

/** A number of turns, and the committed tokens that they take. */
export type TurnsEnd = readonly [turns: number, length: number];

/**
 * Turns as messages, `{ role, content }`.
 *
 * Answers keep their committed tokens, because encoding their text again could give others. So the end of each answer is
 * remembered; text from elsewhere is encoded.
 */
export class Conversation {
  messages: readonly Message[];
  /** Marks of the answers that the target has not confirmed, in order. */
  unconfirmed: readonly Unconfirmed[] = [];
  /** Whether the target reasons before it answers; undefined for the template's default. */
  thinking: boolean | undefined;
  /** Tokens that the target holds, if the oldest turns are to be dropped when they outgrow it; else 0. */
  context = 0;
  private turnsEnds: TurnsEnd[] = [[0, 0]];
  private readonly droppedAt = new Map<number, number>(); // turns that are not among the tokens, by number of turns

  constructor(
    private readonly tokenizer: ChatTokenizer,
    system = "",
  ) {
    this.messages = system ? [{ role: "system", content: system }] : [];
  }

  /** Committed tokens that belong to the turns. */
  get length(): number {
    return this.turnsEnds.at(-1)![1];
  }

  /** Ends of the turns in the committed tokens. */
  get ends(): TurnsEnd[] {
    return [...this.turnsEnds];
  }

  /**
   * Continue from the turns of another program; the first `committed` of its tokens are left.
   *
   * @throws MoaError see {@link restore}.
   */
  resume(
    messages: readonly Message[],
    ends: readonly TurnsEnd[],
    committed: number,
    unconfirmed: readonly Unconfirmed[],
  ): void {
    this.restore(messages, unconfirmed);
    this.turnsEnds = [[0, 0], ...ends.filter(([, length]) => length > 0 && length <= committed)];
  }

  /**
   * Replace the turns.
   *
   * @throws MoaError a malformed message, or a mark on a turn that is no answer.
   */
  restore(messages: readonly Message[], unconfirmed: readonly Unconfirmed[] = []): void {
    const turns = messages.map(checkedTurn);
    this.unconfirmed = checkedMarks(unconfirmed, turns);
    const common = commonTurns(this.messages, turns);
    this.turnsEnds = this.turnsEnds.filter(([count]) => count <= common);
    this.messages = turns;
  }

  /**
   * Return the question to send.
   *
   * @param committed the session's tokens, which may still hold turns that were replaced.
   * @throws ChatTemplateError the template refuses the conversation.
   * @throws MoaError the text is malformed, or the conversation has no tokens.
   */
  ask(committed: readonly number[], text: string): Question {
    return this.questionOf(committed, [...this.messages, checkedTurn({ role: "user", content: text })]);
  }

  /**
   * Return the last question, and the tokens of its answer: the committed ones if they are known.
   *
   * @throws ChatError the last turn is no answer to a question, or one that is to be checked first.
   * @throws ChatTemplateError see {@link ask}.
   */
  lastAnswer(committed: readonly number[]): [Question, number[]] {
    const last = this.messages.length - 1;
    if (!isAnswer(this.messages, last)) throw new ChatError("there is no answer to continue: ask something");
    if (this.unconfirmed.some(({ turn }) => turn === last)) {
      throw new ChatError("the answer is not confirmed yet: it can be continued once it is checked");
    }
    const question = this.questionOf(committed, this.messages.slice(0, last));
    const [turns, end] = this.turnsEnds.at(-1)!;
    const length = lengthOf(question);
    const tokens = [...committed.slice(0, question.kept), ...question.supplied];
    if (turns === last + 1 && same(tokens, committed.slice(0, length))) return [question, committed.slice(length, end)];
    return [question, this.tokenizer.encode(this.messages[last]!.content)];
  }

  /** Return the question at the end of `messages`, which have these `tokens`. */
  question(messages: readonly Message[], tokens: readonly number[], kept: number): Question {
    return { messages, kept, supplied: tokens.slice(kept) };
  }

  /** Add a question and its answer; `length` committed tokens hold the conversation up to its end. */
  answered(question: Question, text: string, length: number): void {
    this.close(question, text);
    this.turnsEnds.push([this.messages.length, length]);
    this.droppedAt.set(this.messages.length, question.dropped ?? 0);
  }

  /** Add a question and an answer whose end the target has not confirmed; with `kept` it is not to be checked. */
  setAside(question: Question, text: string, sampling: Sampling, most: number, kept: boolean): void {
    this.close(question, text);
    if (kept) return;
    this.unconfirmed = [...this.unconfirmed, { turn: this.messages.length - 1, sampling, most }];
  }

  /** Add those of `turns` that follow the newest one; `unconfirmed` are the marks of all. */
  add(turns: readonly Message[], unconfirmed: readonly Unconfirmed[]): void {
    this.messages = [...this.messages, ...turns.slice(this.messages.length)];
    this.unconfirmed = unconfirmed;
  }

  private questionOf(committed: readonly number[], messages: readonly Message[]): Question {
    const ends = this.turnsEnds.filter(([count]) => this.context > 0 || !this.droppedAt.get(count));
    const [turns, length] = ends.filter(([count]) => count < messages.length).at(-1)!;
    const known = committed.slice(0, length);
    let dropped = this.droppedAt.get(turns) ?? 0;
    let whole: number[];
    try {
      const [before, after] = [messages.slice(0, turns), messages.slice(turns)];
      whole = [...known, ...this.tokenizer.continueTurns(known, before, after, this.thinking)];
    } catch (error) {
      if (!(error instanceof HistoryRewrittenError)) throw error;
      whole = this.tokenizer.encodeChat(messages, true, this.thinking);
      dropped = 0;
    }
    if (this.context > 0 && whole.length > this.context - Math.floor(this.context / 8)) {
      [whole, dropped] = this.trimmed(messages, whole);
    }
    if (!whole.length) throw new MoaError("there is no text to go on with: it is empty");
    const kept = Math.min(commonLength(committed, whole), whole.length - 1);
    return { ...this.question(messages, whole, kept), dropped };
  }

  /**
   * Return the tokens of a conversation without its oldest turns, and the number of these. What is left begins with a question
   * and takes at most half of the context, if the last question allows: the next questions need not be trimmed then.
   */
  private trimmed(messages: readonly Message[], whole: number[]): [number[], number] {
    const first = messages[0]!.role === "system" ? 1 : 0;
    const starts = [...messages.keys()].filter((turn) => turn > first && messages[turn]!.role === "user");
    const tokensFrom = (start: number): number[] => {
      const left = [...messages.slice(0, first), ...messages.slice(start)];
      return this.tokenizer.encodeChat(left, true, this.thinking);
    };
    if (!starts.length) return [whole, 0];
    let [low, high] = [0, starts.length - 1]; // the last one is taken, fit or not
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tokensFrom(starts[middle]!).length <= this.context / 2) high = middle;
      else low = middle + 1;
    }
    return [tokensFrom(starts[low]!), starts[low]! - first];
  }

  private close(question: Question, text: string): void {
    this.messages = [...question.messages, { role: "assistant", content: text }];
    this.turnsEnds = this.turnsEnds.filter(([, length]) => length <= question.kept);
    this.unconfirmed = this.unconfirmed.filter(({ turn }) => turn < question.messages.length);
  }
}

/** Return how many leading turns two lists share. */
export function commonTurns(a: readonly Message[], b: readonly Message[]): number {
  const most = Math.min(a.length, b.length);
  let count = 0;
  while (count < most && a[count]!.role === b[count]!.role && a[count]!.content === b[count]!.content) count++;
  return count;
}

/**
 * Return a message as a turn.
 *
 * @throws MoaError it is not `{ role: text, content: text }`.
 */
export function checkedTurn(message: unknown): Message {
  const { role, content } = (message ?? {}) as { role?: unknown; content?: unknown };
  if (typeof role !== "string" || typeof content !== "string") {
    throw new MoaError(`a message must be { role: text, content: text }, not ${shown(message)}`);
  }
  if (/\p{Surrogate}/u.test(role + content)) {
    throw new MoaError("a message must be text, without halves of characters (surrogates)");
  }
  return { role, content };
}

/** The mark of an answer whose text, or its end, the target has not confirmed: it is to be checked. */
export interface Unconfirmed {
  /** Index of the answer among the conversation's turns. */
  readonly turn: number;
  /** Sampling of the question; the target's choices depend on it. */
  readonly sampling: Sampling;
  /** Tokens that the answer may have; 0 for no limit. For an answer that the user stopped, its length. */
  readonly most: number;
}

/** A conversation's turns, and the marks of those that are unconfirmed. */
export interface Turns {
  readonly messages: readonly Message[];
  readonly marks: readonly Unconfirmed[];
}

/** Return a mark as JSON, with the same keys as in Python. */
export function markToJson({ most, sampling, turn }: Unconfirmed): Json {
  return { turn, sampling: samplingToJson(sampling), most };
}

/**
 * Read the JSON of {@link markToJson}.
 *
 * @param broken makes the error.
 * @throws MoaError it is broken.
 */
export function markFromJson(data: unknown, broken: (what: string) => MoaError = brokenMark): Unconfirmed {
  const mark = new JsonReader(data, "an unconfirmed turn", broken);
  return { turn: mark.number("turn"), sampling: samplingFrom(mark.inner("sampling")), most: mark.number("most") };
}

/**
 * Return the marks of these turns, in order.
 *
 * @throws MoaError a mark is not on an answer to a question, or no verifier could check it.
 */
export function checkedMarks(marks: readonly Unconfirmed[], turns: readonly Message[]): Unconfirmed[] {
  const known = new Map<number, Unconfirmed>();
  for (const mark of marks) {
    const { most, sampling, turn } = mark;
    if (!isAnswer(turns, turn)) {
      throw new MoaError(`an unconfirmed turn must be an answer after its question, and turn ${turn} is not`);
    }
    checkRequest(most, sampling);
    known.set(turn, mark);
  }
  return [...known.values()].sort((a, b) => a.turn - b.turn);
}

/** Return whether this turn is an answer after its question. */
export function isAnswer(turns: readonly Message[], turn: number): boolean {
  return turns[turn - 1]?.role === "user" && turns[turn]?.role === "assistant";
}

function brokenMark(what: string): MoaError {
  return new MoaError(`the mark of an unconfirmed turn is broken: ${what}`);
}
