/** A controller with an online cost model: it gives each draft the shape that makes tokens a second largest. */

import { budgetOf, tokenPrice, type Budget, type Prices } from "../drafters/base.js";
import type { Controller } from "./draft_controllers.js";
import type { Pushed, RoundEnded } from "./events.js";

const DECAY = 0.95; // of the averages, a round
const SLOW_DECAY = 0.99; // of the fitted times, which vary by more than a token costs
/** The first guess: a pass over one token takes as long as 15 further tokens do. */
const TOKENS_OF_A_PASS = 15;
const MOST_OF_A_GUESS = 3; // times that guess: the most that a prompt may make a drafted token seem to cost
const FIRST_STEP_S = 0.005;
const GUESS_WEIGHT = 0.1; // of the first guess, beside points of weight 1
const MOST_AHEAD = 8;
/**
 * A round counts as at most this many times the expected one. A stall says nothing of the rounds to come, and a lasting
 * change soon becomes the expectation.
 */
const STALL = 10;
const LEAST_S = 0.001; // shortest expectation: with 0 s nothing that takes longer could ever count
/** Share of the time that may be spent on trying a model whose steps do not pay. */
const TRIES = 0.02;

/**
 * Take each part of a draft that brings more tokens a second than the rounds so far.
 *
 * With `rate` the tokens a second of the rounds so far, a part that takes `t` seconds costs `rate * t` tokens. Times are
 * learned from drafts and verdicts. Other sessions of the target need no price: the server verifies what pays for all.
 * The Python class of this name says more.
 */
export class CostModel implements Controller {
  private tokens = 0;
  private seconds = 0;
  private rounds = 0;
  // Prior: a few judged tokens, because one round says little.
  private right = 3;
  private judged = 6;
  private firstRight = 3;
  private firsts = 5;
  private step = new Line(FIRST_STEP_S, 0.1 * FIRST_STEP_S, 0.1); // seconds of a step, by the nodes it continues
  private pass: Line | undefined; // the target's seconds, by tokens
  private idleS = 0; // seconds since the model took a step
  private prompt: Pass | undefined; // the first prompt, until a draft
  private timed = false; // whether a step was timed
  private reads = false; // whether the next draft's first step also reads the prompt

  /** @param nodes, levels and width of a draft at most. */
  constructor(
    private readonly nodes = 62,
    private readonly levels = 16,
    private readonly width = 10,
  ) {}

  /** Present cost of the parts of a draft, in tokens. */
  get prices(): Prices {
    const rate = this.seconds ? this.tokens / this.seconds : 0;
    const { level, slope } = this.step;
    return { step: rate * level, query: rate * slope, node: rate * this.tokenS, follows: this.right / this.judged };
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
    if (outcome.event === "Pushed") {
      // With 0 s, verdicts have arrived together and say nothing.
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

  /** Learn from the verdict on a draft. */
  private drafted(outcome: RoundEnded): void {
    const { accepted, depth, draftS, steps, waitedS } = outcome;
    let seconds = draftS + waitedS;
    if (this.rounds) seconds = Math.min(seconds, STALL * Math.max(LEAST_S, this.seconds / this.rounds));
    this.rounds = DECAY * this.rounds + 1;
    this.tokens = DECAY * this.tokens + accepted + 1;
    this.seconds = DECAY * this.seconds + seconds;
    this.idleS = steps.length ? 0 : this.idleS + waitedS;
    if (!steps.length) {
      this.step.fade(); // so that the next try weighs more
      return;
    }
    const stepS = draftS / steps.length;
    // A step that also reads a prompt takes longer than others: it says something only if it was faster than expected.
    if (!this.reads || stepS < this.step.level) {
      this.step.add(steps.reduce((sum, nodes) => sum + nodes, 0) / steps.length, stepS);
      this.timed = true;
    }
    this.reads = false;
    this.right = DECAY * this.right + accepted;
    this.judged = DECAY * this.judged + Math.min(accepted + 1, depth);
    this.firstRight = DECAY * this.firstRight + (accepted > 0 ? 1 : 0);
    this.firsts = DECAY * this.firsts + 1;
  }

  /** Learn from a pass of the target over `drafted` tokens that took `targetS`. */
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

  /** Learn from a prompt's verdict, the first figures of target and link. */
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
 * Return a first guess of the target's seconds by tokens, from one pass over some tokens and one over a `prompt`.
 *
 * Two passes say more than the general guess. But a token of a prompt may take more or less than one of a draft, so the slope
 * is bounded; drafts of several sizes replace it.
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

/** Fit `level + slope * x`, both at least 0, by least squares with decaying weights. */
class Line {
  private weight = GUESS_WEIGHT;
  private x = 1;
  private y: number;
  private xx = 0;
  private xy = 0;

  /**
   * @param level and guess: the first guess of level and slope.
   * @param doubt weight of the guessed slope, in squared units of `x`.
   */
  constructor(
    level: number,
    private readonly guess: number,
    private readonly doubt: number,
  ) {
    this.y = level + guess;
  }

  /** Add a point. */
  add(x: number, y: number): void {
    this.weight = SLOW_DECAY * this.weight + 1;
    const dx = x - this.x;
    const dy = y - this.y;
    this.x += dx / this.weight;
    this.y += dy / this.weight;
    this.xx = SLOW_DECAY * this.xx + dx * (x - this.x);
    this.xy = SLOW_DECAY * this.xy + dx * (y - this.y);
  }

  /** Reduce the weight of the points so far. */
  fade(): void {
    this.weight *= DECAY;
    this.xx *= DECAY;
    this.xy *= DECAY;
  }

  /** Return the line's value. */
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
