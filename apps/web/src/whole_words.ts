/**
 * Origins by words: tokens are parts of words, but a word is shown in one colour.
 *
 * A word gets the weakest origin of its parts: unconfirmed text is weaker than confirmed text; then kept text is the weakest, and
 * offline text, the server's text and drafted text follow. Text taken back in the middle of a word becomes the whole word that it
 * would have made, before the present one.
 */

import type { Origin, TextSpan } from "@moa-edge/runtime";

import type { Dropped } from "./message.js";

const WEAKEST_LAST: readonly Origin[] = ["drafted", "corrected", "offline", "kept"];
/** Letters and digits, except of scripts without spaces, in which a sentence would be one word. */
const LETTER =
  /^(?![\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff])[\p{L}\p{N}_]/u;
const APOSTROPHES = "'\u2019";

/** Return the same text, cut so that each word has one origin. */
export function wholeWords(spans: readonly TextSpan[]): TextSpan[] {
  const text = spans.map((span) => span.text).join("");
  const words = dividedWords(text, spans);
  const made: TextSpan[] = [];
  let at = 0;
  let end = 0;
  for (const span of spans) {
    end += span.text.length;
    while (at < end) {
      const word = words[0];
      if (word !== undefined && at === word.start) {
        made.push({ ...word.weakest, text: text.slice(at, word.end) });
        at = word.end;
        words.shift();
      } else {
        const until = word === undefined ? end : Math.min(end, word.start);
        made.push({ ...span, text: text.slice(at, until) });
        at = until;
      }
    }
  }
  return made;
}

/** Return the texts taken back, each from the beginning of its first word on, after a space that stayed. */
export function wholeDropped(dropped: readonly Dropped[], content: string): Dropped[] {
  return dropped.map((one) => fromWord(one, content));
}

interface Divided {
  readonly start: number;
  readonly end: number;
  readonly weakest: TextSpan;
}

/** Return each word that lies in several spans, with the weakest of these, in order. */
function dividedWords(text: string, spans: readonly TextSpan[]): Divided[] {
  const found: Divided[] = [];
  let at = 0;
  for (let index = 1; index < spans.length; index++) {
    const left = spans[index - 1]!;
    const right = spans[index]!;
    at += left.text.length;
    const last = found.at(-1);
    if (last !== undefined && at < last.end) {
      found[found.length - 1] = { ...last, weakest: weaker(last.weakest, right) };
      continue;
    }
    const word = wordAround(text, at);
    if (word !== null) found.push({ ...word, weakest: weaker(left, right) });
  }
  return found;
}

function fromWord(one: Dropped, content: string): Dropped {
  if (/^\s/u.test(one.text) && /^\s/u.test(content.slice(one.offset))) {
    return { offset: one.offset + 1, text: one.text.slice(1) };
  }
  const letters = APOSTROPHES.includes(one.text.charAt(0)) ? one.text.slice(1) : one.text;
  const offset = Math.min(one.offset, content.length); // the text may have become shorter since
  if (!LETTER.test(letters) && wordAround(content, offset) === null) return one;
  let start = offset;
  while (start > 0 && inWord(content, start - 1)) start--;
  return { offset: start, text: content.slice(start, offset) + one.text };
}

/** Return the word that contains this offset and the character before; null if there is none. */
function wordAround(text: string, at: number): { start: number; end: number } | null {
  if (at <= 0 || at >= text.length || !inWord(text, at - 1) || !inWord(text, at)) return null;
  let start = at - 1;
  let end = at + 1;
  while (start > 0 && inWord(text, start - 1)) start--;
  while (end < text.length && inWord(text, end)) end++;
  return { start, end };
}

function inWord(text: string, at: number): boolean {
  const unit = text.charAt(at);
  if (APOSTROPHES.includes(unit)) {
    return at > 0 && at < text.length - 1 && isLetter(text, at - 1) && isLetter(text, at + 1);
  }
  return isLetter(text, at);
}

/** Return whether the character at an offset is a letter; the second half of a surrogate pair counts like the first. */
function isLetter(text: string, at: number): boolean {
  const low = text.charCodeAt(at);
  const from = low >= 0xdc00 && low < 0xe000 && at > 0 ? at - 1 : at;
  return LETTER.test(String.fromCodePoint(text.codePointAt(from)!));
}

function weaker(one: TextSpan, other: TextSpan): TextSpan {
  return weakness(other) > weakness(one) ? other : one;
}

function weakness({ origin, committed }: TextSpan): number {
  return (committed ? 0 : WEAKEST_LAST.length) + WEAKEST_LAST.indexOf(origin);
}
