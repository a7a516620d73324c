/** Checks of the options of a question. */

import { ChatError } from "./errors.js";
import type { Sampling } from "./session/sampling.js";
import { LARGEST_REAL, UINT64 } from "./session/snapshot.js";

/**
 * Check a question's options.
 *
 * @throws ChatError a value is out of range, or not supported by the verifier.
 */
export function checkRequest(maxNewTokens: number, sampling: Sampling): void {
  const { minP, seed, temperature, topK, topP } = sampling;
  if (!(temperature >= 0 && temperature <= LARGEST_REAL)) {
    throw new ChatError(`a temperature is 0 or more, not ${temperature}`);
  }
  if (!(topP >= 0 && topP <= 1)) throw new ChatError(`top_p is from 0 to 1, not ${topP}`);
  if (typeof seed !== "bigint" || seed < 0n || seed > UINT64) {
    throw new ChatError(`a seed is a whole number of 64 bits (a bigint), 0 or more, not ${seed}`);
  }
  if (topK || minP) {
    throw new ChatError("the verifier takes temperature, top_p and a seed so far: leave out top_k and min_p");
  }
  if (!Number.isSafeInteger(maxNewTokens) || maxNewTokens < 0) {
    throw new ChatError(`an answer may have 0 tokens (no limit) or more, a whole number, not ${maxNewTokens}`);
  }
}
