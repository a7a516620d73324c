/** A drafting loop as its host sees it: how it stands, and what may be set at any time. */

import type { ClientSession } from "../session/client.js";
import type { Origin, Policy } from "../session/events.js";
import type { Controller } from "./control.js";
import { Decisions } from "./decisions.js";
import type { Drafter } from "./drafter.js";
import type { LinkChanged, PauseReason } from "./events.js";
import { Lessons } from "./lessons.js";
import { LinkWatch } from "./link_watch.js";
import { Listeners, type Listener } from "./listeners.js";
import { Placement } from "./placement.js";
import { Rounds } from "./rounds.js";
import { USUAL_SETTINGS, type Conditions, type LoopSettings, type Offline } from "./settings.js";
import { Trial } from "./trial.js";

/** The parts of a loop, made to fit. `DraftingLoop` is the class to use. */
export class LoopState<D extends Drafter> {
  protected readonly watch: LinkWatch;
  protected readonly rounds: Rounds;
  protected readonly placement: Placement;
  protected readonly trial = new Trial();
  protected readonly lessons: Lessons;
  protected readonly decisions: Decisions<D>;
  protected readonly listeners = new Listeners();
  protected paused: PauseReason | undefined;

  /**
   * @param drafter undefined, and each round asks the target for one token.
   * @param writer what writes in an outage in the drafter's place, and needs no memory rows.
   */
  constructor(
    protected readonly session: ClientSession,
    protected readonly drafter: D | undefined,
    controller: Controller,
    settings: LoopSettings = USUAL_SETTINGS,
    writer?: D,
  ) {
    this.watch = new LinkWatch(settings);
    this.rounds = new Rounds(session.tentative.length);
    this.placement = new Placement(settings.drafting, drafter !== undefined);
    const { placement, rounds, watch } = this;
    this.lessons = new Lessons(session, controller, rounds, placement, this.trial);
    this.decisions = new Decisions(session, drafter, writer, controller, settings, watch, rounds, placement);
  }

  /** Have `listener` called with each event. */
  listen(listener: Listener): void {
    this.listeners.add(listener);
  }

  // -- what is known ---------------------------------------------------------------------------

  /** Its last change. */
  get link(): LinkChanged {
    return this.listeners.link;
  }

  /** Tokens that the target has confirmed. */
  get committed(): readonly number[] {
    return this.session.committed;
  }

  /** Answer tokens behind these, with their origins. */
  get unconfirmed(): [number, Origin][] {
    return this.session.unconfirmed;
  }

  get answering(): boolean {
    return this.session.answering;
  }

  /** What the host says; may be set at any time. Whether rows are wanted is told with the next connection. */
  get conditions(): Conditions {
    return this.decisions.conditions;
  }

  set conditions(conditions: Conditions) {
    this.decisions.conditions = conditions;
    this.session.wantsRows = !conditions.metered;
    this.session.held = conditions.background;
  }

  /** What becomes of text written offline; may be set at any time. */
  get policy(): Policy {
    return this.session.policy;
  }

  set policy(policy: Policy) {
    this.session.policy = policy;
  }

  /** What writes while there is no verifier; may be set at any time. */
  get offline(): Offline {
    return this.decisions.offline;
  }

  set offline(offline: Offline) {
    this.decisions.offline = offline;
  }
}
