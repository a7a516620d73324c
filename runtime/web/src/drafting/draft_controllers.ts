/** Controllers: the shape of the next draft, fixed or learned from earlier rounds. */

import type { Budget } from "../drafters/base.js";
import type { Pushed, RoundEnded } from "./events.js";

/** Decide the shape of each draft from the outcomes of earlier rounds. */
export interface Controller {
  /** Return the budget of the next draft. */
  budget(): Budget;
  /**
   * Return whether to draft one more token while a verdict is in flight (optimistic drafting).
   *
   * @param drafted tokens drafted since that draft was sent.
   * @param probability the drafter's own, that the draft in flight and these tokens are all accepted.
   */
  ahead(drafted: number, probability: number): boolean;
  /** Learn from a round, from the hypothetical round of a draft that was not awaited, or from a pushed verdict. */
  observe(outcome: RoundEnded | Pushed): void;
  /** Seconds that each drafted token adds to the target's pass, as far as is known. */
  readonly tokenS: number;
}

/** Always the same shape; `lookahead` tokens are drafted while a verdict is in flight. */
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
    // Nothing is learned.
  }
}
