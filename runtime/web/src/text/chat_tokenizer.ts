/** Conversations as tokens: a tokenizer with its chat template. */

import { Template } from "@huggingface/jinja";

import { MoaError } from "../errors.js";
import { append } from "../tokens.js";
import { Tokenizer, escaped } from "./tokenizer.js";

/** Around the number of a special token that a user has typed. Unicode keeps these characters for internal use. */
const GUARD_OPEN = "\ufdd0";
const GUARD_CLOSE = "\ufdd1";

export interface Message {
  readonly role: string;
  readonly content: string;
}

/** A chat template that cannot be read, or that refuses a conversation. */
export class ChatTemplateError extends MoaError {
  override readonly name: string = "ChatTemplateError";
}

/** The template writes earlier messages differently once others follow: some drop an answer's reasoning. */
export class HistoryRewrittenError extends ChatTemplateError {
  override readonly name = "HistoryRewrittenError";
}

export class ChatTokenizer {
  readonly stopTokens: ReadonlySet<number>;
  private readonly tokenizer: Tokenizer;
  private readonly template: Template;
  private readonly specials: string[]; // longest first, so that one which is the beginning of another does not win
  private readonly guarded: string[]; // what a message may not spell as it is: special tokens, and what guards them

  /**
   * @param tokenizer the content of a `tokenizer.json`, as JSON has it.
   * @param template the chat template's source (Jinja, as transformers keeps it).
   * @param specialTokens names the template may use, such as `{ bos_token: "<s>" }`.
   * @param stopTokens ids that end the assistant's turn.
   * @throws TokenizerError the tokenizer cannot be read.
   * @throws ChatTemplateError the template cannot be read.
   */
  constructor(
    tokenizer: unknown,
    template: string,
    private readonly specialTokens: { readonly [name: string]: string },
    stopTokens: Iterable<number>,
  ) {
    this.tokenizer = new Tokenizer(tokenizer);
    this.stopTokens = new Set(stopTokens);
    try {
      this.template = new Template(template);
    } catch (error) {
      throw new ChatTemplateError(`the chat template cannot be read: ${(error as Error).message}`);
    }
    const special = this.tokenizer.addedTokens.filter((token) => token.special).map(({ content }) => content);
    this.specials = special.sort((a, b) => b.length - a.length);
    this.guarded = [...this.specials, GUARD_OPEN, GUARD_CLOSE];
  }

  /** Number of tokens, added ones included. */
  get vocabSize(): number {
    return this.tokenizer.vocabSize;
  }

  encode(text: string): number[] {
    return this.tokenizer.encode(text);
  }

  /** Text of `tokens`; bytes that are no UTF-8 become replacement characters. */
  decode(tokens: readonly number[], skipSpecialTokens = true): string {
    return this.tokenizer.decode(tokens, skipSpecialTokens);
  }

  /**
   * The conversation as the text the target was trained on.
   *
   * @throws ChatTemplateError the template refuses these messages, or fails.
   */
  renderChat(messages: readonly Message[], addGenerationPrompt = true): string {
    const copies = messages.map((message) => ({ ...message }));
    try {
      return this.template.render({
        messages: copies,
        add_generation_prompt: addGenerationPrompt,
        ...this.specialTokens,
      });
    } catch (error) {
      throw new ChatTemplateError(`the chat template refuses this conversation: ${(error as Error).message}`);
    }
  }

  /** Tokens of a conversation. Where a message spells a special token, that stays the text which the user typed. */
  encodeChat(messages: readonly Message[], addGenerationPrompt = true): number[] {
    return this.encodeGuarded(this.renderChat(this.guard(messages), addGenerationPrompt));
  }

  /**
   * The tokens that follow `committed` up to the next answer, whether or not the last one was cut off.
   *
   * @param committed the conversation's tokens so far; empty for a new one.
   * @param history its messages; before the first question perhaps a system message.
   * @param turns the messages that follow, the last one the user's.
   * @throws ChatTemplateError see {@link encodeTurns}.
   */
  continueTurns(committed: readonly number[], history: readonly Message[], turns: readonly Message[]): number[] {
    if (!committed.length) return this.encodeChat([...history, ...turns]);
    const tokens = this.encodeTurns(history, turns);
    if (this.stopTokens.has(committed.at(-1)!)) return tokens;
    // Of several stop tokens (Llama 3 has two) it must be the one that the template writes.
    const { piece } = this.lastStop(this.renderChat(this.guard(history), false));
    return [...this.encode(piece), ...tokens];
  }

  /**
   * The tokens that continue a committed conversation by more turns, generation prompt included. The committed tokens end
   * with the end-of-turn token of the last answer; they stay as they are, even where encoding the answer's text anew would
   * give other tokens.
   *
   * @param history the messages so far; the last one is the assistant's.
   * @throws HistoryRewrittenError the conversation cannot be continued token by token.
   * @throws ChatTemplateError the template refuses the messages.
   */
  encodeTurns(history: readonly Message[], turns: readonly Message[]): number[] {
    const asked = this.renderChat(this.guard(history.slice(0, -1))); // the committed tokens began as this
    const before = this.renderChat(this.guard(history), false);
    const after = this.renderChat(this.guard([...history, ...turns]));
    const { piece, end } = this.lastStop(before);
    if (!after.startsWith(asked) || !after.startsWith(before.slice(0, end))) {
      throw new HistoryRewrittenError(
        "the chat template changes earlier messages when a new one follows; start a new conversation",
      );
    }
    // Encoded behind the end-of-turn token, because some tokenizers treat the start of a text specially.
    const lead = this.encode(piece).length;
    return this.encodeGuarded(piece + after.slice(end)).slice(lead);
  }

  // -- special tokens typed by a user ----------------------------------------------------------

  /**
   * The messages with a placeholder for each special token that their text spells, and for the placeholders' own characters.
   */
  private guard(messages: readonly Message[]): Message[] {
    const spelled = new RegExp(this.guarded.map(escaped).join("|"), "gu");
    const placeholder = (text: string): string => `${GUARD_OPEN}${this.guarded.indexOf(text)}${GUARD_CLOSE}`;
    return messages.map((message) => ({ ...message, content: message.content.replace(spelled, placeholder) }));
  }

  /** Encode a rendered conversation; what stands for a placeholder becomes plain text again. */
  private encodeGuarded(text: string): number[] {
    if (!text.includes(GUARD_OPEN)) return this.encode(text);
    const placeholders = new RegExp(`${GUARD_OPEN}([0-9]+)${GUARD_CLOSE}`, "gu");
    const special = new RegExp(`(${this.specials.map(escaped).join("|") || "(?!)"})`, "u");
    const tokens: number[] = [];
    let ordinary = "";
    for (const piece of text.split(special)) {
      const restored = piece.replace(placeholders, (_, number: string) => this.guarded[Number(number)]!);
      if (restored === piece) {
        ordinary += piece;
        continue;
      }
      append(tokens, [...this.encode(ordinary), ...this.tokenizer.encode(restored, true)]);
      ordinary = "";
    }
    return [...tokens, ...this.encode(ordinary)];
  }

  /** The last end-of-turn token in `text` and the offset behind it; the end of the text when none. */
  private lastStop(text: string): { piece: string; end: number } {
    let best = { piece: "", end: text.length };
    let start = -1;
    for (const token of this.stopTokens) {
      const piece = this.tokenizer.pieceOf(token) ?? "";
      const at = piece ? text.lastIndexOf(piece) : -1;
      if (at > start) {
        start = at;
        best = { piece, end: at + piece.length };
      }
    }
    return best;
  }
}
