/** What a draft may be and cost: fixed, or as it pays. */

import type { Budget } from "./budget.js";
import type { Pushed, RoundEnded } from "./events.js";

/** Decides the shape of each draft from what earlier rounds showed. */
export interface Controller {
  /** Of the next draft. */
  budget(): Budget;
  /**
   * Whether to draft one more token while a verdict is on its way (optimistic drafting).
   *
   * @param drafted tokens behind the draft that is on its way, which were drafted since.
   * @param probability the drafter's own, that all of it and these are right.
   */
  ahead(drafted: number, probability: number): boolean;
  /** A round has ended, or would have with a draft that was not sent; or the server went on by itself. */
  observe(outcome: RoundEnded | Pushed): void;
  /** Seconds that the target's pass takes longer for each drafted token, as far as is known. */
  readonly tokenS: number;
}

/** Always the same shape; `lookahead` tokens are drafted while a verdict is on its way. */
export class FixedShape implements Controller {
  readonly tokenS = 0;

  constructor(
    private readonly shape: Budget,
    private readonly lookahead = 0,
  ) {}

  budget(): Budget {
    return this.shape;
  }

  ahead(drafted: number): boolean {
    return drafted < this.lookahead;
  }

  observe(): void {
    // Nothing is learnt.
  }
}
