/** The draft on its way, and the one that is being made, in figures. */

import type { Decided } from "../session/events.js";
import { likeliestPath, type DraftTree } from "../session/tree.js";
import type { RoundEnded } from "./events.js";

/** What the drafting loop remembers of what it drafted and sent, until the verdict. */
export class Rounds {
  /** Tentative tokens when the draft on its way was sent; 0 for none. */
  sentPath: number;
  /** The tentative tokens were written before the connection: they took no round. */
  resumed = false;
  private sentDepth = 0;
  private readonly drafts = new Map<number, number>(); // log-probabilities of what was drafted last, by position
  private steps: readonly number[] = []; // of the draft for the next round, or of the one on its way
  private draftS = 0;

  /** @param tentative tokens that a restored session has; what was sent of them is not known. */
  constructor(tentative: number) {
    this.sentPath = tentative;
  }

  /** The answer goes on from tokens that were not drafted. */
  begin(): void {
    this.drafts.clear();
    this.sentPath = 0;
  }

  /** A connection is up. What is no offline text by now never will be; most of it is on its way again. */
  resume(tentative: number): void {
    this.sentPath = this.sentDepth = tentative;
    this.steps = [];
    this.draftS = 0;
    this.resumed = tentative > 0;
  }

  /** The likeliest path of a tree, which goes on from position `start`. */
  drafted(start: number, tree: DraftTree): number[] {
    const path = likeliestPath(tree);
    path.forEach((index, at) => {
      const parent = tree.parents[index]!;
      this.drafts.set(start + at, tree.scores[index]! - (parent ? tree.scores[parent - 1]! : 0));
    });
    return path.map((index) => tree.tokens[index]!);
  }

  /** The draft for the next round took these. */
  took(steps: readonly number[], seconds: number): void {
    this.steps = steps;
    this.draftS = seconds;
  }

  /** A draft was sent, with `depth` tokens on its longest path. */
  sent(tentative: number, depth: number): void {
    this.sentPath = tentative;
    this.sentDepth = Math.max(depth, tentative);
  }

  /** The round of the draft on its way. */
  ended(verdict: Decided, waitedS: number): RoundEnded {
    const { supplied, drafted, computeS, sharing } = verdict;
    const outcome: RoundEnded = {
      event: "RoundEnded",
      supplied,
      drafted,
      depth: Math.min(this.sentDepth, drafted),
      accepted: Math.min(verdict.accepted, drafted),
      steps: drafted ? this.steps : [],
      draftS: drafted ? this.draftS : 0,
      waitedS,
      computeS,
      sharing,
    };
    this.steps = [];
    this.draftS = 0;
    this.sentPath = 0;
    return outcome;
  }

  /** Of the tokens at these positions (nats); 0 of what was not drafted. */
  logprobs(start: number, end: number): number[] {
    return Array.from({ length: Math.max(0, end - start) }, (_, at) => this.drafts.get(start + at) ?? 0);
  }
}
