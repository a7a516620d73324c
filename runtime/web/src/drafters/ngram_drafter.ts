/** Drafting with an n-gram index alone, without a model. */

import { sends, type Budget } from "../loop/budget.js";
import type { Drafter } from "../loop/drafter.js";
import { GREEDY, type Sampling } from "../session/sampling.js";
import { NOTHING, treeBehind, type DraftTree } from "../session/tree.js";
import { Luck } from "./luck.js";
import { NgramMixture, worthCopying } from "./mixture.js";

/**
 * A drafter without a model: all that it knows takes no step. It knows the conversation and what it wrote itself, nothing
 * else, so during an outage it goes stale. Memory rows are of no use to it.
 */
export class NgramDrafter implements Drafter {
  readonly rows = 0;
  readonly needsRows = false;
  readonly manners = null;
  private readonly mixture: NgramMixture;

  /** @param stopTokens ids that end a turn; they are not copied. */
  constructor(stopTokens: Iterable<number> = []) {
    this.mixture = new NgramMixture(stopTokens);
  }

  addRows(): void {
    // Memory rows are not used.
  }

  truncateRows(): void {
    // Memory rows are not used.
  }

  /**
   * A chain of what followed before, which ends where the last token never occurred before. It is as long as the levels,
   * where that pays, and longer, also without levels, while all of it is likely enough: see {@link worthCopying}.
   */
  propose(prefix: readonly number[], budget: Budget, sampling: Sampling = GREEDY): DraftTree {
    const text = [...prefix];
    const logprobs: number[] = [];
    const luck = new Luck(sampling);
    let logprob = 0;
    while (logprobs.length < Math.min(budget.nodes, budget.depth)) {
      this.mixture.confirm(text);
      const copy = this.mixture.copy(text, luck);
      if (!copy) break;
      logprob += copy.logprob;
      const levelled = logprobs.length < budget.levels && (!logprobs.length || sends(budget, logprob));
      if (!levelled && !worthCopying(budget, logprob)) break;
      text.push(copy.token);
      logprobs.push(copy.logprob);
    }
    return treeBehind(NOTHING, text.slice(prefix.length), logprobs);
  }
}
