/**
 * The drafting loop: decides what the device does next, without I/O, workers or a clock.
 *
 * | module | knows | must not know |
 * | --- | --- | --- |
 * | `loop` | the order of things: frames in, drafts and frames out | sockets, workers, clocks, tokens' text |
 * | `draft_policy` | what to draft now, or why nothing | how time passes |
 * | `draft_controllers` | the shape of the next draft | the session, the link |
 * | `cost_model` | seconds of each part of a draft | which side drafts |
 * | `drafter_selection` | tokens a second of device and server | shapes of drafts |
 * | `unsolicited` | drafts made while the server streams, beside its text | which side drafts |
 * | `timeouts` | when a verdict is late and a link is down | what is drafted |
 */

import { RowsMismatchError, type Drafter } from "../drafters/base.js";
import type { LinkChanged, PauseReason } from "../events.js";
import type { ClientSession } from "../session/client.js";
import type { Decided, Echoed, Faulted, Origin, Policy, RowsReceived } from "../session/events.js";
import type { Sampling } from "../session/sampling.js";
import { NOTHING, depthOf, prependChain, type DraftTree } from "../session/tree.js";
import type { Controller } from "./draft_controllers.js";
import { DraftInFlight, DraftPolicy } from "./draft_policy.js";
import { DrafterSelection } from "./drafter_selection.js";
import type { Draft, LoopEvent, Pushed, RoundEnded, Wait } from "./events.js";
import { USUAL_SETTINGS, type Conditions, type LoopSettings, type Offline } from "./settings.js";
import { Timeouts, type Alarm } from "./timeouts.js";
import { UnsolicitedDrafts } from "./unsolicited.js";

const ONLINE = "connected to the server";

export interface AskOptions {
  readonly whileAway?: boolean;
  /** The answer as it was written without the target, which is asked about it first. */
  readonly draft?: readonly number[];
}

/**
 * Drive a {@link ClientSession}, a drafter and a controller.
 *
 * The host has sockets, workers and a clock. It reports what happened and does what {@link next} says, one thing after the
 * other. Between a `Draft` and {@link drafted} it calls nothing else. `now` is in seconds of any monotonic clock. Listeners
 * are called at once.
 */
export class DraftingLoop<D extends Drafter = Drafter> {
  private readonly timeouts: Timeouts;
  private readonly inFlight: DraftInFlight;
  private readonly selection: DrafterSelection;
  private readonly unsolicited = new UnsolicitedDrafts();
  private readonly draftPolicy: DraftPolicy<D>;
  private readonly listeners: ((event: LoopEvent) => void)[] = [];
  private lastLink: LinkChanged = {
    event: "LinkChanged",
    status: "offline",
    detail: "no connection has been made yet",
    retryInS: null,
    late: false,
  };
  private paused: PauseReason | undefined;

  /**
   * @param drafter undefined if each round asks the target for one token.
   * @param writer writes in place of the drafter during an outage; it needs no memory rows.
   */
  constructor(
    private readonly session: ClientSession,
    private readonly drafter: D | undefined,
    private readonly controller: Controller,
    settings: LoopSettings = USUAL_SETTINGS,
    writer?: D,
  ) {
    const timeouts = (this.timeouts = new Timeouts(settings));
    const inFlight = (this.inFlight = new DraftInFlight(session.tentative.length));
    const selection = (this.selection = new DrafterSelection(settings.drafting, drafter !== undefined));
    const parts = [timeouts, inFlight, selection, this.unsolicited] as const;
    this.draftPolicy = new DraftPolicy(session, drafter, writer, controller, settings, ...parts);
  }

  // -- what an application may read and set at any time ----------------------------------------

  /** Call `listener` with each event from now on. */
  listen(listener: (event: LoopEvent) => void): void {
    this.listeners.push(listener);
  }

  /** The link's last change. */
  get link(): LinkChanged {
    return this.lastLink;
  }

  /** Tokens that the target has confirmed. */
  get committed(): readonly number[] {
    return this.session.committed;
  }

  /** Answer tokens after the committed ones, with their origins. */
  get unconfirmed(): [number, Origin][] {
    return this.session.unconfirmed;
  }

  /** Whether an answer is not finished yet. */
  get answering(): boolean {
    return this.session.answering;
  }

  /** What the host knows of the device. Whether memory rows are sent changes with the next connection. */
  get conditions(): Conditions {
    return this.draftPolicy.conditions;
  }

  set conditions(conditions: Conditions) {
    this.draftPolicy.conditions = conditions;
    this.session.wantsRows = !conditions.metered;
    this.session.held = conditions.background;
  }

  /** What happens to text that was written offline. */
  get policy(): Policy {
    return this.session.policy;
  }

  set policy(policy: Policy) {
    this.session.policy = policy;
  }

  /** What writes during an outage. */
  get offline(): Offline {
    return this.draftPolicy.offline;
  }

  set offline(offline: Offline) {
    this.draftPolicy.offline = offline;
  }

  // -- what the user wants ---------------------------------------------------------------------

  /** Begin an answer to `tokens` after the first `kept` committed ones, see `ClientSession.prompt`. */
  ask(
    kept: number,
    tokens: readonly number[],
    sampling: Sampling,
    maxNewTokens: number,
    { whileAway = true, draft = [] }: AskOptions = {},
  ): void {
    this.beginAt(kept);
    this.session.prompt(tokens, sampling, maxNewTokens, whileAway);
    if (draft.length) {
      this.session.extend(draft.slice(0, this.session.room ?? draft.length), "offline");
      this.inFlight.resume(this.session.tentative.length);
    }
  }

  /**
   * Continue an answer that ends with `tokens` after the first `kept` committed ones, see `ClientSession.continueAnswer`.
   */
  continueAnswer(
    kept: number,
    tokens: readonly number[],
    answerStart: number,
    sampling: Sampling,
    maxNewTokens: number,
    whileAway = true,
  ): void {
    this.beginAt(kept);
    this.session.continueAnswer(tokens, answerStart, sampling, maxNewTokens, whileAway);
  }

  /** End the answer at its last committed token. */
  cancel(): void {
    this.tell(...this.session.cancel());
  }

  /** Return whether {@link keep} could keep any of `tokens`: answer and context may be full. */
  mayKeep(start: number, tokens: readonly number[]): boolean {
    return this.session.keepable(tokens, start).length > 0;
  }

  /**
   * Put `tokens` in place of the answer's end from position `start` on, see `ClientSession.keep`.
   *
   * @throws LocalProtocolError see there.
   */
  keep(start: number, tokens: readonly number[]): void {
    this.forgetRows(start);
    this.tell(...this.session.keep(start, tokens));
    this.inFlight.begin();
    this.timeouts.idle();
    this.paused = undefined;
  }

  // -- the link --------------------------------------------------------------------------------

  /** Note that the host tries to connect. */
  connecting(): void {
    this.setLink("reconnecting", "a connection to the server is being made");
  }

  /**
   * Note that a connection is established; the Hello is among the {@link framesToSend}.
   *
   * @throws LocalProtocolError there is a connection already.
   */
  opened(): void {
    this.session.connect();
  }

  /**
   * Note that the connection is gone, or could not be made.
   *
   * @param retryInS seconds until the next attempt, null if there will be none.
   * @param onPurpose the user works offline.
   */
  lost(why: string, retryInS: number | null, now: number, onPurpose = false): void {
    if (this.session.link !== "down") this.tell({ event: "LinkLost" });
    this.session.disconnected();
    this.timeouts.down(now, onPurpose);
    this.setLink("offline", why, retryInS);
  }

  /** Take a frame of the server, which arrived at `now`; a draft may have been under way since. */
  received(frame: Uint8Array, now: number): void {
    this.draftPolicy.exhausted = undefined;
    const events: LoopEvent[] = this.session.receive(frame);
    // Rows first: the session has taken the whole frame, and the drafter has to agree before listeners hear of it.
    for (const event of [...events]) {
      const fault = event.event === "RowsReceived" ? this.addRows(event) : undefined;
      if (fault) events.push(fault);
    }
    for (const event of events) {
      if (event.event === "Welcomed") this.takeWelcome();
      else if (event.event === "Decided") this.takeVerdict(event, now);
      else if (event.event === "Echoed") this.takeEcho(event, now);
      else if (event.event === "Faulted") this.takeFault(event, now);
      this.tell(event);
    }
  }

  /** Take the frames that have to be sent, in order. */
  framesToSend(now: number): Uint8Array[] {
    const frames = this.session.framesToSend();
    const asks = frames.length > 0 && !(this.session.state === "streaming" && this.timeouts.waiting);
    this.timeouts.stamped(this.session.stamp, now);
    if (!this.session.awaitingVerdict) this.timeouts.idle();
    else if (asks) this.timeouts.sent(now, this.session.awaitingPrefill);
    return frames;
  }

  /** Send once more what awaits a verdict. */
  resend(): void {
    this.session.resend();
  }

  // -- what the device does --------------------------------------------------------------------

  /** Return what the host has to do now. */
  next(now: number): Draft<D> | Wait {
    for (const alarm of this.timeouts.passed(now)) this.takeAlarm(alarm);
    this.tell(...this.session.resume());
    this.selectDrafter();
    if (!this.draftPolicy.rowsDue(now)) {
      const draft = this.draftPolicy.draft() ?? this.draftPolicy.unsolicitedDraft();
      if (draft) return draft;
      if (this.draftPolicy.roundDue) this.send(NOTHING);
    }
    this.notePause();
    return { todo: "wait", until: this.timeouts.wakeAt(now) };
  }

  /**
   * Take the `tree` that the drafter proposed for `draft`, in `seconds`.
   *
   * @throws RangeError it has more tokens than the budget's nodes.
   */
  drafted(draft: Draft<D>, tree: DraftTree, seconds: number): void {
    const { nodes, levels } = draft.budget;
    if (tree.tokens.length > nodes) {
      throw new RangeError(`the drafter proposed ${tree.tokens.length} tokens where ${nodes} were allowed`);
    }
    const { session } = this;
    const start = draft.prefix.length;
    if (this.draftPolicy.unsolicitedDue) {
      this.unsolicited.begin(start, tree, seconds, this.draftPolicy.roundBudget);
      const sends = tree.tokens.length > 0 && session.maySendUnsolicited;
      if (sends) session.sendUnsolicited(tree, start);
      this.tell({ event: "Drafted", seconds, unsolicited: sends ? tree.tokens.length : 0 });
      return;
    }
    const extension = this.inFlight.drafted(start, tree);
    // With no levels or nodes to spend, an empty draft says nothing of the drafter.
    const nothing = !tree.tokens.length && levels > 0 && nodes > 0;
    this.draftPolicy.exhausted = nothing ? draft.by : undefined;
    if (this.draftPolicy.roundDue) {
      const stem = [...session.tentative];
      this.inFlight.took(tree.steps, seconds);
      const whole = prependChain(tree, stem, this.inFlight.logprobs(start - stem.length, start));
      session.extend(extension, draft.origin);
      this.send(whole, this.inFlight.knows(start - stem.length, start));
    } else {
      session.extend(extension, draft.origin);
    }
    if (extension.length) this.paused = undefined;
    this.tell({ event: "Drafted", seconds, unsolicited: 0 });
  }

  /**
   * Take that `draft` could not be made; return whether the loop goes on. It does without an offline writer, as if the bundle
   * had none; not without its drafter.
   */
  failed(draft: Draft<D>, why: string): boolean {
    if (!this.draftPolicy.loseWriter(draft.by)) return false;
    this.paused = undefined;
    const { status, retryInS, late } = this.link;
    this.setLink(status, `the offline writer failed: ${why}`, retryInS, late);
    return true;
  }

  // -- frames of the server --------------------------------------------------------------------

  private takeWelcome(): void {
    this.timeouts.up();
    this.selection.takesDrafts = this.session.takesUnsolicited;
    this.inFlight.resume(this.session.tentative.length);
    this.setLink("online", ONLINE);
  }

  private takeVerdict(verdict: Decided, now: number): void {
    const wasLate = this.timeouts.late;
    const waitedS = this.timeouts.answered(now);
    if (wasLate) this.setLink("online", ONLINE);
    if (this.session.awaitingVerdict) this.timeouts.sent(now, false); // the server streams on: silence from here on is late
    if (this.session.rowsComing) this.timeouts.awaitRows(now);
    const outcome = this.recordOutcome(verdict, waitedS);
    if (outcome) this.tell(outcome);
  }

  private takeEcho(echo: Echoed, now: number): void {
    const roundTripS = this.timeouts.echoed(echo.stamp, echo.heldS, now);
    if (roundTripS !== undefined) this.session.noteRoundTrip(this.selection.noteRoundTrip(roundTripS));
  }

  private takeFault(fault: Faulted, now: number): void {
    if (fault.code === "IDLE") return; // the server closes a silent connection; the transport makes another
    if (fault.retryAfterMs) this.timeouts.resend(now + fault.retryAfterMs / 1000);
    this.tell({ event: "Problem", error: fault.text, final: !fault.retryAfterMs });
  }

  /** Give memory rows to the drafter; return a fault if it cannot read them. */
  private addRows({ start, keys, values }: RowsReceived): Faulted | undefined {
    const { drafter } = this;
    try {
      drafter?.addRows(start, keys, values);
    } catch (error) {
      if (!drafter || !(error instanceof RowsMismatchError)) throw error;
      this.session.rows = drafter.rows;
      const text = `the verifier's memory rows are not those of this bundle's drafter: ${error.message}`;
      return { event: "Faulted", code: "ROWS_MISMATCH", text, retryAfterMs: 0 };
    }
    return undefined;
  }

  /**
   * Feed a verdict's outcome to the controller and to the selection of the drafter.
   *
   * @param waitedS seconds since what it answers was sent; for a pushed verdict, since the verdict before.
   * @returns the event that describes it; undefined for a verdict that ends no round of this device.
   */
  private recordOutcome(verdict: Decided, waitedS: number): Pushed | RoundEnded | undefined {
    const { inFlight, selection } = this;
    if (verdict.cause === "pushed") return this.recordPushed(verdict, waitedS);
    const outcome = inFlight.ended(verdict, waitedS);
    const asked = verdict.cause === "asked";
    // The verdict on a draft from before the connection says nothing of a round's time.
    if (asked && !(inFlight.resumed && verdict.drafted)) {
      this.controller.observe(outcome);
      selection.roundEnded(outcome, verdict.accepted + 1, this.controller.tokenS * outcome.drafted);
    }
    inFlight.resumed &&= this.session.tentative.length > 0;
    return asked ? outcome : undefined;
  }

  private recordPushed(verdict: Decided, waitedS: number): Pushed {
    const { controller, selection } = this;
    const { accepted, computeS, draftStamp, drafted } = verdict;
    const pushed: Pushed = { event: "Pushed", drafted, accepted, waitedS, computeS, draftStamp };
    controller.observe(pushed);
    const sparedS = verdict.draftS + controller.tokenS * drafted;
    selection.pushed(accepted + 1, waitedS, sparedS, draftStamp > 0 && accepted > 0);
    for (const outcome of this.unsolicited.decided(this.session.committed, selection.roundS, controller.tokenS)) {
      controller.observe(outcome);
      selection.drafted(outcome, controller.tokenS * outcome.drafted);
    }
    return pushed;
  }

  // -- helpers ---------------------------------------------------------------------------------

  private takeAlarm(alarm: Alarm): void {
    if (alarm === "late") {
      this.setLink("online", "the server answers late; this device writes on", null, true);
    } else if (alarm === "resend") {
      this.resend();
    } else if (this.session.declareOffline(this.inFlight.sentPath)) {
      this.tell({ event: "Drafted", seconds: 0, unsolicited: 0 });
    }
  }

  /** Have the server draft and stream, or the device take over. */
  private selectDrafter(): void {
    if (this.draftPolicy.deviceDue) {
      this.session.revokeCredit();
    } else {
      const credit = this.draftPolicy.creditDue;
      if (credit !== undefined) this.session.grantCredit(credit);
    }
  }

  /** Have the tentative tokens verified, with the branches of `tree`. */
  private send(tree: DraftTree, claims = true): void {
    this.inFlight.sent(this.session.tentative.length, depthOf(tree));
    this.session.propose(undefined, tree.tokens.length ? tree : undefined, claims);
  }

  private notePause(): void {
    const reason = this.session.answering ? this.draftPolicy.pauseReason() : undefined;
    if (reason && reason !== this.paused) this.tell({ event: "PauseBegan", reason });
    this.paused = reason;
  }

  /** Forget what was under way; the first `kept` committed tokens stay. */
  private beginAt(kept: number): void {
    this.forgetRows(kept);
    this.inFlight.begin();
    this.timeouts.idle();
    this.session.rewind(kept);
    this.paused = undefined;
  }

  private forgetRows(length: number): void {
    this.drafter?.truncateRows(length);
    this.unsolicited.forget();
    this.draftPolicy.exhausted = undefined;
  }

  private tell(...events: LoopEvent[]): void {
    for (const event of events) for (const listener of this.listeners) listener(event);
  }

  private setLink(status: LinkChanged["status"], detail: string, retryInS: number | null = null, late = false): void {
    const { link } = this;
    if (link.status === status && link.detail === detail && link.retryInS === retryInS) return;
    this.lastLink = { event: "LinkChanged", status, detail, retryInS, late };
    this.tell(this.lastLink);
  }
}
