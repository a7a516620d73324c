/** Who drafts: the device, or the server, which then goes on by itself and streams. */

import type { RoundEnded } from "./events.js";
import type { Drafting } from "./settings.js";

/** A verdict counts so many times the one after it: tokens vary from draft to draft, seconds change with link and load. */
const LONG = 0.96;
const SHORT = 0.9;
const BETTER = 1.05; // who drafts now is left where the other is so many times as fast
const WANTED = 1.2; // a token of the device counts so many times one of a server that is busy, and asks for it
const FAR = 1.6; // where the device is so many times as fast, the server need not show whether that is still so
const ENOUGH = 6; // verdicts that say how fast the one who drafts is
/**
 * Drafts that say what the device could do: after fewer of them it must be so much better, or worse, as this by their
 * number; after so many it is left. The shape of its drafts is still being learnt by the first.
 */
const FEW_TRIALS = 2;
const MOST_TRIALS = 24;
const DOUBT = 0.7;
const HOPE = 3;
/** Of a device that nobody has seen drafting. */
const HOPED_TOKENS = 2;
const HOPED_DRAFT_S = 0.01;
const MOST_TOKENS = 6; // a round: no more is hoped for
/** Tokens until the other one is thought of again; twice as many after each time that it was not faster. */
const FIRST_PAUSE = 64;
const LONGEST_PAUSE = 2048;
/** At once where round trip or verdicts take so many times what they took, or that part of it. */
const CHANGED = 1.6;
const LEAST_S = 1e-6;

/**
 * Compares tokens a second of both, at the present round trip. The server's are measured while it goes on by itself, the
 * device's while it drafts, or by drafts that are not sent. The Python class of this name says how, and why so.
 */
export class Placement {
  /** The verifier is busy, and asks the device to draft. */
  draftsWanted = false;
  /** Whether the server drafts while it goes on by itself, and may get better at it. */
  serverDrafts = false;
  private readonly drafting: Drafting;
  private server: boolean;
  private tripS: number | undefined;
  // What a verdict of the server's brings and takes, and what it takes without the server's own draft ...
  private pushedTokens = new Mean(LONG);
  private readonly pushedS = new Mean(SHORT);
  private readonly ownS = new Mean(SHORT);
  // ... and what a round of the device's, or a trial, brings, its draft, and the server's part of it.
  private readonly taken = new Mean(LONG);
  private readonly draftS = new Mean(SHORT);
  private partS = new Mean(SHORT);
  private trials = 0; // since the device was last thought of
  private serverPartS: number | undefined; // of the device's first rounds since it took over
  private since = 0; // verdicts since the last change
  private pause = FIRST_PAUSE;
  private waits = 0;
  private look = FIRST_PAUSE; // the same for the device, while it drafts
  private stays = 0;
  private leftRate: number | undefined; // the device's tokens a second, while the server shows its own
  private judged: { tripS: number; pushedS: number } | undefined; // round trip, seconds between verdicts: at the last trials

  /**
   * @param drafting `auto`, or whoever is to draft in any case.
   * @param able whether the device can draft at all.
   */
  constructor(drafting: Drafting, able: boolean) {
    this.drafting = able || drafting === "device" ? drafting : "server";
    this.server = this.drafting !== "device";
  }

  /** Whether the server is to draft. */
  get atServer(): boolean {
    return this.server;
  }

  /** Whether the device is to make a draft that is not sent. */
  get wantsTrial(): boolean {
    const known = this.since >= 2 && this.tripS !== undefined;
    if (!this.server || this.drafting !== "auto" || !known || this.leftRate !== undefined) return false;
    if (this.waits && !this.changed) return false;
    return MOST_TOKENS / Math.max(LEAST_S, this.roundS) > BETTER * this.serverRate;
  }

  /** What a frame and its answer took on the link, without what the server held it; says what that is by now. */
  trip(seconds: number): number {
    const least = Math.max(0, seconds);
    this.tripS = this.tripS === undefined ? least : Math.min(least, this.tripS + 0.2 * (least - this.tripS));
    return this.tripS;
  }

  /** What a round without a draft is expected to take while the server is the one who drafts. */
  get roundS(): number {
    return (this.tripS ?? 0) + this.ownS.value;
  }

  /**
   * A verdict came unasked, with so many tokens, and so long after what came before; without a draft of the server's own it
   * would have taken `sparedS` less.
   */
  pushed(tokens: number, seconds: number, sparedS: number): void {
    this.pushedTokens.add(tokens);
    this.pushedS.add(seconds);
    this.ownS.add(Math.max(0, seconds - sparedS));
    this.waits = Math.max(0, this.waits - tokens);
    this.since++;
    if (this.promises) {
      this.takeOver();
    } else if (this.leftRate !== undefined && this.since >= ENOUGH) {
      const left = this.leftRate;
      this.leftRate = undefined;
      if (left * BETTER > this.serverRate) this.takeOver();
    }
  }

  /** What a draft that was not sent would have brought, and took. */
  tried(outcome: RoundEnded): void {
    if (this.tripS === undefined) return;
    this.trials++;
    this.taken.add(outcome.accepted + 1);
    this.draftS.add(outcome.draftS);
    this.partS.add(Math.max(0, outcome.waitedS - this.tripS));
    if (this.trials < FEW_TRIALS) return;
    const ratio = this.deviceRate(this.tripS + this.partS.value) / Math.max(LEAST_S, this.serverRate);
    const doubt = DOUBT / this.trials;
    if (ratio > BETTER + doubt) this.takeOver();
    else if (ratio < 1 - HOPE * doubt || this.trials >= MOST_TRIALS) this.wait();
    else return;
    this.judged = { tripS: this.tripS, pushedS: this.pushedS.value };
    this.trials = 0;
    this.partS = new Mean(SHORT);
  }

  /** A draft of the device got its verdict, of so many tokens. */
  roundEnded(outcome: RoundEnded, tokens: number): void {
    if (outcome.supplied || this.tripS === undefined) return;
    this.taken.add(tokens);
    this.draftS.add(outcome.draftS);
    this.partS.add(Math.max(0, outcome.waitedS - this.tripS));
    this.since++;
    this.stays = Math.max(0, this.stays - tokens);
    if (this.drafting !== "auto" || this.server || this.since < ENOUGH || !this.pushedTokens.known) return;
    const partS = Math.max(LEAST_S, this.partS.value);
    this.serverPartS ??= partS;
    // By itself it has a token for each such part in any case.
    const server = Math.max(1, this.serverRate * this.serverPartS) / partS;
    const device = this.deviceRate(this.tripS + partS);
    if (server > BETTER * device) {
      this.turn(true);
      this.wait();
    } else if (!this.stays && device < FAR * server && this.serverDrafts) {
      this.turn(true); // for a moment, to see how fast it is now
      this.pushedTokens = new Mean(LONG);
      this.leftRate = device;
    }
  }

  /** Whether a device that nobody has seen drafting is likely to be faster than a server that does not. */
  private get promises(): boolean {
    if (!this.wantsTrial || this.serverDrafts || this.taken.known) return false;
    return HOPED_TOKENS / (HOPED_DRAFT_S + this.roundS) > BETTER * this.serverRate;
  }

  /**
   * Tokens a second; worth more where the verifier asks for drafts.
   *
   * @param roundS what a round takes without its draft.
   */
  private deviceRate(roundS: number): number {
    const worth = this.draftsWanted ? WANTED : 1;
    return (worth * this.taken.value) / Math.max(LEAST_S, this.draftS.value + roundS);
  }

  /** Tokens a second, while it goes on by itself. */
  private get serverRate(): number {
    return this.pushedTokens.value / Math.max(LEAST_S, this.pushedS.value);
  }

  /** Whether round trip or verdicts take something else than when the device was last thought of. */
  private get changed(): boolean {
    const { judged } = this;
    if (judged === undefined) return false;
    const other = (now: number, old: number): boolean => {
      const ratio = now / Math.max(LEAST_S, old);
      return !(1 / CHANGED < ratio && ratio < CHANGED);
    };
    return other(this.tripS ?? 0, judged.tripS) || other(this.pushedS.value, judged.pushedS);
  }

  private turn(server: boolean): void {
    this.server = server;
    this.since = 0;
    this.serverPartS = undefined;
    this.partS = new Mean(SHORT);
  }

  /** The device drafts, and looks at what the server can do after a while. */
  private takeOver(): void {
    this.turn(false);
    this.stays = this.look;
    this.look = Math.min(2 * this.look, LONGEST_PAUSE);
  }

  /** The device is not thought of for a while. */
  private wait(): void {
    this.waits = this.pause;
    this.pause = Math.min(2 * this.pause, LONGEST_PAUSE);
  }
}

/** Of which older ones count less. */
class Mean {
  private count = 0;
  private sum = 0;

  /** @param memory how many times the one after it each counts. */
  constructor(private readonly memory: number) {}

  get known(): boolean {
    return this.count > 0;
  }

  /** 0 of nothing. */
  get value(): number {
    return this.count ? this.sum / this.count : 0;
  }

  add(figure: number): void {
    this.count = this.memory * this.count + 1;
    this.sum = this.memory * this.sum + figure;
  }
}
