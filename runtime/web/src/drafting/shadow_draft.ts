/** Drafts that are not sent: the server's own text shows how much of them it would have accepted. */

import { depthOf, depths, walk, type DraftTree } from "../session/tree.js";
import type { RoundEnded } from "./events.js";

/** Compare one draft at a time, made while the server streams, with the text that the server streams. */
export class ShadowDraft {
  /** Length of the shortest prefix for the next draft, so that each position is drafted once. */
  next = 0;
  private start = 0;
  private tree: DraftTree | undefined;
  private seconds = 0;

  /** Whether a draft is not compared yet. */
  get pending(): boolean {
    return this.tree !== undefined;
  }

  /** Take a draft after the first `start` tokens, made in `seconds`. */
  begin(start: number, tree: DraftTree, seconds: number): void {
    this.start = start;
    this.tree = tree;
    this.seconds = seconds;
    this.next = start + 1;
  }

  /** Drop the draft: the conversation's text has changed. */
  forget(): void {
    this.tree = undefined;
    this.next = 0;
  }

  /**
   * Return the round that this draft would have made, or undefined if the text does not decide it yet.
   *
   * @param committed the conversation's tokens.
   * @param roundS seconds that a round without a draft would take.
   * @param tokenS seconds that each drafted token adds.
   * @param sharing sessions that share the target.
   */
  compare(committed: readonly number[], roundS: number, tokenS: number, sharing: number): RoundEnded | undefined {
    const { tree } = this;
    if (tree === undefined) return undefined;
    const known = committed.slice(this.start);
    const levels = [0, ...depths(tree.parents)];
    const path = walk(tree, (node) => known[levels[node]!]);
    if (path.length === known.length) return undefined; // the next token decides
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
