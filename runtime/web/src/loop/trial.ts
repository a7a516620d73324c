/** Drafts that are not sent: what they would have brought shows in what the server writes by itself. */

import { depthOf, depths, walk, type DraftTree } from "../session/tree.js";
import type { RoundEnded } from "./events.js";

/** One draft at a time, made while the server goes on by itself, and compared with what it writes. */
export class Trial {
  /** Tokens behind which the next is to be made at least: each position is tried once. */
  next = 0;
  private start = 0;
  private tree: DraftTree | undefined;
  private seconds = 0;

  /** Whether a draft is still to be compared. */
  get runs(): boolean {
    return this.tree !== undefined;
  }

  /** A draft behind the first `start` tokens was made in so many seconds. */
  begin(start: number, tree: DraftTree, seconds: number): void {
    this.start = start;
    this.tree = tree;
    this.seconds = seconds;
    this.next = start + 1;
  }

  /** The text is another one. */
  forget(): void {
    this.tree = undefined;
    this.next = 0;
  }

  /**
   * Once it is known: the round that this draft would have had; undefined before.
   *
   * @param committed the conversation's tokens.
   * @param roundS seconds that a round without a draft would take.
   * @param tokenS those that each drafted token adds.
   * @param sharing conversations that share the target.
   */
  compare(committed: readonly number[], roundS: number, tokenS: number, sharing: number): RoundEnded | undefined {
    const { tree } = this;
    if (tree === undefined) return undefined;
    const known = committed.slice(this.start);
    const levels = [0, ...depths(tree.parents)];
    const path = walk(tree, (node) => known[levels[node]!]);
    if (path.length === known.length) return undefined; // what comes next decides
    this.tree = undefined;
    const drafted = tree.tokens.length;
    return {
      event: "RoundEnded",
      supplied: 0,
      drafted,
      depth: depthOf(tree),
      accepted: path.length,
      steps: tree.steps,
      draftS: this.seconds,
      waitedS: roundS + tokenS * drafted,
      computeS: null,
      sharing,
    };
  }
}
