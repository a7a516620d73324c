/** The drafting loop: what the device does next. Without I/O, workers and clock. */

import type { Decided, Faulted, RowsReceived } from "../session/events.js";
import type { Sampling } from "../session/sampling.js";
import { NOTHING, depthOf, treeBehind, type DraftTree } from "../session/tree.js";
import { RowsMismatchError, type Drafter } from "./drafter.js";
import type { Draft, LoopEvent, Wait } from "./events.js";
import type { Alarm } from "./link_watch.js";
import { LoopState } from "./loop_state.js";

/**
 * The server may go on by itself for so many tokens; after so many it hears that it may go on further, and its answer says
 * what the link takes by then.
 */
const CREDIT = 256;
const RENEWED_AFTER = 32;

export interface AskOptions {
  readonly whileAway?: boolean;
  /** The answer as it was written without the target, which is asked about it first. */
  readonly draft?: readonly number[];
}

/**
 * A session, a drafter and a controller, and what to do with them next. The host, which has sockets, workers and a clock,
 * tells what happened and does what {@link next} says, one thing after the other; between a `Draft` and {@link drafted} it
 * calls nothing else. `now` is in seconds of any monotonic clock. What happens is told to listeners at once.
 */
export class DraftingLoop<D extends Drafter = Drafter> extends LoopState<D> {
  // -- what the user wants ---------------------------------------------------------------------

  /** Begin an answer: to `tokens` after the first `kept` committed ones, see `ClientSession.prompt`. */
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
      this.rounds.resume(this.session.tentative.length);
    }
  }

  /**
   * Have an answer go on that ends with `tokens` after the first `kept` committed ones, see
   * `ClientSession.continueAnswer`.
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

  /** Nothing is under way, and the first `kept` committed tokens stay. */
  private beginAt(kept: number): void {
    this.forgetRows(kept);
    this.rounds.begin();
    this.watch.idle();
    this.session.rewind(kept);
    this.paused = undefined;
  }

  /** End the answer where the target has confirmed it. */
  cancel(): void {
    this.tell(...this.session.cancel());
  }

  /** Whether {@link keep} could keep any of them: answer and context may be full. */
  mayKeep(start: number, tokens: readonly number[]): boolean {
    return this.session.keepable(tokens, start).length > 0;
  }

  /**
   * Put `tokens` in place of the answer's end, see `ClientSession.keep`.
   *
   * @throws LocalProtocolError see there.
   */
  keep(start: number, tokens: readonly number[]): void {
    this.forgetRows(start);
    this.tell(...this.session.keep(start, tokens));
    this.rounds.begin();
    this.watch.idle();
    this.paused = undefined;
  }

  // -- what the link does ----------------------------------------------------------------------

  /** A connection is being made. */
  connecting(): void {
    this.listeners.setLink("reconnecting");
  }

  /**
   * A connection stands: the Hello is among the {@link framesToSend}.
   *
   * @throws LocalProtocolError one stands already.
   */
  opened(): void {
    this.session.connect();
  }

  /**
   * It is gone, or could not be made.
   *
   * @param retryInS seconds until another will be made, null for never.
   * @param onPurpose the user works offline.
   */
  lost(why: string, retryInS: number | null, now: number, onPurpose = false): void {
    if (this.session.link !== "down") this.tell({ event: "LinkLost" });
    this.session.disconnected();
    this.watch.down(now, onPurpose);
    this.listeners.setLink("offline", why, retryInS);
  }

  /** A frame came. */
  received(frame: Uint8Array, now: number): void {
    this.decisions.exhausted = undefined;
    const events: LoopEvent[] = this.session.receive(frame);
    // What the frame says besides is taken first: the session has taken it.
    for (const event of [...events]) {
      const refused = event.event === "RowsReceived" ? this.addRows(event) : undefined;
      if (refused) events.push(refused);
    }
    for (const event of events) {
      if (event.event === "Welcomed") {
        this.watch.up();
        this.placement.serverDrafts = event.drafts;
        this.rounds.resume(this.session.tentative.length);
        this.listeners.setLink("online");
      } else if (event.event === "Decided") {
        this.decided(event, now);
      } else if (event.event === "Echoed") {
        const tripS = this.watch.echoed(event.stamp, event.heldS, now);
        if (tripS !== undefined) this.session.noteRoundTrip(this.placement.trip(tripS));
      } else if (event.event === "Faulted") {
        this.faulted(event, now);
      }
      this.tell(event);
    }
  }

  // -- what the device does --------------------------------------------------------------------

  /** What to do now. */
  next(now: number): Draft<D> | Wait {
    for (const alarm of this.watch.passed(now)) this.takeAlarm(alarm);
    this.tell(...this.session.resume());
    this.place();
    if (!this.decisions.rowsDue(now)) {
      const draft = this.decisions.draft() ?? (this.trial.runs ? undefined : this.decisions.trial(this.trial.next));
      if (draft) return draft;
      if (this.decisions.roundDue) this.send(NOTHING);
    }
    this.notePause();
    return { todo: "wait", until: this.watch.wakeAt(now) };
  }

  /**
   * The drafter proposed `tree` for `draft`, in so many seconds.
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
    if (this.decisions.trialDue) {
      this.trial.begin(start, tree, seconds);
      return;
    }
    const extension = this.rounds.drafted(start, tree);
    // Without levels or nodes to spend, an empty draft says nothing of the drafter.
    const nothing = !tree.tokens.length && levels > 0 && nodes > 0;
    this.decisions.exhausted = nothing ? draft.by : undefined;
    if (this.decisions.roundDue) {
      const stem = [...session.tentative];
      this.rounds.took(tree.steps, seconds);
      const whole = treeBehind(tree, stem, this.rounds.logprobs(start - stem.length, start));
      session.extend(extension, draft.origin);
      this.send(whole);
    } else {
      session.extend(extension, draft.origin);
    }
    if (extension.length) this.paused = undefined;
    this.tell({ event: "Drafted", seconds });
  }

  /** Take the frames that are to be sent, in order. */
  framesToSend(now: number): Uint8Array[] {
    const frames = this.session.framesToSend();
    this.watch.stamped(this.session.stamp, now);
    if (!this.session.awaitingVerdict) this.watch.idle();
    else if (frames.length) this.watch.sent(now, this.session.awaitingPrefill);
    return frames;
  }

  /** Send what is in flight once more. */
  resend(): void {
    this.session.resend();
  }

  /** Have the tentative tokens verified, with what branches off them. */
  private send(tree: DraftTree): void {
    this.rounds.sent(this.session.tentative.length, depthOf(tree));
    this.session.propose(undefined, tree.tokens.length ? tree : undefined);
  }

  // -- time ------------------------------------------------------------------------------------

  private takeAlarm(alarm: Alarm): void {
    if (alarm === "late") {
      this.listeners.setLink("online", "the verdict is late; the device writes on");
    } else if (alarm === "resend") {
      this.resend();
    } else if (this.session.declareOffline(this.rounds.sentPath)) {
      this.tell({ event: "Drafted", seconds: 0 });
    }
  }

  private notePause(): void {
    const reason = this.session.answering ? this.decisions.pauseReason() : undefined;
    if (reason && reason !== this.paused) this.tell({ event: "PauseBegan", reason });
    this.paused = reason;
  }

  // -- what came -------------------------------------------------------------------------------

  private decided(verdict: Decided, now: number): void {
    const wasLate = this.watch.late;
    const waitedS = this.watch.answered(now);
    if (wasLate) this.listeners.setLink("online");
    if (this.session.awaitingVerdict) this.watch.sent(now, false); // the server goes on: from here on silence is late
    if (this.session.rowsComing) this.watch.awaitRows(now);
    const learnt = this.lessons.learn(verdict, waitedS);
    if (learnt) this.tell(learnt);
  }

  /** Have the server go on by itself, or take over. */
  private place(): void {
    const { session } = this;
    if (this.decisions.deviceDue) {
      session.revokeCredit();
    } else if (this.decisions.serverDue) {
      const reached = session.committed.length + session.supplied;
      if (session.credit - reached <= CREDIT - RENEWED_AFTER) session.grantCredit(reached + CREDIT);
    }
  }

  /** Give them to the drafter; a fault where it cannot read them. */
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

  private faulted(fault: Faulted, now: number): void {
    if (fault.code === "IDLE") return; // the server closes a silent connection; the transport makes another
    if (fault.retryAfterMs) this.watch.resend(now + fault.retryAfterMs / 1000);
    this.tell({ event: "Problem", error: fault.text, final: !fault.retryAfterMs });
  }

  private forgetRows(length: number): void {
    this.drafter?.truncateRows(length);
    this.trial.forget();
    this.decisions.exhausted = undefined;
  }

  private tell(...events: LoopEvent[]): void {
    this.listeners.tell(...events);
  }
}
