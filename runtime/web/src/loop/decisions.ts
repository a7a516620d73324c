/** What the device drafts next, or why nothing, by what is known at that moment. */

import type { ClientSession } from "../session/client.js";
import { ONE, behind, within, type Budget } from "./budget.js";
import type { Controller } from "./control.js";
import type { Drafter } from "./drafter.js";
import type { Draft, PauseReason } from "./events.js";
import type { LinkWatch } from "./link_watch.js";
import { goOn } from "./manners.js";
import type { Placement } from "./placement.js";
import type { Rounds } from "./rounds.js";
import { USUAL_CONDITIONS, type Conditions, type LoopSettings, type Offline } from "./settings.js";

/** The drafting loop's. They change nothing of what they look at. */
export class Decisions<D extends Drafter> {
  /** What the host says. */
  conditions: Conditions = USUAL_CONDITIONS;
  /** What writes while there is no verifier. */
  offline: Offline;
  /** Who has nothing to propose, so that only the target can go on. */
  exhausted: D | undefined;

  constructor(
    private readonly session: ClientSession,
    private readonly drafter: D | undefined,
    private readonly writer: D | undefined,
    private readonly controller: Controller,
    private readonly settings: LoopSettings,
    private readonly watch: LinkWatch,
    private readonly rounds: Rounds,
    private readonly placement: Placement,
  ) {
    this.offline = settings.offline;
  }

  /** Whether the target waits for a draft. */
  get roundDue(): boolean {
    return this.session.mayPropose && !this.conditions.background;
  }

  /** Whether the server is to go on by itself, and may be told so. */
  get serverDue(): boolean {
    return this.placement.atServer && this.session.mayGrantCredit && !this.conditions.background;
  }

  /** Whether the server is to stop doing so. */
  get deviceDue(): boolean {
    return this.session.creditOpen && (this.conditions.background || !this.placement.atServer);
  }

  /** Whether the memory rows that a draft would be made with are about to come. */
  rowsDue(now: number): boolean {
    const needed = this.drafter?.needsRows ?? false;
    return needed && this.roundDue && this.session.rowsComing > 0 && this.watch.rowsMayCome(now);
  }

  /** Whether the device may make a draft that is not sent, while the server goes on by itself. */
  get trialDue(): boolean {
    const { background, lowPower, metered } = this.conditions;
    const idle = !(background || lowPower || metered || this.alone);
    return idle && this.session.serverMayPush && !this.session.tentative.length && this.placement.wantsTrial;
  }

  /**
   * What is to be drafted for that, if it may be: one token behind the newest memory row, as in a round. Rows come behind
   * the text, and what a drafter expects without them says nothing of rounds; nor does the user's text.
   *
   * @param earliest tokens that it is to be behind at least.
   */
  trial(earliest: number): Draft<D> | undefined {
    const { drafter, session } = this;
    if (!drafter || !this.trialDue || !this.prepared) return undefined;
    const prefix = drafter.needsRows ? session.tokens.slice(0, session.rows + 1) : session.tokens;
    if (prefix.length < Math.max(earliest, session.answerStart)) return undefined;
    const { sampling } = session;
    return { todo: "draft", by: drafter, prefix, budget: this.affordable, origin: "drafted", sampling };
  }

  /** What is to be drafted now, if anything is. */
  draft(): Draft<D> | undefined {
    const { by, session } = this;
    if (!session.answering || session.tentativeFinish !== null || this.conditions.background) return undefined;
    if (!by || by === this.exhausted || !this.prepared) return undefined;
    const budget = this.budget();
    if (!budget) return undefined;
    const origin = this.watch.outage ? "offline" : "drafted";
    return { todo: "draft", by, prefix: session.tokens, budget, origin, sampling: session.sampling };
  }

  /** Why the device does not go on with a running answer; undefined while it may. */
  pauseReason(): PauseReason | undefined {
    const { session } = this;
    if (this.conditions.background && (this.alone || !session.awaitingVerdict)) return "background";
    if (!this.alone) return undefined;
    if (this.offline === "off") return "off";
    if (!this.prepared) return "unprepared";
    if (this.conditions.lowPower) return "low power";
    const finish = session.tentativeFinish;
    if (finish === null) return this.unsure ? "unsure" : "limit";
    return finish === "stop" ? "end" : "length";
  }

  // -- helpers ---------------------------------------------------------------------------------

  /**
   * Whether there is anything to draft from. A drafter alone has nothing to say to a question that the target did not see.
   */
  private get prepared(): boolean {
    const { drafter, session } = this;
    if (this.writes) return session.length > 0;
    if (!drafter || (this.alone && session.supplied)) return false;
    const copiesOnly = this.conditions.metered && this.roundDue;
    return (drafter.needsRows && !copiesOnly ? session.rows : session.committed.length) > 0;
  }

  /**
   * Whether the writer is the one to go on: in an outage. A verdict that is only late is no reason to read the whole
   * conversation.
   */
  private get writes(): boolean {
    return this.writer !== undefined && this.offline === "writer" && this.watch.outage;
  }

  /** Who drafts now, if anybody can. */
  private get by(): D | undefined {
    return this.writes ? this.writer : this.drafter;
  }

  /** Whether what it would write alone is worth no more. */
  private get unsure(): boolean {
    const manners = this.by?.manners;
    if (!manners) return false;
    const tentative = this.session.tentative.length;
    return !goOn(manners, this.session.tokens, tentative, this.tentativeLogprob(tentative));
  }

  /** Whether the device has to go on without the target. */
  private get alone(): boolean {
    return this.session.link !== "up" || this.watch.late;
  }

  /** What a whole round's draft may be. */
  private get affordable(): Budget {
    return within(this.controller.budget(), this.session.limits, this.session.room, this.conditions);
  }

  /** What may be drafted now. */
  private budget(): Budget | undefined {
    const { session } = this;
    const tentative = session.tentative.length;
    if (this.roundDue) return behind(this.affordable, tentative, this.tentativeLogprob(tentative));
    if (this.conditions.lowPower || (this.alone && this.offline === "off")) return undefined;
    const one = { ...ONE, tentative };
    if (this.alone) return tentative < this.settings.offlineLimit && !this.unsure ? one : undefined;
    if (session.awaitingPrefill || session.serverMayPush || this.conditions.metered) return undefined;
    const probability = Math.exp(this.tentativeLogprob(tentative));
    return this.controller.ahead(tentative - this.rounds.sentPath, probability) ? one : undefined;
  }

  /** Of all tentative tokens (nats). */
  private tentativeLogprob(tentative: number): number {
    const end = this.session.length;
    return this.rounds.logprobs(end - tentative, end).reduce((sum, logprob) => sum + logprob, 0);
  }
}
