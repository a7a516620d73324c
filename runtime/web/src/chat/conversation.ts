/** The turns of a chat, and how many committed tokens each takes. */

import { ChatError, MoaError } from "../errors.js";
import type { Sampling } from "../session/sampling.js";
import { shown } from "../session/snapshot.js";
import { HistoryRewrittenError, type ChatTokenizer, type Message } from "../text/chat_tokenizer.js";
import { commonLength, same } from "../tokens.js";
import { checkedMarks, isAnswer, type Unconfirmed } from "./unconfirmed.js";

/** A question in its conversation. */
export interface Question {
  /** The turns, the question included. */
  readonly messages: readonly Message[];
  /** How many of the committed tokens stay. */
  readonly kept: number;
  /** The tokens that follow them, at least one. */
  readonly supplied: readonly number[];
}

/** Tokens up to the answer. */
export function lengthOf({ kept, supplied }: Question): number {
  return kept + supplied.length;
}

/** So many turns take so many committed tokens. */
export type TurnsEnd = readonly [turns: number, length: number];

/**
 * Turns as messages, `{ role, content }`.
 *
 * Answers keep the tokens that were committed: encoding their text anew could give others. So it is remembered where each
 * answer ends; text that came from elsewhere is encoded.
 */
export class Conversation {
  /** The turns. */
  messages: readonly Message[];
  /** Those answers among them that the target has not confirmed, in order. */
  unconfirmed: readonly Unconfirmed[] = [];
  private turnsEnds: TurnsEnd[] = [[0, 0]];

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

  /** How many committed tokens so many turns take. */
  get ends(): TurnsEnd[] {
    return [...this.turnsEnds];
  }

  /**
   * Go on with the turns of another program, of whose tokens `committed` are left.
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
   * @throws MoaError a message that is not `{ role: text, content: text }`, or a mark on what is no answer.
   */
  restore(messages: readonly Message[], unconfirmed: readonly Unconfirmed[] = []): void {
    const turns = messages.map(checkedTurn);
    this.unconfirmed = checkedMarks(unconfirmed, turns);
    const common = commonTurns(this.messages, turns);
    this.turnsEnds = this.turnsEnds.filter(([count]) => count <= common);
    this.messages = turns;
  }

  /**
   * What to send for a question.
   *
   * @param committed the session's tokens, which may still hold turns that were replaced.
   * @throws ChatTemplateError the template refuses the conversation.
   * @throws MoaError what is no text, or where nothing comes of it.
   */
  ask(committed: readonly number[], text: string): Question {
    return this.questionOf(committed, [...this.messages, checkedTurn({ role: "user", content: text })]);
  }

  /**
   * The last question, and the tokens of its answer: those that were committed, where it is known which.
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

  /** The question at the end of `messages`, whose tokens these are. */
  question(messages: readonly Message[], tokens: readonly number[], kept: number): Question {
    return { messages, kept, supplied: tokens.slice(kept) };
  }

  /** Add a question and its answer; `length` committed tokens hold the conversation up to its end. */
  answered(question: Question, text: string, length: number): void {
    this.close(question, text);
    this.turnsEnds.push([this.messages.length, length]);
  }

  /** Add a question and an answer whose end the target has not confirmed; `kept`: nor is to. */
  setAside(question: Question, text: string, sampling: Sampling, most: number, kept: boolean): void {
    this.close(question, text);
    if (kept) return;
    this.unconfirmed = [...this.unconfirmed, { turn: this.messages.length - 1, sampling, most }];
  }

  /** Add those of `turns` that come behind the newest one; `unconfirmed` are the marks of all. */
  add(turns: readonly Message[], unconfirmed: readonly Unconfirmed[]): void {
    this.messages = [...this.messages, ...turns.slice(this.messages.length)];
    this.unconfirmed = unconfirmed;
  }

  private questionOf(committed: readonly number[], messages: readonly Message[]): Question {
    const [turns, length] = this.turnsEnds.filter(([count]) => count < messages.length).at(-1)!;
    const known = committed.slice(0, length);
    let whole: number[];
    try {
      whole = [...known, ...this.tokenizer.continueTurns(known, messages.slice(0, turns), messages.slice(turns))];
    } catch (error) {
      if (!(error instanceof HistoryRewrittenError)) throw error;
      whole = this.tokenizer.encodeChat(messages);
    }
    if (!whole.length) throw new MoaError("there is no text to go on with: it is empty");
    return this.question(messages, whole, Math.min(commonLength(committed, whole), whole.length - 1));
  }

  private close(question: Question, text: string): void {
    this.messages = [...question.messages, { role: "assistant", content: text }];
    this.turnsEnds = this.turnsEnds.filter(([, length]) => length <= question.kept);
    this.unconfirmed = this.unconfirmed.filter(({ turn }) => turn < question.messages.length);
  }
}

/** How many leading turns two lists share. */
export function commonTurns(a: readonly Message[], b: readonly Message[]): number {
  const most = Math.min(a.length, b.length);
  let count = 0;
  while (count < most && a[count]!.role === b[count]!.role && a[count]!.content === b[count]!.content) count++;
  return count;
}

/**
 * A turn as a conversation has it.
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
