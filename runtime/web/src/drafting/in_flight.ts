/** The draft that awaits its verdict, and the one that is being made. */

import type { Decided } from "../session/events.js";
import { likeliestPath, type DraftTree } from "../session/tree.js";
import type { RoundEnded } from "./events.js";

/** Remember what was drafted and sent, until the verdict. */
export class DraftInFlight {
  /** Tentative tokens when the draft in flight was sent; 0 for none. */
  sentPath: number;
  /** The tentative tokens were written before the connection, so they belong to no round. */
  resumed = false;
  private sentDepth = 0;
  private readonly tokenLogprobs = new Map<number, number>(); // of the tokens drafted last, by position
  private steps: readonly number[] = []; // of the draft for the next round, or of the one in flight
  private draftS = 0;

  /** @param tentative tokens that a restored session has; what was sent of them is not known. */
  constructor(tentative: number) {
    this.sentPath = tentative;
  }

  /** Note that the answer continues from tokens that were not drafted. */
  begin(): void {
    this.tokenLogprobs.clear();
    this.sentPath = 0;
  }

  /** Note that a connection is up: the `tentative` tokens belong to no round, and most are in flight again. */
  resume(tentative: number): void {
    this.sentPath = this.sentDepth = tentative;
    this.steps = [];
    this.draftS = 0;
    this.resumed = tentative > 0;
  }

  /** Return the likeliest path of `tree`, which begins at position `start`, and remember its probabilities. */
  drafted(start: number, tree: DraftTree): number[] {
    const path = likeliestPath(tree);
    path.forEach((index, at) => {
      const parent = tree.parents[index]!;
      this.tokenLogprobs.set(start + at, tree.scores[index]! - (parent ? tree.scores[parent - 1]! : 0));
    });
    return path.map((index) => tree.tokens[index]!);
  }

  /** Note the nodes of each model step, and the seconds, of the draft for the next round. */
  took(steps: readonly number[], seconds: number): void {
    this.steps = steps;
    this.draftS = seconds;
  }

  /** Note that a draft was sent, with `depth` tokens on its longest path. */
  sent(tentative: number, depth: number): void {
    this.sentPath = tentative;
    this.sentDepth = Math.max(depth, tentative);
  }

  /** Return the round that `verdict` ended, `waitedS` seconds after its draft was sent. */
  ended(verdict: Decided, waitedS: number): RoundEnded {
    const { supplied, drafted, computeS, sent } = verdict;
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
      sent,
    };
    this.steps = [];
    this.draftS = 0;
    this.sentPath = 0;
    return outcome;
  }

  /** Return whether the tokens at these positions were drafted, so that their probabilities are known. */
  knows(start: number, end: number): boolean {
    return Array.from({ length: Math.max(0, end - start) }, (_, at) => start + at).every((at) => this.tokenLogprobs.has(at));
  }

  /** Return the log-probabilities (nats) of the tokens at these positions; 0 for those that were not drafted. */
  logprobs(start: number, end: number): number[] {
    return Array.from({ length: Math.max(0, end - start) }, (_, at) => this.tokenLogprobs.get(start + at) ?? 0);
  }
}
