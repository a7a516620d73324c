/** Choose which side drafts: the device, or the server, which then streams its answer on its own. */

import type { RoundEnded } from "./events.js";
import type { Drafting } from "./settings.js";

/** Decay of the moving averages, a verdict. Tokens vary from draft to draft; seconds follow link and load. */
const SLOW_DECAY = 0.96;
const FAST_DECAY = 0.9;
const BETTER = 1.05; // switch only if the other side is this many times as fast
const WANTED = 1.2; // weight of the device's tokens while a busy server asks the device to draft
const FAR = 1.6; // a device this many times as fast need not check what the server can do now
const ENOUGH = 6; // verdicts after which a rate is known
/**
 * Shadow drafts before the first judgement, and at most. A judgement needs a margin of `DOUBT / number` to switch and `HOPE`
 * times that to give up: the first drafts still have a shape that is being learned.
 */
const FEW_SHADOWS = 2;
const MOST_SHADOWS = 24;
const DOUBT = 0.7;
const HOPE = 3;
/** Assumed of a device that has not drafted yet. */
const HOPED_TOKENS = 2;
const HOPED_DRAFT_S = 0.01;
const MOST_TOKENS = 6; // a round, at the most that may be hoped for
/** Tokens until the other side is considered again; doubled each time that it was not faster. */
const FIRST_PAUSE = 64;
const LONGEST_PAUSE = 2048;
/** Reconsider at once if round trip or verdicts take this many times as long as before, or that part of it. */
const CHANGED = 1.6;
const LEAST_S = 1e-6;

/**
 * Compare the tokens a second of device and server at the present round trip. The server's rate is measured while it
 * streams, the device's while it drafts, or by shadow drafts that are never sent. The Python class of this name gives the
 * reasons.
 */
export class DrafterSelection {
  /** Whether the server is busy and asks the device to draft. */
  draftsWanted = false;
  /** Whether the server drafts while it streams, so that its rate may become better. */
  serverDrafts = false;
  private readonly drafting: Drafting;
  private server: boolean;
  private roundTripS: number | undefined;
  // A verdict of the server: its tokens, its seconds, and its seconds without the server's own draft.
  private pushedTokens = new MovingMean(SLOW_DECAY);
  private readonly pushedS = new MovingMean(FAST_DECAY);
  private readonly ownS = new MovingMean(FAST_DECAY);
  // A round of the device, real or shadow: its tokens, the seconds of its draft, and the server's part.
  private readonly taken = new MovingMean(SLOW_DECAY);
  private readonly draftS = new MovingMean(FAST_DECAY);
  private partS = new MovingMean(FAST_DECAY);
  private shadows = 0; // since the device was last considered
  private serverPartS: number | undefined; // of the device's first rounds since it began to draft
  private since = 0; // verdicts since the last switch
  private pause = FIRST_PAUSE; // tokens until the device is considered again
  private waits = 0;
  private look = FIRST_PAUSE; // tokens until the server is considered again
  private stays = 0;
  private leftRate: number | undefined; // the device's tokens a second, while the server shows its own
  private judged: { roundTripS: number; pushedS: number } | undefined; // at the last judgement

  /**
   * @param drafting `auto`, or the side that drafts in any case.
   * @param able whether the device can draft at all.
   */
  constructor(drafting: Drafting, able: boolean) {
    this.drafting = able || drafting === "device" ? drafting : "server";
    this.server = this.drafting !== "device";
  }

  /** Whether the server shall draft. */
  get atServer(): boolean {
    return this.server;
  }

  /** Whether the device shall make a draft that is not sent. */
  get wantsShadowDraft(): boolean {
    const known = this.since >= 2 && this.roundTripS !== undefined;
    if (!this.server || this.drafting !== "auto" || !known || this.leftRate !== undefined) return false;
    if (this.waits && !this.changed) return false;
    return MOST_TOKENS / Math.max(LEAST_S, this.roundS) > BETTER * this.serverRate;
  }

  /** Note a measured round trip, without the time that the server held the frame; return the present estimate. */
  noteRoundTrip(seconds: number): number {
    const latest = Math.max(0, seconds);
    const old = this.roundTripS;
    this.roundTripS = old === undefined ? latest : Math.min(latest, old + 0.2 * (latest - old));
    return this.roundTripS;
  }

  /** Seconds that a round without a draft is expected to take while the server drafts. */
  get roundS(): number {
    return (this.roundTripS ?? 0) + this.ownS.value;
  }

  /**
   * Note a pushed verdict.
   *
   * @param tokens its committed tokens.
   * @param seconds since the verdict before.
   * @param sparedS seconds of it that the server spent on its own draft.
   */
  pushed(tokens: number, seconds: number, sparedS: number): void {
    this.pushedTokens.add(tokens);
    this.pushedS.add(seconds);
    this.ownS.add(Math.max(0, seconds - sparedS));
    this.waits = Math.max(0, this.waits - tokens);
    this.since++;
    if (this.promises) {
      this.switchToDevice();
    } else if (this.leftRate !== undefined && this.since >= ENOUGH) {
      const left = this.leftRate;
      this.leftRate = undefined;
      if (left * BETTER > this.serverRate) this.switchToDevice();
    }
  }

  /** Note the hypothetical round of a shadow draft. */
  shadowEnded(outcome: RoundEnded): void {
    if (this.roundTripS === undefined) return;
    this.shadows++;
    this.addRound(outcome, outcome.accepted + 1, this.roundTripS);
    if (this.shadows < FEW_SHADOWS) return;
    const ratio = this.deviceRate(this.roundTripS + this.partS.value) / Math.max(LEAST_S, this.serverRate);
    const doubt = DOUBT / this.shadows;
    if (ratio > BETTER + doubt) this.switchToDevice();
    else if (ratio < 1 - HOPE * doubt || this.shadows >= MOST_SHADOWS) this.pauseDevice();
    else return;
    this.judged = { roundTripS: this.roundTripS, pushedS: this.pushedS.value };
    this.shadows = 0;
    this.partS = new MovingMean(FAST_DECAY);
  }

  /** Note a round of the device that committed `tokens`. */
  roundEnded(outcome: RoundEnded, tokens: number): void {
    if (outcome.supplied || this.roundTripS === undefined) return;
    this.addRound(outcome, tokens, this.roundTripS);
    this.since++;
    this.stays = Math.max(0, this.stays - tokens);
    if (this.drafting !== "auto" || this.server || this.since < ENOUGH || !this.pushedTokens.known) return;
    const partS = Math.max(LEAST_S, this.partS.value);
    this.serverPartS ??= partS;
    // On its own it commits at least one token in the time of each such part.
    const server = Math.max(1, this.serverRate * this.serverPartS) / partS;
    const device = this.deviceRate(this.roundTripS + partS);
    if (server > BETTER * device) {
      this.switchTo(true);
      this.pauseDevice();
    } else if (!this.stays && device < FAR * server && this.serverDrafts) {
      this.switchTo(true); // for a moment, to measure its present rate
      this.pushedTokens = new MovingMean(SLOW_DECAY);
      this.leftRate = device;
    }
  }

  /** Whether a device that has not drafted yet is likely to be faster than a server that does not draft. */
  private get promises(): boolean {
    if (!this.wantsShadowDraft || this.serverDrafts || this.taken.known) return false;
    return HOPED_TOKENS / (HOPED_DRAFT_S + this.roundS) > BETTER * this.serverRate;
  }

  private addRound(outcome: RoundEnded, tokens: number, roundTripS: number): void {
    this.taken.add(tokens);
    this.draftS.add(outcome.draftS);
    this.partS.add(Math.max(0, outcome.waitedS - roundTripS));
  }

  /**
   * Return the device's tokens a second, weighted if the server asks for drafts.
   *
   * @param roundS seconds of a round without its draft.
   */
  private deviceRate(roundS: number): number {
    const worth = this.draftsWanted ? WANTED : 1;
    return (worth * this.taken.value) / Math.max(LEAST_S, this.draftS.value + roundS);
  }

  /** Tokens a second while the server streams. */
  private get serverRate(): number {
    return this.pushedTokens.value / Math.max(LEAST_S, this.pushedS.value);
  }

  /** Whether round trip or verdicts take much more or less than at the last judgement. */
  private get changed(): boolean {
    const { judged } = this;
    if (judged === undefined) return false;
    const other = (now: number, old: number): boolean => {
      const ratio = now / Math.max(LEAST_S, old);
      return !(1 / CHANGED < ratio && ratio < CHANGED);
    };
    return other(this.roundTripS ?? 0, judged.roundTripS) || other(this.pushedS.value, judged.pushedS);
  }

  private switchTo(server: boolean): void {
    this.server = server;
    this.since = 0;
    this.serverPartS = undefined;
    this.partS = new MovingMean(FAST_DECAY);
  }

  /** Let the device draft; the server is measured again after a while. */
  private switchToDevice(): void {
    this.switchTo(false);
    this.stays = this.look;
    this.look = Math.min(2 * this.look, LONGEST_PAUSE);
  }

  /** Do not consider the device for a while. */
  private pauseDevice(): void {
    this.waits = this.pause;
    this.pause = Math.min(2 * this.pause, LONGEST_PAUSE);
  }
}

/** An exponentially weighted mean. */
class MovingMean {
  private count = 0;
  private sum = 0;

  /** @param decay weight of a figure by that of the next one. */
  constructor(private readonly decay: number) {}

  get known(): boolean {
    return this.count > 0;
  }

  /** The mean; 0 if nothing was added. */
  get value(): number {
    return this.count ? this.sum / this.count : 0;
  }

  add(figure: number): void {
    this.count = this.decay * this.count + 1;
    this.sum = this.decay * this.sum + figure;
  }
}
