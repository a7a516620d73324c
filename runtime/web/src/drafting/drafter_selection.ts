/** Selection of the drafting side: the server, which streams, or the device, for whose drafts the server then waits. */

import type { RoundEnded } from "./events.js";
import type { Drafting } from "./settings.js";
import type { Pace } from "./unsolicited.js";

/** Decay of the moving averages per verdict. Tokens vary from draft to draft; seconds follow link and load. */
const SLOW_DECAY = 0.96;
const FAST_DECAY = 0.9;
/** Switch only if the other side is this many times as fast, and by `DOUBT / rounds` more after few rounds. */
const BETTER = 1.05;
const DOUBT = 0.7;
const LEAST_ROUNDS = 12; // drafts that have to show the rounds that they would have made
/**
 * Stream again if the server's answer to a round takes this many times as long as expected: link or verifier have become
 * slower, or the round waits for passes of other sessions. The expectation follows slow changes by `DRIFT` a round.
 */
const LONGER = 1.25;
const DRIFT = 0.02;
const UNUSED = 16; // drafts in vain, one after the other, after which the device pauses
/** Tokens until the other side, or unsolicited drafts, are considered again; doubled each time that it was in vain. */
const FIRST_PAUSE = 64;
const LONGEST_PAUSE = 2048;
const LEAST_S = 1e-6;

/**
 * Compare the tokens a second of streaming and of rounds at the present round trip. While the server streams, each draft of
 * the device shows the round that it would have made. The Python class of this name gives the reasons.
 */
export class DrafterSelection {
  /** Whether the server takes unsolicited drafts. */
  takesDrafts = false;
  private readonly drafting: Drafting;
  private server: boolean;
  private roundTripS: number | undefined;
  // A verdict of the server: its tokens, its seconds, and its seconds without drafts.
  private pushedTokens = new MovingMean(SLOW_DECAY);
  private pushedS = new MovingMean();
  private ownS = new MovingMean();
  // A round of the device, real or hypothetical: its tokens, the seconds of its draft, and the rest of the server's.
  private readonly taken = new MovingMean(SLOW_DECAY);
  private readonly draftS = new MovingMean();
  private partS = new MovingMean();
  private rounds = 0; // since the last switch, real or hypothetical
  private expectedWaitS = 0; // of a round, without draft and drafted tokens
  private vain = 0; // drafts since one was used
  private readonly roundsPause = new Pause();
  private draftsPause = new Pause();

  /**
   * @param drafting `auto`, or the side that always drafts.
   * @param able whether the device can draft.
   */
  constructor(drafting: Drafting, able: boolean) {
    this.drafting = able || drafting === "device" ? drafting : "server";
    this.server = this.drafting !== "device";
  }

  /** Whether the server shall stream. */
  get atServer(): boolean {
    return this.server;
  }

  /** Whether the device shall draft while the server streams. */
  get wantsDraft(): boolean {
    const served = this.takesDrafts || !this.roundsPause.left;
    return this.server && this.drafting === "auto" && served && this.pushedTokens.known && !this.draftsPause.left;
  }

  /** The pace of streaming. */
  get pace(): Pace {
    return { tokens: this.pushedTokens.value, intervalS: this.pushedS.value, roundTripS: this.roundTripS ?? 0 };
  }

  /** Seconds that a round without a draft is expected to take while the server streams. */
  get roundS(): number {
    return (this.roundTripS ?? 0) + this.ownS.value;
  }

  /** Note a measured round trip, without the time that the server held the frame; return the present estimate. */
  noteRoundTrip(seconds: number): number {
    const latest = Math.max(0, seconds);
    const old = this.roundTripS;
    this.roundTripS = old === undefined ? latest : Math.min(latest, old + 0.2 * (latest - old));
    return this.roundTripS;
  }

  /**
   * Note a pushed verdict.
   *
   * @param tokens its committed tokens.
   * @param seconds since the verdict before.
   * @param sparedS seconds of it that drafts took.
   * @param used whether tokens of an unsolicited draft were accepted.
   */
  pushed(tokens: number, seconds: number, sparedS: number, used: boolean): void {
    this.pushedTokens.add(tokens);
    this.pushedS.add(seconds);
    this.ownS.add(Math.max(0, seconds - sparedS));
    this.roundsPause.passBy(tokens);
    this.draftsPause.passBy(tokens);
    if (used) {
      this.vain = 0;
      this.draftsPause = new Pause();
    }
  }

  /** Note the round that a draft would have made while the server streams; `sparedS`: see {@link roundEnded}. */
  drafted(outcome: RoundEnded, sparedS: number): void {
    this.vain++;
    // A crowded server that leaves out unsolicited drafts would also leave out the tokens of rounds.
    const leftOut = this.takesDrafts && this.vain >= LEAST_ROUNDS;
    if (this.vain % UNUSED === 0) this.draftsPause.begin();
    if (this.roundTripS === undefined || !this.server) return;
    this.addRound(outcome, outcome.accepted + 1, sparedS, this.roundTripS);
    if (this.drafting !== "auto" || this.roundsPause.left || this.rounds < LEAST_ROUNDS || leftOut) return;
    if (this.roundRate(this.roundTripS) > this.margin * this.streamingRate) {
      this.switchTo(false);
      this.roundsPause.begin();
    }
  }

  /**
   * Note a round of the device that committed `tokens`.
   *
   * @param sparedS seconds of it that the server would have spared without the draft.
   */
  roundEnded(outcome: RoundEnded, tokens: number, sparedS: number): void {
    if (outcome.supplied || this.roundTripS === undefined || this.server) return;
    this.addRound(outcome, tokens, sparedS, this.roundTripS);
    this.roundsPause.passBy(tokens);
    if (this.drafting !== "auto" || !this.pushedTokens.known) return;
    const waitS = this.roundTripS + this.partS.value;
    const longer = waitS / Math.max(LEAST_S, this.expectedWaitS);
    this.expectedWaitS += DRIFT * (waitS - this.expectedWaitS);
    // On its own the server commits at least one token in each such part.
    const streaming = 1 / Math.max(LEAST_S, this.partS.value);
    if (streaming > this.margin * this.roundRate(this.roundTripS) || longer > LONGER * this.margin) {
      this.switchTo(true);
      this.roundsPause.begin();
    } else if (!this.roundsPause.left) {
      this.switchTo(true);
      this.pushedTokens = new MovingMean(SLOW_DECAY);
      this.pushedS = new MovingMean();
      this.ownS = new MovingMean();
    }
  }

  /** Lead that the other side needs. */
  private get margin(): number {
    return BETTER + DOUBT / this.rounds;
  }

  /** Return the tokens a second of rounds. */
  private roundRate(roundTripS: number): number {
    return this.taken.value / Math.max(LEAST_S, this.draftS.value + roundTripS + this.partS.value);
  }

  /** Tokens a second while the server streams. */
  private get streamingRate(): number {
    return this.pushedTokens.value / Math.max(LEAST_S, this.pushedS.value);
  }

  private addRound(outcome: RoundEnded, tokens: number, sparedS: number, roundTripS: number): void {
    this.rounds++;
    this.taken.add(tokens);
    this.draftS.add(outcome.draftS + sparedS);
    this.partS.add(Math.max(0, outcome.waitedS - roundTripS - sparedS));
  }

  private switchTo(server: boolean): void {
    this.server = server;
    this.rounds = 0;
    this.expectedWaitS = this.roundS;
    this.partS = new MovingMean();
  }
}

/** A pause that is counted in tokens, and becomes longer each time. */
class Pause {
  /** Tokens until it ends. */
  left = 0;
  private next = FIRST_PAUSE;

  begin(): void {
    this.left = this.next;
    this.next = Math.min(2 * this.next, LONGEST_PAUSE);
  }

  /** Note committed tokens. */
  passBy(tokens: number): void {
    this.left = Math.max(0, this.left - tokens);
  }
}

/** An exponentially weighted mean. */
class MovingMean {
  private count = 0;
  private sum = 0;

  /** @param decay weight of a figure by that of the next one. */
  constructor(private readonly decay = FAST_DECAY) {}

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
