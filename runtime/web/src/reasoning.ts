/**
 * Reasoning in an answer: the text between `<think>` and `</think>` at its beginning, as Qwen 3 writes it.
 *
 * Other targets tell it by control tokens without text: channels of gpt-oss, marks of Gemma 4 and Mistral. In an answer's
 * text the marks of Qwen 3 stand in their place.
 */

export const OPEN = "<think>";
export const CLOSE = "</think>";
/** The template's variable by which a user switches reasoning on or off. */
export const ENABLE_THINKING = "enable_thinking";

/** Whether answers have reasoning: they begin inside it, they may begin with its mark, or they have none. */
export type Thought = "begun" | "may" | "";

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

type Role = "open" | "open named" | "close" | "header" | "message" | "end";

/** Roles by text. After "open named" the rest of the line is a channel's name. */
const MARKS: { readonly [text: string]: Role } = {
  "<think>": "open",
  "</think>": "close",
  "[THINK]": "open",
  "[/THINK]": "close",
  "<|channel>": "open named",
  "<channel|>": "close",
};
/** Of the format Harmony: `<|channel|>`, a channel's name, perhaps more, `<|message|>`, the text, `<|end|>`. */
const HARMONY: { readonly [text: string]: Role } = {
  "<|start|>": "header",
  "<|channel|>": "header",
  "<|message|>": "message",
  "<|end|>": "end",
};
const REASONING_CHANNEL = "analysis";

/** What has come so far of an answer. */
export interface ControlState {
  /** "header" or "name" while tokens have no text of the answer. */
  readonly inside: "text" | "header" | "name";
  /** The text of the header so far. */
  readonly header: string;
  /** Whether reasoning is open. */
  readonly reasoning: boolean;
  /** Whether the answer has begun. */
  readonly answered: boolean;
}

export const NO_CONTROL: ControlState = { inside: "text", header: "", reasoning: false, answered: false };

/**
 * What stands in the place of an answer's tokens.
 *
 * Example (gpt-oss): `<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>2` is
 * `<think>Two.</think>2`. Of the channels of gpt-oss only `analysis` is reasoning; a call of a tool stays text.
 */
export class ControlTokens {
  private readonly roles = new Map<number, Role>();

  /**
   * @param special ids of special tokens by text.
   * @param decode returns the text of a token.
   */
  constructor(
    special: ReadonlyMap<string, number>,
    private readonly decode: (token: number) => string,
  ) {
    const harmony = Object.keys(HARMONY).every((text) => special.has(text));
    for (const [text, role] of Object.entries({ ...MARKS, ...(harmony ? HARMONY : {}) })) {
      if (special.has(text)) this.roles.set(special.get(text)!, role);
    }
  }

  /** Whether there are any such tokens. */
  get any(): boolean {
    return this.roles.size > 0;
  }

  /** Take a token; return the new state and what stands in the token's place, undefined for its own text. */
  step(state: ControlState, token: number): [ControlState, string | undefined] {
    const role = this.roles.get(token);
    if (role === undefined) return this.ordinary(state, token);
    if (role === "header" || role === "end") return [{ ...state, inside: "header", header: "" }, ""];
    const channel = /\S+/u.exec(state.header)?.[0];
    const opens = role === "message" ? channel === REASONING_CHANNEL && !state.answered : role !== "close";
    const inside = role === "open named" ? "name" : "text";
    if (opens) return [{ ...state, inside, reasoning: true }, state.reasoning ? "\n\n" : OPEN];
    const piece = state.reasoning || role === "close" ? CLOSE : state.answered ? "\n\n" : "";
    return [{ ...state, inside, reasoning: false, answered: true }, piece];
  }

  private ordinary(state: ControlState, token: number): [ControlState, string | undefined] {
    if (state.inside === "text") return [state, undefined];
    const text = this.decode(token);
    if (state.inside === "header") return [{ ...state, header: state.header + text }, ""];
    const end = text.indexOf("\n");
    return end < 0 ? [state, ""] : [{ ...state, inside: "text" }, text.slice(end + 1)];
  }
}
