/** Checks of the options of a question. */

import { ChatError } from "./errors.js";
import { biased, penalised, type Sampling } from "./session/sampling.js";
import { LARGEST_REAL, UINT64 } from "./session/snapshot.js";
import { Capability } from "./wire/moa/v1/session_pb.js";

const UINT32 = 2 ** 32 - 1;
const MOST_BIASED = 1024;

/**
 * Check a question's options.
 *
 * @param capabilities those of the verifier; null if they are not known yet.
 * @throws ChatError a value is out of range, or not supported by the verifier.
 */
export function checkRequest(
  maxNewTokens: number,
  sampling: Sampling,
  capabilities: readonly Capability[] | null = null,
): void {
  const { minP, seed, temperature, topK, topP } = sampling;
  const { frequencyPenalty = 0, logitBias = [], minTokens = 0, presencePenalty = 0, repetitionPenalty = 1 } = sampling;
  if (!(temperature >= 0 && temperature <= LARGEST_REAL)) {
    throw new ChatError(`a temperature is 0 or more, not ${temperature}`);
  }
  if (!(topP >= 0 && topP <= 1)) throw new ChatError(`top_p is from 0 to 1, not ${topP}`);
  if (typeof seed !== "bigint" || seed < 0n || seed > UINT64) {
    throw new ChatError(`a seed is a whole number of 64 bits (a bigint), 0 or more, not ${seed}`);
  }
  for (const [name, value] of Object.entries({ top_k: topK, min_tokens: minTokens })) {
    if (!Number.isInteger(value) || value < 0 || value > UINT32) {
      throw new ChatError(`${name} is a whole number of 32 bits, 0 or more, not ${value}`);
    }
  }
  if (!(minP >= 0 && minP <= 1)) throw new ChatError(`min_p is from 0 to 1, not ${minP}`);
  for (const [name, value] of Object.entries({ presence_penalty: presencePenalty, frequency_penalty: frequencyPenalty })) {
    if (!(value >= -2 && value <= 2)) throw new ChatError(`${name} is from -2 to 2, not ${value}`);
  }
  if (!(repetitionPenalty > 0 && repetitionPenalty <= 10)) {
    throw new ChatError(`repetition_penalty is above 0 and at most 10, not ${repetitionPenalty}`);
  }
  if (logitBias.length > MOST_BIASED) {
    throw new ChatError(`logit_bias has at most ${MOST_BIASED} tokens, not ${logitBias.length}`);
  }
  for (const [token, bias] of logitBias) {
    if (!(Number.isInteger(token) && token >= 0 && token <= UINT32 && bias >= -100 && bias <= 100)) {
      throw new ChatError(`a logit_bias gives a token a number from -100 to 100, not ${token}, ${bias}`);
    }
  }
  const lacks = (capability: Capability): boolean => capabilities !== null && !capabilities.includes(capability);
  if ((penalised(sampling) && lacks(Capability.PENALTIES)) || (biased(sampling) && lacks(Capability.LOGIT_BIAS))) {
    throw new ChatError("this verifier has no penalties, logit_bias or min_tokens: it is older than this program");
  }
  if (sampling.grammar && lacks(Capability.GRAMMAR)) {
    throw new ChatError("this verifier has no grammars: install moa-edge[grammar] on its machine");
  }
  if (!Number.isSafeInteger(maxNewTokens) || maxNewTokens < 0) {
    throw new ChatError(`an answer may have 0 tokens (no limit) or more, a whole number, not ${maxNewTokens}`);
  }
}
