/** A `tokenizer.json` of the tokenizers library, as far as byte-level BPE needs it. */

import { MoaError } from "../errors.js";

/** A tokenizer file or a template that this program cannot read. */
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

/** Cuts a text into pieces, each of which is encoded for itself. */
export type Splitter = (text: string) => string[];

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

export interface TokenizerFile {
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

/** GPT-2's. */
const USUAL_PIECES = "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
/** What Unicode calls white space; JavaScript's has another character, and lacks one. */
const SPACES = "\\t-\\r \\x85\\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";

/**
 * The file, if it is one of those.
 *
 * @throws TokenizerError it is not.
 */
export function checkedFile(said: unknown): TokenizerFile {
  const file = said as TokenizerFile;
  if (typeof said !== "object" || said === null || typeof file.model !== "object") throw unknown("no tokenizer.json");
  if ((file.model.type ?? "BPE") !== "BPE") throw unknown(`a model of type ${file.model.type}`);
  if (file.decoder?.type !== "ByteLevel") throw unknown(`a decoder of type ${file.decoder?.type ?? "none"}`);
  if (file.normalizer !== null && file.normalizer.type !== "NFC") throw unknown(`a normalizer ${file.normalizer.type}`);
  const word = file.added_tokens.find((token) => token.single_word);
  if (word) throw unknown(`the added token ${word.content}, which must be a word`);
  return file;
}

/** @throws TokenizerError what is not known here. */
export function splitterOf(pre: PreTokenizer | null): Splitter {
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

/** What matches a pattern, and what lies between, each for itself. */
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

/** A pattern of Oniguruma, of the kind that tokenizers have, as JavaScript writes it. */
function expressionOf(pattern: string): RegExp {
  const anyCase = pattern.replace(/\(\?i:([^()]*)\)/g, (_, letters: string) => {
    return `(?:${letters.replace(/[a-z]/gi, (letter) => `[${letter.toLowerCase()}${letter.toUpperCase()}]`)})`;
  });
  let within = false; // a class of characters
  const spaced = anyCase.replace(/\\.|\[|\]/gs, (part) => {
    if (part === "[" || part === "]") within = part === "[";
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
