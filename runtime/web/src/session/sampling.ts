/** Sampling parameters of an answer. */

/** Kinds of grammars, in the order of the wire's enum. */
export const GRAMMAR_KINDS = ["json_object", "json_schema", "regex", "lark"] as const;

/** What an answer conforms to: any JSON object (`text` is empty), or a schema, expression or grammar as llguidance reads them. */
export interface Grammar {
  readonly kind: (typeof GRAMMAR_KINDS)[number];
  readonly text: string;
}

/** `temperature` 0 is greedy. `seed` (64 bits) and position determine a token's noise. `topK`, `minP`: 0 disables. */
export interface Sampling {
  readonly temperature: number;
  readonly topP: number;
  readonly seed: bigint;
  readonly topK: number;
  readonly minP: number;
  /** Taken from the logit of a token of the answer, once; -2 to 2, by default 0. */
  readonly presencePenalty?: number;
  /** The same for each time that the answer has the token. */
  readonly frequencyPenalty?: number;
  /** Divides a positive logit of a token of the conversation, multiplies another; above 0, at most 10, by default 1. */
  readonly repetitionPenalty?: number;
  /** What is added to the logits of tokens, -100 to 100; at most 1024 pairs. */
  readonly logitBias?: readonly (readonly [token: number, bias: number])[];
  /** Tokens of the answer before which it cannot stop; by default 0. */
  readonly minTokens?: number;
  /** What the answer conforms to. Without a network the device, which does not know it, writes nothing. */
  readonly grammar?: Grammar;
}

export const GREEDY: Sampling = { temperature: 0, topP: 1, seed: 0n, topK: 0, minP: 0 };

/** Return whether a verifier needs the capability `PENALTIES`. */
export function penalised({ frequencyPenalty = 0, presencePenalty = 0, repetitionPenalty = 1 }: Sampling): boolean {
  return frequencyPenalty !== 0 || presencePenalty !== 0 || repetitionPenalty !== 1;
}

/** Return whether a verifier needs the capability `LOGIT_BIAS`. */
export function biased({ logitBias = [], minTokens = 0 }: Sampling): boolean {
  return logitBias.length > 0 || minTokens > 0;
}
