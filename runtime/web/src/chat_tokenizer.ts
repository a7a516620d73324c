/** Conversations as tokens: a tokenizer with its chat template. */

import { Template } from "@huggingface/jinja";

import { MoaError } from "./errors.js";
import { ControlTokens, ENABLE_THINKING, OPEN, type Thought, splitReasoning } from "./reasoning.js";
import { strftime } from "./strftime.js";
import { Tokenizer, escaped } from "./tokenizer.js";
import { append } from "./tokens.js";

/** Delimiters around the number of a special token that a user has typed. Unicode reserves them for internal use. */
const GUARD_OPEN = "\ufdd0";
const GUARD_CLOSE = "\ufdd1";

/** The function of transformers' `strftime_now`; that of the template engine writes months in the user's language. */
const DATE = "moa_strftime_now";

export interface Message {
  readonly role: string;
  readonly content: string;
}

/** A chat template cannot be read, or refuses a conversation. */
export class ChatTemplateError extends MoaError {
  override readonly name: string = "ChatTemplateError";
}

/** The template writes earlier messages differently after others follow: some drop an answer's reasoning. */
export class HistoryRewrittenError extends ChatTemplateError {
  override readonly name = "HistoryRewrittenError";
}

/** A tokenizer with a chat template. */
export class ChatTokenizer {
  readonly stopTokens: ReadonlySet<number>;
  /** Whether the template can switch reasoning on and off. */
  readonly knowsThinking: boolean;
  /** The control tokens of answers. */
  readonly controlTokens: ControlTokens;
  /** Ids of the special tokens by their texts. */
  readonly specialIds: ReadonlyMap<string, number>;
  private readonly tokenizer: Tokenizer;
  private readonly template: Template;
  private readonly specials: string[]; // longest first, because one may be the beginning of another
  private readonly guarded: string[]; // texts that a message must not contain as they are: special tokens, and the delimiters

  /**
   * @param tokenizer the content of a `tokenizer.json`, as JSON has it.
   * @param source the chat template (Jinja, as transformers keeps it).
   * @param specialTokens names the template may use, such as `{ bos_token: "<s>" }`.
   * @param stopTokens ids that end the assistant's turn.
   * @throws TokenizerError the tokenizer cannot be read.
   * @throws ChatTemplateError the template cannot be read.
   */
  constructor(
    tokenizer: unknown,
    private readonly source: string,
    private readonly specialTokens: { readonly [name: string]: string },
    stopTokens: Iterable<number>,
  ) {
    this.tokenizer = new Tokenizer(tokenizer);
    this.stopTokens = new Set(stopTokens);
    this.knowsThinking = source.includes(ENABLE_THINKING);
    try {
      this.template = new Template(source.replace(/\bstrftime_now\b/g, DATE));
    } catch (error) {
      throw new ChatTemplateError(`the chat template cannot be read: ${(error as Error).message}`);
    }
    const special = this.tokenizer.addedTokens.filter((token) => token.special);
    this.specials = special.map(({ content }) => content).sort((a, b) => b.length - a.length);
    this.specialIds = new Map(special.map(({ content, id }) => [content, id]));
    this.controlTokens = new ControlTokens(this.specialIds, (token) => this.decode([token]));
    this.guarded = [...this.specials, GUARD_OPEN, GUARD_CLOSE];
  }

  /** Number of tokens, added ones included. */
  get vocabSize(): number {
    return this.tokenizer.vocabSize;
  }

  encode(text: string): number[] {
    return this.tokenizer.encode(text);
  }

  /** Return the text of `tokens`; invalid UTF-8 becomes replacement characters. */
  decode(tokens: readonly number[], skipSpecialTokens = true): string {
    return this.tokenizer.decode(tokens, skipSpecialTokens);
  }

  /** Return whether the prompt ends with the mark that opens reasoning, so that answers begin inside. */
  beginsReasoning(thinking?: boolean): boolean {
    try {
      return this.renderChat([{ role: "user", content: "?" }], true, thinking).trimEnd().endsWith(OPEN);
    } catch (error) {
      if (error instanceof ChatTemplateError) return false;
      throw error;
    }
  }

  /** Return whether answers have reasoning between Qwen 3's marks, as far as the template shows that. */
  thought(thinking?: boolean): Thought {
    if (this.beginsReasoning(thinking)) return "begun";
    return this.source.includes(OPEN) && thinking !== false ? "may" : "";
  }

  /**
   * Return the conversation as the text that the target was trained on.
   *
   * @param thinking whether the target reasons before it answers; undefined for the template's default.
   * @throws ChatTemplateError the template refuses these messages, or fails.
   */
  renderChat(messages: readonly Message[], addGenerationPrompt = true, thinking?: boolean): string {
    const copies = messages.map((message) => ({ ...message }));
    try {
      return this.template.render({
        messages: copies,
        tools: null, // as transformers passes it
        add_generation_prompt: addGenerationPrompt,
        [DATE]: (format: string) => strftime(new Date(), format),
        ...this.specialTokens,
        ...(thinking === undefined ? {} : { [ENABLE_THINKING]: thinking }),
      });
    } catch (error) {
      throw new ChatTemplateError(`the chat template refuses this conversation: ${(error as Error).message}`);
    }
  }

  /** Return the tokens of a conversation. A special token that a message spells stays plain text. */
  encodeChat(messages: readonly Message[], addGenerationPrompt = true, thinking?: boolean): number[] {
    return this.encodeGuarded(this.renderChat(this.guard(messages), addGenerationPrompt, thinking));
  }

  /**
   * Return the tokens that follow `committed` up to the next answer, whether or not the last one was cut off.
   *
   * @param committed the conversation's tokens so far; empty for a new one.
   * @param history its messages; before the first question perhaps a system message.
   * @param turns the messages that follow, the last one the user's.
   * @param thinking see {@link renderChat}.
   * @throws ChatTemplateError see {@link encodeTurns}.
   */
  continueTurns(
    committed: readonly number[],
    history: readonly Message[],
    turns: readonly Message[],
    thinking?: boolean,
  ): number[] {
    if (!committed.length) return this.encodeChat([...history, ...turns], true, thinking);
    const tokens = this.encodeTurns(history, turns, thinking);
    if (this.stopTokens.has(committed.at(-1)!)) return tokens;
    // If there are several stop tokens (Llama 3 has two), add the one that the template writes.
    const { piece } = this.lastStop(this.renderChat(this.guard(history), false, thinking));
    return [...this.encode(piece), ...tokens];
  }

  /**
   * Return the tokens that continue a committed conversation by more turns, generation prompt included. The committed tokens
   * end with the end-of-turn token of the last answer; they stay, even if encoding the answer's text again would give other
   * tokens.
   *
   * @param history the messages so far; the last one is the assistant's.
   * @param thinking see {@link renderChat}.
   * @throws HistoryRewrittenError the conversation cannot be continued token by token.
   * @throws ChatTemplateError the template refuses the messages.
   */
  encodeTurns(history: readonly Message[], turns: readonly Message[], thinking?: boolean): number[] {
    const asked = this.renderChat(this.guard(history.slice(0, -1)), true, thinking); // the committed tokens began as this
    const before = this.renderChat(this.guard(history), false, thinking);
    const after = this.renderChat(this.guard([...history, ...turns]), true, thinking);
    const { piece, end } = this.lastStop(before);
    if (!after.startsWith(asked) || !after.startsWith(before.slice(0, end))) {
      throw new HistoryRewrittenError(
        "the chat template changes earlier messages when a new one follows; start a new conversation",
      );
    }
    // Encoded after the end-of-turn token, because some tokenizers treat the start of a text specially.
    const lead = this.encode(piece).length;
    return this.encodeGuarded(piece + after.slice(end)).slice(lead);
  }

  // -- special tokens typed by a user ----------------------------------------------------------

  /**
   * Return the messages with a placeholder for each special token that their text spells, and for the delimiters. Reasoning that
   * control tokens mark is left out: templates know it by these tokens alone, and drop it.
   */
  private guard(messages: readonly Message[]): Message[] {
    const spelled = new RegExp(this.guarded.map(escaped).join("|"), "gu");
    const placeholder = (text: string): string => `${GUARD_OPEN}${this.guarded.indexOf(text)}${GUARD_CLOSE}`;
    const contentOf = ({ content, role }: Message): string =>
      this.controlTokens.any && role === "assistant" ? splitReasoning(content).answer : content;
    return messages.map((message) => ({ ...message, content: contentOf(message).replace(spelled, placeholder) }));
  }

  /** Encode a rendered conversation; placeholders become plain text again. */
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

  /** Return the last end-of-turn token in `text` and the offset after it; the end of the text if there is none. */
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
