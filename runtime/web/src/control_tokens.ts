/**
 * Control tokens that tell an answer's reasoning from the rest: channels of gpt-oss, marks of Gemma 4 and Mistral.
 *
 * Such tokens have no text. In an answer's text the marks of `reasoning.ts` stand in their place.
 */

import { CLOSE, OPEN } from "./reasoning.js";

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
