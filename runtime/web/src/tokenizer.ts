/** Text to tokens and back: byte-level BPE from a `tokenizer.json`. */

import { MoaError } from "./errors.js";
import { append } from "./tokens.js";
import { decodeUtf8, encodeUtf8 } from "./utf8.js";

/** Words whose tokens are cached, at most. */
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

  /**
   * Return the tokens of a text.
   *
   * @param plainly encode special tokens as plain text.
   */
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

  /** Return the text of `tokens`; invalid UTF-8 becomes replacement characters. */
  decode(tokens: readonly number[], skipSpecialTokens = true): string {
    const shown = skipSpecialTokens ? tokens.filter((token) => !this.special.has(token)) : tokens;
    return unspelled(shown.map((token) => this.pieces.get(token) ?? ""));
  }

  /** Return the vocabulary's spelling of a token; undefined if there is no such token. */
  pieceOf(token: number): string | undefined {
    return this.pieces.get(token);
  }

  /** Return the tokens of a word, by the merges that were learned first. */
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

/** Return a pattern for any of the tokens, longest first; a group, so that splitting keeps it. */
function anyOf(tokens: readonly AddedToken[]): RegExp | undefined {
  if (!tokens.length) return undefined;
  const longest = [...tokens].sort((a, b) => b.content.length - a.content.length);
  const patterns = longest.map(({ content, lstrip, rstrip }) => {
    return (lstrip ? "\\s*" : "") + escaped(content) + (rstrip ? "\\s*" : "");
  });
  return new RegExp(`(${patterns.join("|")})`, "u");
}

/** Return a pattern that matches a text literally. */
export function escaped(text: string): string {
  return text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
}

/** A tokenizer file cannot be read. */
export class TokenizerError extends MoaError {
  override readonly name = "TokenizerError";
}

export interface AddedToken {
  readonly id: number;
  readonly content: string;
  readonly special: boolean;
  readonly lstrip: boolean;
  readonly rstrip: boolean;
}

/** Cut a text into pieces that are encoded separately. */
type Splitter = (text: string) => string[];

interface PreTokenizer {
  readonly type: string;
  readonly add_prefix_space?: boolean;
  readonly use_regex?: boolean;
  readonly individual_digits?: boolean;
  readonly pattern?: { readonly Regex?: string; readonly String?: string };
  readonly behavior?: string;
  readonly invert?: boolean;
  readonly pretokenizers?: readonly PreTokenizer[];
}

interface TokenizerFile {
  readonly added_tokens: readonly (AddedToken & { readonly single_word?: boolean })[];
  readonly normalizer: { readonly type: string } | null;
  readonly pre_tokenizer: PreTokenizer | null;
  readonly decoder: { readonly type: string } | null;
  readonly model: {
    readonly type?: string;
    readonly vocab: { readonly [piece: string]: number };
    readonly merges: readonly (string | readonly [string, string])[];
    readonly ignore_merges?: boolean;
  };
}

/** The pattern of GPT-2. */
const USUAL_PIECES = "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
/** Unicode's white space; JavaScript's `\s` has one character more, and lacks one. */
const SPACES = "\\t-\\r \\x85\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";

/**
 * Return the content of a `tokenizer.json`, if it is a byte-level BPE.
 *
 * @throws TokenizerError it is not.
 */
function checkedFile(said: unknown): TokenizerFile {
  const file = said as TokenizerFile;
  if (typeof said !== "object" || said === null || typeof file.model !== "object") throw unknown("no tokenizer.json");
  if ((file.model.type ?? "BPE") !== "BPE") throw unknown(`a model of type ${file.model.type}`);
  if (file.decoder?.type !== "ByteLevel") throw unknown(`a decoder of type ${file.decoder?.type ?? "none"}`);
  if (file.normalizer !== null && file.normalizer.type !== "NFC") throw unknown(`a normalizer ${file.normalizer.type}`);
  const word = file.added_tokens.find((token) => token.single_word);
  if (word) throw unknown(`the added token ${word.content}, which must be a word`);
  return file;
}

/**
 * Return the splitter of a pre-tokenizer.
 *
 * @throws TokenizerError an unknown pre-tokenizer.
 */
function splitterOf(pre: PreTokenizer | null): Splitter {
  switch (pre?.type) {
    case "ByteLevel": {
      const split = pre.use_regex === false ? whole : matching(USUAL_PIECES);
      const prefix = pre.add_prefix_space ?? true;
      return (text) => split(prefix && !text.startsWith(" ") ? ` ${text}` : text);
    }
    case "Digits":
      return matching(pre.individual_digits ? "\\p{N}" : "\\p{N}+");
    case "Split": {
      const pattern = pre.pattern?.Regex;
      if (pattern === undefined || pre.behavior !== "Isolated" || pre.invert) throw unknown("such a Split");
      return matching(pattern);
    }
    case "Sequence": {
      const splitters = (pre.pretokenizers ?? []).map(splitterOf);
      return (text) => splitters.reduce((pieces, split) => pieces.flatMap(split), [text]);
    }
    default:
      throw unknown(`a pre-tokenizer of type ${pre?.type ?? "none"}`);
  }
}

function whole(text: string): string[] {
  return [text];
}

/** Return a splitter into the matches of a pattern and the text between them. */
function matching(pattern: string): Splitter {
  const expression = expressionOf(pattern);
  return (text) => {
    const pieces: string[] = [];
    let end = 0;
    for (const match of text.matchAll(expression)) {
      if (!match[0]) continue;
      if (match.index > end) pieces.push(text.slice(end, match.index));
      pieces.push(match[0]);
      end = match.index + match[0].length;
    }
    if (end < text.length) pieces.push(text.slice(end));
    return pieces;
  };
}

/** Translate an Oniguruma pattern, of the kind that tokenizers have, to JavaScript. */
function expressionOf(pattern: string): RegExp {
  const anyCase = pattern.replace(/\(\?i:([^()]*)\)/g, (_, letters: string) => {
    return `(?:${letters.replace(/[a-z]/gi, (letter) => `[${letter.toLowerCase()}${letter.toUpperCase()}]`)})`;
  });
  let within = false; // a class of characters
  const spaced = anyCase.replace(/\\.|\[|\]/gs, (part) => {
    if (part === "[" || part === "]") within = part === "[";
    if (part === "\\-") return "\\x2d"; // QuickJS of 2024 refuses it with the flag u
    if (part === "\\s") return within ? SPACES : `[${SPACES}]`;
    if (part !== "\\S") return part;
    if (within) throw unknown("\\S in a class of characters");
    return `[^${SPACES}]`;
  });
  try {
    return new RegExp(spaced, "gu");
  } catch {
    throw unknown(`the pattern ${pattern}`);
  }
}

function unknown(what: string): TokenizerError {
  return new TokenizerError(`cannot read the tokenizer: it has ${what}, which this runtime does not know`);
}

/**
 * Merge the parts of a word: always the pair that was learned first, of equal pairs the leftmost, until none is left. The time is
 * nearly linear in the length of the word, so a page does not freeze while a text is pasted.
 *
 * @param word its first parts.
 * @param rankOf returns when a pair was learned, from 0 on; undefined for no pair.
 */
function merged(word: readonly string[], rankOf: (left: string, right: string) => number | undefined): string[] {
  const count = word.length;
  const parts: (string | undefined)[] = [...word]; // undefined for a part that was merged into the one before
  const next = word.map((_, at) => at + 1);
  const before = word.map((_, at) => at - 1);
  const waiting = new Heap(); // pairs, by rank and then by position; stale ones stay until their turn
  const rankAt = (at: number): number | undefined => {
    const [left, right] = [parts[at], parts[next[at]!]];
    return left === undefined || right === undefined ? undefined : rankOf(left, right);
  };
  const consider = (at: number): void => {
    const rank = rankAt(at);
    if (rank !== undefined) waiting.push(rank * count + at);
  };
  for (let at = 0; at < count; at++) consider(at);
  for (let first = waiting.pop(); first !== undefined; first = waiting.pop()) {
    const at = first % count;
    if (rankAt(at) !== (first - at) / count) continue; // stale: one of the two was merged meanwhile
    const right = next[at]!;
    parts[at] = parts[at]! + parts[right]!;
    parts[right] = undefined;
    next[at] = next[right]!;
    before[next[at]!] = at;
    consider(at);
    consider(before[at]!);
  }
  return parts.filter((part) => part !== undefined);
}

/** A heap of numbers, the least first. */
class Heap {
  private readonly numbers: number[] = [];

  push(number: number): void {
    const { numbers } = this;
    let at = numbers.push(number) - 1;
    for (let above = (at - 1) >> 1; at > 0 && numbers[above]! > number; above = (at - 1) >> 1) {
      numbers[at] = numbers[above]!;
      at = above;
    }
    numbers[at] = number;
  }

  pop(): number | undefined {
    const { numbers } = this;
    const least = numbers[0];
    const last = numbers.pop();
    if (last === undefined || !numbers.length) return least;
    let at = 0;
    for (let below = 1; below < numbers.length; below = 2 * at + 1) {
      if (below + 1 < numbers.length && numbers[below + 1]! < numbers[below]!) below++;
      if (numbers[below]! >= last) break;
      numbers[at] = numbers[below]!;
      at = below;
    }
    numbers[at] = last;
    return least;
  }
}

/** The character of each byte in byte-level vocabularies: itself if it is visible, else one from 256 on. */
const CHARACTERS: readonly string[] = (() => {
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => {
    const seen = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    return String.fromCharCode(seen ? byte : next++);
  });
})();
const BYTES: ReadonlyMap<string, number> = new Map(CHARACTERS.map((character, byte) => [character, byte]));

/** Return the UTF-8 bytes of a text, one character for each. */
function spelled(text: string): string {
  return Array.from(encodeUtf8(text), (byte) => CHARACTERS[byte]!).join("");
}

/** Return the text of such pieces; invalid UTF-8 becomes replacement characters. Other pieces stay as they are. */
function unspelled(pieces: readonly string[]): string {
  const bytes: number[] = [];
  for (const piece of pieces) {
    const found = Array.from(piece, (character) => BYTES.get(character));
    const known = found.every((byte) => byte !== undefined);
    for (const byte of known ? found : encodeUtf8(piece)) bytes.push(byte!);
  }
  return decodeUtf8(Uint8Array.from(bytes));
}
