/** Timers of a link: late verdicts, outages, frames to send again. The host passes the time in. */

import type { LoopSettings } from "./settings.js";

/** Seconds that a draft waits for the memory rows that follow a verdict, before it is made without them. */
const ROWS_PATIENCE_S = 0.25;
/** Sent frames whose times are remembered until the server echoes their stamps. */
const STAMPS = 32;

/** A timer that has run out: the verdict is late, the link is down for good, what is in flight has to be sent again. */
export type Alarm = "late" | "outage" | "resend";

/**
 * Keep the timers of one link. Times are in seconds of any monotonic clock.
 *
 * | alarm | begins | ends |
 * | --- | --- | --- |
 * | `late` | a while after a frame was sent | with its verdict, or with the link |
 * | `outage` | a while after the link went down | with a Welcome |
 * | `resend` | at the time that the server asked for | at once, or with the link |
 */
export class Timeouts {
  /** Whether this alarm has begun and not ended. */
  late = false;
  /** The same. A link that was never up is an outage. */
  outage = true;
  private sentAt: number | undefined;
  private patience = Infinity;
  private downSince: number | undefined;
  private resendAt: number | undefined;
  private rowsBy: number | undefined;
  private readonly stamps = new Map<number, number>(); // by stamp: when its frame was sent

  constructor(private readonly settings: LoopSettings) {}

  /** Note that frames with stamps up to `newest` were sent. */
  stamped(newest: number, now: number): void {
    if (this.stamps.has(newest)) return;
    const known = [...this.stamps.keys()].at(-1) ?? newest - 1;
    const all = 0 < newest - known && newest - known <= STAMPS;
    for (let stamp = all ? known + 1 : newest; stamp <= newest; stamp++) this.stamps.set(stamp, now);
    for (const oldest of this.stamps.keys()) {
      if (this.stamps.size <= STAMPS) break;
      this.stamps.delete(oldest);
    }
  }

  /**
   * Return the round trip in seconds that an echoed stamp shows; undefined if it was not sent on this connection.
   *
   * @param heldS seconds for which the server held the frame before it answered.
   */
  echoed(stamp: number, heldS: number, now: number): number | undefined {
    const sent = this.stamps.get(stamp);
    this.stamps.delete(stamp);
    return sent === undefined ? undefined : Math.max(0, now - sent - heldS);
  }

  /** Note that memory rows follow the verdict that arrived. */
  awaitRows(now: number): void {
    this.rowsBy = now + ROWS_PATIENCE_S;
  }

  /** Return whether a draft should still wait for memory rows. */
  rowsMayCome(now: number): boolean {
    return this.rowsBy !== undefined && now < this.rowsBy;
  }

  /** Whether an answer is awaited. */
  get waiting(): boolean {
    return this.sentAt !== undefined;
  }

  /** Note that a frame was sent that will be answered; `prefill` if it is a prompt. */
  sent(now: number, prefill: boolean): void {
    this.sentAt = now;
    this.patience = prefill ? this.settings.prefillLateAfterS : this.settings.lateAfterS;
  }

  /** Note that the outstanding frame was answered; return its latency in seconds. */
  answered(now: number): number {
    const waitedS = this.sentAt === undefined ? 0 : Math.max(0, now - this.sentAt); // it may have arrived before
    this.idle();
    return waitedS;
  }

  /** Note that no answer is awaited. */
  idle(): void {
    this.sentAt = undefined;
    this.late = false;
  }

  /** Have the outstanding frame sent again, not earlier than `at`. */
  resend(at: number): void {
    this.resendAt = at;
  }

  /** Note that the link is up. */
  up(): void {
    this.outage = false;
    this.downSince = undefined;
  }

  /** Note that the link is down, since `now` if it was up; `onPurpose` begins the outage at once. */
  down(now: number, onPurpose = false): void {
    if (onPurpose) this.downSince = -Infinity;
    else if (this.downSince === undefined && !this.outage) this.downSince = now;
    this.resendAt = this.rowsBy = undefined;
    this.stamps.clear();
    this.idle();
  }

  /** Return when the next alarm begins, or the patience for rows ends; null for never. */
  wakeAt(now: number): number | null {
    const times = this.alarms()
      .map(([, at]) => at)
      .filter((at) => at < Infinity);
    if (this.rowsBy !== undefined && now < this.rowsBy) times.push(this.rowsBy);
    return times.length ? Math.min(...times) : null;
  }

  /** Return the alarms that begin now. */
  passed(now: number): Alarm[] {
    const begun = this.alarms()
      .filter(([, at]) => at <= now)
      .map(([alarm]) => alarm);
    if (begun.includes("late")) this.late = true;
    if (begun.includes("outage")) {
      this.outage = true;
      this.downSince = undefined;
    }
    if (begun.includes("resend")) this.resendAt = undefined;
    return begun;
  }

  private alarms(): [Alarm, number][] {
    const { sentAt, downSince, resendAt } = this;
    return [
      ["late", sentAt === undefined || this.late ? Infinity : sentAt + this.patience],
      ["outage", downSince === undefined || this.outage ? Infinity : downSince + this.settings.outageAfterS],
      ["resend", resendAt ?? Infinity],
    ];
  }
}
