/** Reasoning in an answer: the text between `<think>` and `</think>` at its beginning, as Qwen 3 writes it. */

export const OPEN = "<think>";
export const CLOSE = "</think>";
/** The template's variable by which a user switches reasoning on or off. */
export const ENABLE_THINKING = "enable_thinking";

/** An answer in its two parts, without the marks and the white space around them. */
export interface Reasoned {
  readonly reasoning: string;
  readonly answer: string;
}

/**
 * Split an answer's text. Reasoning that has no end takes all of it. The answer is the end of the text, as it is there.
 *
 * Example: `<think>\nTwo.\n</think>\n\n2` is `{ reasoning: "Two.", answer: "2" }`.
 *
 * @param begun whether the prompt ends with the opening mark, so that the text begins inside.
 * @param final whether the text is whole; else an end that may become a mark is left out of both parts.
 */
export function splitReasoning(text: string, begun = false, final = true): Reasoned {
  const body = trimmedStart(text);
  if (!final && body !== OPEN && OPEN.startsWith(body)) return { reasoning: "", answer: "" };
  if (!begun && !body.startsWith(OPEN)) return { reasoning: "", answer: text };
  const inside = body.startsWith(OPEN) ? body.slice(OPEN.length) : body;
  const end = inside.indexOf(CLOSE);
  if (end >= 0) return { reasoning: trimmed(inside.slice(0, end)), answer: trimmedStart(inside.slice(end + CLOSE.length)) };
  return { reasoning: trimmed(final ? inside : inside.slice(0, inside.length - openLength(inside))), answer: "" };
}

/** Return how much of a text's end may become the closing mark. */
function openLength(text: string): number {
  for (let length = Math.min(CLOSE.length - 1, text.length); length > 0; length--) {
    if (text.endsWith(CLOSE.slice(0, length))) return length;
  }
  return 0;
}

/** Trim as Python does here: what else is white space differs from language to language. */
function trimmed(text: string): string {
  return trimmedStart(text).replace(/[ \t\n\r]+$/u, "");
}

function trimmedStart(text: string): string {
  return text.replace(/^[ \t\n\r]+/u, "");
}
