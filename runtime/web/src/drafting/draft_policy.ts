/** What the device drafts now, or why nothing. */

import { budgetOf, continued, type Budget, type Drafter } from "../drafters/base.js";
import type { PauseReason } from "../events.js";
import { mayContinue } from "../offline_stopping.js";
import type { ClientSession } from "../session/client.js";
import type { Decided } from "../session/events.js";
import type { Limits } from "../session/handshake.js";
import { likeliestPath, type DraftTree } from "../session/tree.js";
import type { Controller } from "./draft_controllers.js";
import type { DrafterSelection } from "./drafter_selection.js";
import type { Draft, RoundEnded } from "./events.js";
import { USUAL_CONDITIONS, type Conditions, type LoopSettings, type Offline } from "./settings.js";
import type { Timeouts } from "./timeouts.js";
import type { UnsolicitedDrafts } from "./unsolicited.js";

/**
 * Tokens that the server may stream on its own, and after how many of them the credit is renewed. The answer to a renewal
 * also measures the round trip.
 */
const CREDIT = 256;
const RENEWED_AFTER = 32;
/** Text that may still change is drafted token by token, so that no frame waits for a draft. */
const ONE_TOKEN = budgetOf(1, 1);

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

/** Decide what to draft from the state of session, link and controller, without changing them. */
export class DraftPolicy<D extends Drafter> {
  /** What the host knows of the device. */
  conditions: Conditions = USUAL_CONDITIONS;
  /** What writes during an outage. */
  offline: Offline;
  /** The drafter or writer that had nothing to propose, so only the target can go on. */
  exhausted: D | undefined;

  constructor(
    private readonly session: ClientSession,
    private readonly drafter: D | undefined,
    private writer: D | undefined,
    private readonly controller: Controller,
    private readonly settings: LoopSettings,
    private readonly timeouts: Timeouts,
    private readonly inFlight: DraftInFlight,
    private readonly selection: DrafterSelection,
    private readonly unsolicited: UnsolicitedDrafts,
  ) {
    this.offline = settings.offline;
  }

  /** Do without the offline writer from now on if it has failed; return whether it has. */
  loseWriter(failed: D): boolean {
    const lost = failed === this.writer;
    if (lost) this.writer = undefined;
    return lost;
  }

  /** Whether the target waits for a draft. */
  get roundDue(): boolean {
    return this.session.mayPropose && !this.conditions.background;
  }

  /** The position up to which the server shall stream on its own; undefined if it need not be told one now. */
  get creditDue(): number | undefined {
    const { session } = this;
    if (!this.selection.atServer || !session.mayGrantCredit || this.conditions.background) return undefined;
    const reached = session.committed.length + session.supplied;
    return session.credit - reached <= CREDIT - RENEWED_AFTER ? reached + CREDIT : undefined;
  }

  /** Whether the server shall stop streaming on its own. */
  get deviceDue(): boolean {
    return this.session.creditOpen && (this.conditions.background || !this.selection.atServer);
  }

  /** Return whether the memory rows that the next draft needs are about to arrive. */
  rowsDue(now: number): boolean {
    const needed = this.drafter?.needsRows && (this.roundDue || this.unsolicitedDue);
    return needed === true && this.session.rowsComing > 0 && this.timeouts.rowsMayCome(now);
  }

  /** Whether the device drafts while the server streams. */
  get unsolicitedDue(): boolean {
    const { session } = this;
    const { background, lowPower, metered } = this.conditions;
    const idle = !(background || lowPower || metered || this.alone);
    return idle && session.state === "streaming" && !session.tentative.length && this.selection.wantsDraft;
  }

  /**
   * Return the draft to make while the server streams, if one is due. It follows the committed text, each length of it once.
   * The user's own text is not drafted.
   */
  unsolicitedDraft(): Draft<D> | undefined {
    const { drafter, session, unsolicited } = this;
    if (!drafter || !this.unsolicitedDue || !this.hasSource) return undefined;
    if (session.committed.length < Math.max(unsolicited.next, session.answerStart)) return undefined;
    const budget = unsolicited.budget(this.roundBudget, this.selection.pace);
    const prefix = [...session.committed];
    return { todo: "draft", by: drafter, prefix, budget, origin: "drafted", sampling: session.sampling };
  }

  /** Return what to draft now, if anything. */
  draft(): Draft<D> | undefined {
    const { active, session } = this;
    if (!session.answering || session.tentativeFinish !== null || this.conditions.background) return undefined;
    if (!active || active === this.exhausted || !this.hasSource) return undefined;
    const budget = this.budget();
    if (!budget) return undefined;
    if (this.timeouts.outage && session.sampling.grammar) return undefined; // the device does not know the grammar
    const origin = this.timeouts.outage ? "offline" : "drafted";
    return { todo: "draft", by: active, prefix: session.tokens, budget, origin, sampling: session.sampling };
  }

  /** Return why the device does not continue a running answer; undefined while it may. */
  pauseReason(): PauseReason | undefined {
    const { session } = this;
    if (this.conditions.background && (this.alone || !session.awaitingVerdict)) return "background";
    if (!this.alone) return undefined;
    if (this.offline === "off") return "off";
    if (session.sampling.grammar) return "grammar";
    if (!this.hasSource) return this.writerFollows ? undefined : "unprepared";
    if (this.conditions.lowPower) return "low power";
    const finish = session.tentativeFinish;
    if (finish === null && this.unsure) return this.writerFollows ? undefined : "unsure";
    if (finish === null) return "limit";
    return finish === "stop" ? "end" : "length";
  }

  // -- helpers ---------------------------------------------------------------------------------

  /** Whether there is anything to draft from. A drafter alone cannot answer a question that the target has not read. */
  private get hasSource(): boolean {
    const { drafter, session } = this;
    if (this.writerActive) return session.length > 0;
    if (!drafter || (this.alone && session.supplied)) return false;
    const copiesOnly = this.conditions.metered && this.roundDue;
    return (drafter.needsRows && !copiesOnly ? session.rows : session.committed.length) > 0;
  }

  /**
   * Whether the offline writer continues the answer: only during an outage. A late verdict is no reason to read the whole conversation.
   */
  private get writerActive(): boolean {
    return this.writer !== undefined && this.offline === "writer" && this.timeouts.outage;
  }

  /** Whether the offline writer will continue the answer, as soon as the target's silence is an outage. */
  private get writerFollows(): boolean {
    return this.writer !== undefined && this.offline === "writer" && !this.timeouts.outage;
  }

  /** The drafter or writer that proposes now; undefined if there is none. */
  private get active(): D | undefined {
    return this.writerActive ? this.writer : this.drafter;
  }

  /** Whether the stopping rule forbids the device to write on alone. */
  private get unsure(): boolean {
    const stoppingRule = this.active?.stoppingRule;
    if (!stoppingRule) return false;
    const tentative = this.session.tentative.length;
    return !mayContinue(stoppingRule, this.session.tokens, tentative, this.tentativeLogprob(tentative));
  }

  /** Whether the device has to go on without the target. */
  private get alone(): boolean {
    return this.session.link !== "up" || this.timeouts.late;
  }

  /** The budget of a whole round's draft. */
  get roundBudget(): Budget {
    return clipBudget(this.controller.budget(), this.session.limits, this.session.room, this.conditions);
  }

  /** Return the budget of what may be drafted now; undefined if nothing may. */
  private budget(): Budget | undefined {
    const { session } = this;
    const tentative = session.tentative.length;
    if (this.roundDue) return remainingBudget(this.roundBudget, tentative, this.tentativeLogprob(tentative));
    if (this.conditions.lowPower || (this.alone && this.offline === "off")) return undefined;
    const one = { ...ONE_TOKEN, tentative };
    if (this.alone) return tentative < this.settings.offlineLimit && !this.unsure ? one : undefined;
    if (session.awaitingPrefill || session.serverMayPush || this.conditions.metered) return undefined;
    const probability = Math.exp(this.tentativeLogprob(tentative));
    return this.controller.ahead(tentative - this.inFlight.sentPath, probability) ? one : undefined;
  }

  /** Return the log-probability of all tentative tokens, in nats. */
  private tentativeLogprob(tentative: number): number {
    const end = this.session.length;
    return this.inFlight.logprobs(end - tentative, end).reduce((sum, logprob) => sum + logprob, 0);
  }
}

/**
 * Reduce a controller's budget to what server, answer and host allow.
 *
 * @param room tokens that the answer may still have, null for no limit.
 */
function clipBudget(budget: Budget, limits: Limits, room: number | null, conditions: Conditions): Budget {
  return {
    ...budget,
    nodes: Math.min(budget.nodes, limits.maxDraftTokens),
    levels: conditions.lowPower || conditions.metered ? 0 : budget.levels,
    branches: budget.branches && limits.trees,
    depth: room === null ? budget.depth : Math.min(budget.depth, room),
  };
}

/** Return what is left of `budget` after `tentative` tokens, whose log-probability is `logprob` (nats). */
function remainingBudget(budget: Budget, tentative: number, logprob: number): Budget {
  if (!tentative) return budget;
  const levels = continued(budget, [logprob]) ? Math.max(0, budget.levels - tentative) : 0;
  return { ...budget, nodes: Math.max(0, budget.nodes - tentative), levels, tentative, logprob };
}
