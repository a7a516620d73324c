/** Texts with origins, for tests. */

import type { Origin, TextSpan } from "@moa-edge/runtime";

/** Spans from `[text, origin]` or `[text, origin, committed]`. */
export function pieces(...cut: readonly (readonly [string, Origin] | readonly [string, Origin, boolean])[]): TextSpan[] {
  return cut.map(([text, origin, committed = true]) => ({ text, origin, committed }));
}

/** Numbers below a limit, the same each time. */
export function numbers(seed: number): (limit: number) => number {
  let state = seed;
  return (limit) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
}
