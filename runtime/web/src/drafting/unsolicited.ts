/** Drafts made while the server streams: sent without being asked for, and compared with the text. */

import { continued, scaled, sends, type Budget } from "../drafters/base.js";
import { depthOf, depths, walk, type DraftTree } from "../session/tree.js";
import type { RoundEnded } from "./events.js";

const LONGEST_LEAD = 6; // tokens after which hardly a draft is right
const SLACK = 0.1; // part of an interval by which a draft is early
const NEWEST = 0.2; // least weight of the newest time of a level
const FADE = 0.98; // of that time with each draft without steps, so that a slow model is tried again

/** The pace of a server that streams. */
export interface Pace {
  /** Mean number of tokens of a verdict. */
  readonly tokens: number;
  /** Mean time between verdicts, seconds. */
  readonly intervalS: number;
  /** Round trip time of the link, seconds. */
  readonly roundTripS: number;
}

interface Undecided {
  readonly start: number;
  readonly tree: DraftTree;
  readonly seconds: number;
}

/**
 * The drafts of a device while the server streams, until the text decides them.
 *
 * The server verifies the part of a draft that follows the tokens committed since. Whether it did or not, the text shows how
 * much of the draft was right, and so the round that it would have made if the server had waited for it.
 */
export class UnsolicitedDrafts {
  /** Length of the shortest prefix for the next draft, so that each position is drafted once. */
  next = 0;
  private undecided: Undecided[] = [];
  private levelS = 0; // mean seconds of a level
  private timed = 0; // number of drafts that it was learnt from
  private reads = true; // whether the next draft also reads a prompt

  /** Drop the drafts: the conversation's text has changed. */
  forget(): void {
    this.undecided = [];
    this.next = 0;
    this.reads = true;
  }

  /** Take a draft after the first `start` tokens, made in `seconds`; a round's would have the `usual` budget. */
  begin(start: number, tree: DraftTree, seconds: number, usual: Budget): void {
    this.next = start + 1;
    let asked = { start, tree, seconds };
    if (tree.steps.length) {
      const { reads } = this;
      this.reads = false;
      if (reads) return; // it took longer than later ones will
      const levelS = seconds / tree.steps.length;
      this.levelS += Math.max(NEWEST, 1 / ++this.timed) * (levelS - this.levelS);
      const part = within(usual, tree);
      asked = { start, tree: part, seconds: levelS * part.steps.length };
    } else {
      this.levelS *= FADE;
    }
    this.undecided.push(asked);
  }

  /**
   * Return the budget of a draft that arrives in time to be verified; without levels if the model is too slow.
   *
   * A draft for the `n`-th pass from now has to arrive within `n` intervals, and its first tokens, the *lead*, are committed
   * by then. So it is deeper than the `usual` draft of a round by the lead, and its parts are priced as if the lead were
   * right: otherwise nothing of it counts. A model that needs longer for a level than the server for a token would not win by
   * rounds either. One whose time is unknown drafts one token, because text that arrives meanwhile waits for the draft.
   */
  budget(usual: Budget, { intervalS, roundTripS, tokens }: Pace): Budget {
    if (usual.levels && !this.timed) return { ...usual, nodes: Math.min(1, usual.nodes), levels: 1 };
    const { levelS } = this;
    for (let passes = 1, lead = tokens; usual.levels && lead < LONGEST_LEAD; lead = ++passes * tokens) {
      const timeS = (passes - SLACK) * intervalS - roundTripS;
      let levels = usual.levels + Math.ceil(lead);
      if (levelS) levels = Math.min(levels, Math.floor(timeS / levelS));
      if (timeS >= 0 && levels > lead) {
        return { ...usual, levels, prices: scaled(usual.prices, usual.prices.follows ** lead) };
      }
    }
    return { ...usual, levels: 0 };
  }

  /**
   * Remove the drafts that the text decides; return the rounds that they would have made.
   *
   * @param committed the conversation's tokens.
   * @param roundS seconds that a round without a draft would take.
   * @param tokenS seconds that each drafted token adds.
   */
  decided(committed: readonly number[], roundS: number, tokenS: number): RoundEnded[] {
    const ended: RoundEnded[] = [];
    this.undecided = this.undecided.filter(({ seconds, start, tree }) => {
      const known = committed.slice(start);
      const levels = [0, ...depths(tree.parents)];
      const accepted = walk(tree, (node) => known[levels[node]!]).length;
      if (accepted === known.length) return true; // the next token decides
      const drafted = tree.tokens.length;
      ended.push({
        event: "RoundEnded",
        supplied: 0,
        drafted,
        depth: depthOf(tree),
        accepted,
        steps: tree.steps,
        draftS: seconds,
        waitedS: roundS + tokenS * drafted,
        computeS: null,
        sent: 0,
      });
      return false;
    });
    return ended;
  }
}

/** Return the part of `tree` that a smaller budget would have given. */
function within(budget: Budget, tree: DraftTree): DraftTree {
  const levels = depths(tree.parents);
  let depth = 1;
  for (; depth < budget.levels; depth++) {
    const scores = tree.scores.filter((_, at) => levels[at] === depth).sort((a, b) => b - a);
    if (!continued(budget, scores)) break;
  }
  const kept = [...levels.keys()].filter((at) => levels[at]! <= depth && sends(budget, tree.scores[at]!));
  const number = new Map(kept.map((at, index) => [at + 1, index + 1]));
  return {
    tokens: kept.map((at) => tree.tokens[at]!),
    parents: kept.map((at) => number.get(tree.parents[at]!) ?? 0),
    scores: kept.map((at) => tree.scores[at]!),
    steps: tree.steps.slice(0, depth),
  };
}
