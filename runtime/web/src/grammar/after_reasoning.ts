/** Grammars of answers that may reason before they conform. */

import { CLOSE, OPEN, type Thought } from "../reasoning.js";
import type { Sampling } from "../session/sampling.js";

/** White space of JSON as targets were trained on it, see `SPACING` in `moa_runtime/grammar/compiler.py`. */
const SPACING = '"x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false}';

/**
 * Return the sampling of an answer that is JSON after its reasoning, if answers may have some: in llguidance's Lark.
 *
 * Regular expressions and Lark grammars hold for the whole answer, and a schema that is no object stays for the verifier to
 * refuse.
 *
 * @param thought see `ChatTokenizer.thought`.
 * @param special ids of the marks that are special tokens.
 */
export function afterReasoning(sampling: Sampling, thought: Thought, special: ReadonlyMap<string, number>): Sampling {
  const { grammar } = sampling;
  if (!thought || (grammar?.kind !== "json_object" && grammar?.kind !== "json_schema")) return sampling;
  const schema = spacedSchema(grammar.kind === "json_schema" ? grammar.text : '{"type": "object"}');
  if (schema === undefined) return sampling;
  const marked = (mark: string): string => (special.has(mark) ? `<[${special.get(mark)}]>` : JSON.stringify(mark));
  const begins = thought === "may" ? `${marked(OPEN)} ` : "";
  const text = [
    "%llguidance {}",
    thought === "may" ? "start: answer | thought SPACE answer" : "start: thought SPACE answer",
    `thought${special.has(CLOSE) ? "" : "[lazy]"}: ${begins}/(.|\\n)*/ ${marked(CLOSE)}`,
    "SPACE: /[ \\n]{0,4}/",
    `answer: %json ${schema}`,
  ].join("\n");
  return { ...sampling, grammar: { kind: "lark", text } };
}

/** Return a JSON schema with {@link SPACING}, unless it has options of its own; undefined for what is no object. */
function spacedSchema(text: string): string | undefined {
  let schema: unknown;
  try {
    schema = JSON.parse(text);
  } catch {
    return undefined;
  }
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) return undefined;
  if ("x-guidance" in schema) return text;
  // Into the text as it is: numbers written anew might lose digits.
  return text.replace("{", Object.keys(schema).length ? `{${SPACING}, ` : `{${SPACING}`);
}
