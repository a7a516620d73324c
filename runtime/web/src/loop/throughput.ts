/** Drafts in the shape that pays: tokens a second, made largest. */

import { budgetOf, tokenPrice, type Budget, type Prices } from "./budget.js";
import type { Controller } from "./control.js";
import type { Pushed, RoundEnded } from "./events.js";

const MEMORY = 0.95; // averages forget: a round counts so many times the one after it
const LONG_MEMORY = 0.99; // times vary by more than a token costs
/** A guess, until rounds show it: a pass over one token takes as long as so many more tokens do. */
const TOKENS_OF_A_PASS = 15;
const MOST_OF_A_GUESS = 3; // times that, which a prompt may make a token of a draft seem to cost
const FIRST_STEP_S = 0.005;
const GUESS = 0.1; // of a point: what a guess counts beside points
const MOST_AHEAD = 8;
/** What takes more times as long as expected counts as so many times. */
const STALL = 10;
const LEAST_S = 0.001; // as if nothing took less, which would forbid all that takes longer
/** Part of the time that may go into tries of a model whose steps do not pay. */
const TRIES = 0.02;

/**
 * Takes each part of a draft that brings more tokens a second than the rounds so far: with `rate` the tokens a second so
 * far, a part that takes `t` seconds costs `rate * t` tokens, and as many times as many as conversations share what it takes:
 * a sent token takes the target's time from all of them. What parts take is learnt from drafts and verdicts.
 */
export class Throughput implements Controller {
  private sharing = 1;
  private tokens = 0;
  private seconds = 0;
  private rounds = 0;
  // As if a few tokens had been judged before: one round says little.
  private right = 3;
  private judged = 6;
  private firstRight = 3;
  private firsts = 5;
  private step = new Line(FIRST_STEP_S, 0.1 * FIRST_STEP_S, 0.1); // seconds of a step by nodes continued
  private pass: Line | undefined; // the target's seconds by tokens
  private idleS = 0; // since the model took a step
  private prompt: Pass | undefined; // the first, until a draft followed
  private timed = false; // whether it is known what a step takes
  private reads = false; // the next draft's first step is over the prompt too

  /** @param nodes, levels and width of a draft at most. */
  constructor(
    private readonly nodes = 62,
    private readonly levels = 16,
    private readonly width = 10,
  ) {}

  /** What the parts of a draft cost by now. */
  get prices(): Prices {
    const rate = this.seconds ? this.tokens / this.seconds : 0;
    const { level, slope } = this.step;
    const node = this.sharing * rate * this.tokenS;
    return { step: rate * level, query: rate * slope, node, follows: this.right / this.judged };
  }

  get tokenS(): number {
    return this.pass?.slope ?? 0;
  }

  budget(): Budget {
    const { prices } = this;
    const pays = !this.timed || this.firstRight / this.firsts >= tokenPrice(prices);
    const tries = TRIES * this.idleS >= this.step.level + this.step.slope;
    return budgetOf(this.nodes, pays || tries ? this.levels : 0, { width: this.width, branches: true, prices });
  }

  ahead(drafted: number, probability: number): boolean {
    const { prices } = this;
    return drafted < MOST_AHEAD && probability * prices.follows >= tokenPrice(prices);
  }

  observe(outcome: RoundEnded | Pushed): void {
    this.sharing = outcome.sharing;
    if (outcome.event === "Pushed") {
      // Else nothing is known: verdicts may have come together.
      if (outcome.computeS) this.passed(outcome.drafted, outcome.computeS);
      return;
    }
    const targetS = Math.min(outcome.computeS || outcome.waitedS, outcome.waitedS);
    if (outcome.supplied) {
      this.reads = true;
      this.asked(outcome.supplied, targetS, outcome.waitedS - (outcome.computeS ?? 0));
    } else {
      if (outcome.computeS !== null) this.passed(outcome.drafted, targetS);
      this.drafted(outcome);
    }
  }

  /** What a draft took and brought. */
  private drafted(outcome: RoundEnded): void {
    const { accepted, depth, draftS, steps, waitedS } = outcome;
    let seconds = draftS + waitedS;
    if (this.rounds) seconds = Math.min(seconds, STALL * Math.max(LEAST_S, this.seconds / this.rounds));
    this.rounds = MEMORY * this.rounds + 1;
    this.tokens = MEMORY * this.tokens + accepted + 1;
    this.seconds = MEMORY * this.seconds + seconds;
    this.idleS = steps.length ? 0 : this.idleS + waitedS;
    if (!steps.length) {
      this.step.fade(); // the fewer tries there are, the more each says
      return;
    }
    const stepS = draftS / steps.length;
    // What a step takes that also reads a prompt is more than others take, which says something where it is less than was
    // thought.
    if (!this.reads || stepS < this.step.level) {
      this.step.add(steps.reduce((sum, nodes) => sum + nodes, 0) / steps.length, stepS);
      this.timed = true;
    }
    this.reads = false;
    this.right = MEMORY * this.right + accepted;
    this.judged = MEMORY * this.judged + Math.min(accepted + 1, depth);
    this.firstRight = MEMORY * this.firstRight + (accepted > 0 ? 1 : 0);
    this.firsts = MEMORY * this.firsts + 1;
  }

  /** The target took so long for a pass over a draft. */
  private passed(drafted: number, targetS: number): void {
    let seconds = targetS;
    if (this.prompt !== undefined || this.pass === undefined) {
      this.pass = passOf({ tokens: drafted, seconds }, this.prompt);
      this.prompt = undefined;
    } else {
      seconds = Math.min(seconds, STALL * Math.max(LEAST_S, this.pass.at(drafted)));
    }
    this.pass.add(drafted, seconds);
  }

  /** A prompt's verdict: the first that is known of target and link. */
  private asked(supplied: number, targetS: number, linkS: number): void {
    if (this.pass !== undefined) return;
    this.prompt = { tokens: supplied, seconds: targetS };
    this.pass = passOf(this.prompt);
    this.tokens = 2;
    this.seconds = Math.max(0, linkS) + this.pass.level + 2 * FIRST_STEP_S;
  }
}

interface Pass {
  readonly tokens: number;
  readonly seconds: number;
}

/**
 * A guess of the target's, after a pass over some tokens, and one over a prompt. Two passes tell more than the guess of all
 * targets. But a token of a prompt may take less than one of a draft, or more, so this is a guess too, and bounded.
 */
function passOf({ tokens, seconds }: Pass, prompt?: Pass): Line {
  let level = seconds / (1 + tokens / TOKENS_OF_A_PASS);
  let slope = level / TOKENS_OF_A_PASS;
  if (prompt !== undefined && prompt.tokens > tokens + TOKENS_OF_A_PASS) {
    const seen = Math.max(0, (prompt.seconds - seconds) / (prompt.tokens - tokens));
    slope = Math.min(seen, MOST_OF_A_GUESS * slope);
    level = Math.max(0, seconds - slope * tokens);
  }
  return new Line(level, slope, 10);
}

/**
 * `level + slope * x` by least squares, of which neither is negative. What was added counts less and less, and a few points
 * move the first guess little.
 */
class Line {
  private weight = GUESS;
  private x = 1;
  private y: number;
  private xx = 0;
  private xy = 0;

  /** @param doubt how many squared units of `x` speak for the guess's slope. */
  constructor(
    level: number,
    private readonly guess: number,
    private readonly doubt: number,
  ) {
    this.y = level + guess;
  }

  /** A point. */
  add(x: number, y: number): void {
    this.weight = LONG_MEMORY * this.weight + 1;
    const dx = x - this.x;
    const dy = y - this.y;
    this.x += dx / this.weight;
    this.y += dy / this.weight;
    this.xx = LONG_MEMORY * this.xx + dx * (x - this.x);
    this.xy = LONG_MEMORY * this.xy + dx * (y - this.y);
  }

  /** What was added counts less. */
  fade(): void {
    this.weight *= MEMORY;
    this.xx *= MEMORY;
    this.xy *= MEMORY;
  }

  /** The line's value. */
  at(x: number): number {
    return this.level + this.slope * x;
  }

  get slope(): number {
    return Math.max(0, (this.xy + this.doubt * this.guess) / (this.xx + this.doubt));
  }

  get level(): number {
    return Math.max(0, this.y - this.slope * this.x);
  }
}
