/** Text to tokens and back: byte-level BPE, as most targets have it. */

import { append } from "../tokens.js";
import { spelled, unspelled } from "./bytes.js";
import { merged } from "./merging.js";
import { checkedFile, splitterOf, type AddedToken, type Splitter, type TokenizerFile } from "./tokenizer_file.js";

/** Pieces of which the tokens are remembered, so many of them. */
const REMEMBERED = 10_000;

/** A tokenizer of a `tokenizer.json`. */
export class Tokenizer {
  /** Number of tokens, added ones included. */
  readonly vocabSize: number;
  readonly addedTokens: readonly AddedToken[];
  private readonly ids: ReadonlyMap<string, number>;
  private readonly pieces = new Map<number, string>();
  private readonly ranks: ReadonlyMap<string, number>;
  private readonly split: Splitter;
  private readonly added: ReadonlyMap<string, AddedToken>;
  private readonly special: ReadonlySet<number>;
  private readonly ignoreMerges: boolean;
  private readonly normalize: boolean;
  private readonly remembered = new Map<string, readonly number[]>();
  private readonly all: RegExp | undefined;
  private readonly ordinary: RegExp | undefined;

  /**
   * @param said the file's content as JSON has it.
   * @throws TokenizerError another kind of tokenizer.
   */
  constructor(said: unknown) {
    const file: TokenizerFile = checkedFile(said);
    this.ids = new Map(Object.entries(file.model.vocab));
    for (const [piece, id] of this.ids) this.pieces.set(id, piece);
    this.addedTokens = file.added_tokens;
    for (const token of file.added_tokens) this.pieces.set(token.id, token.content);
    this.vocabSize = this.pieces.size;
    const pairs = file.model.merges.map((merge) => (typeof merge === "string" ? merge : merge.join(" ")));
    this.ranks = new Map(pairs.map((pair, rank) => [pair, rank]));
    this.split = splitterOf(file.pre_tokenizer);
    this.added = new Map(file.added_tokens.map((token) => [token.content, token]));
    this.special = new Set(file.added_tokens.filter((token) => token.special).map(({ id }) => id));
    this.ignoreMerges = file.model.ignore_merges ?? false;
    this.normalize = file.normalizer !== null;
    this.all = anyOf(file.added_tokens);
    this.ordinary = anyOf(file.added_tokens.filter((token) => !token.special));
  }

  /** @param plainly special tokens are encoded as the text that they are. */
  encode(text: string, plainly = false): number[] {
    const tokens: number[] = [];
    text.split((plainly ? this.ordinary : this.all) ?? /(?!)/u).forEach((piece, at) => {
      if (at % 2) {
        tokens.push((this.added.get(piece) ?? this.added.get(piece.trim()))!.id); // the group of the pattern
        return;
      }
      if (!piece) return;
      for (const word of this.split(this.normalize ? piece.normalize("NFC") : piece)) {
        append(tokens, this.word(spelled(word)));
      }
    });
    return tokens;
  }

  /** Text of `tokens`; bytes that are no UTF-8 become replacement characters. */
  decode(tokens: readonly number[], skipSpecialTokens = true): string {
    const shown = skipSpecialTokens ? tokens.filter((token) => !this.special.has(token)) : tokens;
    return unspelled(shown.map((token) => this.pieces.get(token) ?? ""));
  }

  /** How the vocabulary writes a token; undefined where there is no such token. */
  pieceOf(token: number): string | undefined {
    return this.pieces.get(token);
  }

  /** The tokens of a word, by the merges that were learnt first. */
  private word(word: string): readonly number[] {
    const known = this.remembered.get(word);
    if (known) return known;
    const tokens = this.newTokens(word);
    if (this.remembered.size >= REMEMBERED) this.remembered.clear();
    this.remembered.set(word, tokens);
    return tokens;
  }

  private newTokens(word: string): number[] {
    const whole = this.ids.get(word);
    if (this.ignoreMerges && whole !== undefined) return [whole];
    const parts = merged([...word], (left, right) => this.ranks.get(`${left} ${right}`));
    return parts.flatMap((part) => this.ids.get(part) ?? []);
  }
}

/** Any of the tokens, as a group, so that splitting keeps it; longest first. */
function anyOf(tokens: readonly AddedToken[]): RegExp | undefined {
  if (!tokens.length) return undefined;
  const longest = [...tokens].sort((a, b) => b.content.length - a.content.length);
  const patterns = longest.map(({ content, lstrip, rstrip }) => {
    return (lstrip ? "\\s*" : "") + escaped(content) + (rstrip ? "\\s*" : "");
  });
  return new RegExp(`(${patterns.join("|")})`, "u");
}

/** A text as a pattern for it. */
export function escaped(text: string): string {
  return text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
}
