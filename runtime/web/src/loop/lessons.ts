/** What verdicts teach: the controller about drafts, the placement about who should make them. */

import type { ClientSession } from "../session/client.js";
import type { Decided } from "../session/events.js";
import type { Controller } from "./control.js";
import type { Pushed, RoundEnded } from "./events.js";
import type { Placement } from "./placement.js";
import type { Rounds } from "./rounds.js";
import type { Trial } from "./trial.js";

/** Of one conversation's verdicts, each told after the session took it. */
export class Lessons {
  constructor(
    private readonly session: ClientSession,
    private readonly controller: Controller,
    private readonly rounds: Rounds,
    private readonly placement: Placement,
    private readonly trial: Trial,
  ) {}

  /**
   * The event that tells of it; undefined for a verdict that nobody drafted or waited for.
   *
   * @param waitedS seconds since what it answers was sent; of one that was pushed, since the verdict before.
   */
  learn(verdict: Decided, waitedS: number): Pushed | RoundEnded | undefined {
    this.placement.draftsWanted = verdict.draftsWanted;
    if (verdict.cause === "pushed") return this.pushed(verdict, waitedS);
    const outcome = this.rounds.ended(verdict, waitedS);
    const ours = verdict.cause === "asked";
    if (ours && !(this.rounds.resumed && verdict.drafted)) {
      this.controller.observe(outcome);
      this.placement.roundEnded(outcome, verdict.accepted + 1);
    }
    this.rounds.resumed &&= this.session.tentative.length > 0;
    return ours ? outcome : undefined;
  }

  private pushed(verdict: Decided, waitedS: number): Pushed {
    const { controller, placement } = this;
    const { accepted, computeS, drafted, sharing } = verdict;
    const pushed: Pushed = { event: "Pushed", drafted, accepted, waitedS, computeS, sharing };
    controller.observe(pushed);
    placement.pushed(accepted + 1, waitedS, verdict.draftS + controller.tokenS * drafted);
    const tried = this.trial.compare(this.session.committed, placement.roundS, controller.tokenS, sharing);
    if (tried) {
      controller.observe(tried);
      placement.tried(tried);
    }
    return pushed;
  }
}
