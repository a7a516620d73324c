/** What time tells of a link: late verdicts, outages, frames to be sent again. Without a clock of its own. */

import type { LoopSettings } from "./settings.js";

/** Memory rows that follow a verdict are waited for so long, seconds, before a draft goes without. */
const ROWS_PATIENCE_S = 0.25;
/** Frames that are still to be echoed are remembered, so many of them. */
const STAMPS = 32;

/** What has come to pass: the verdict is late, the link is down for good, what is in flight is to be sent again. */
export type Alarm = "late" | "outage" | "resend";

/**
 * Told what happens on the link and when, in seconds of any monotonic clock.
 *
 * | alarm | begins | ends |
 * | --- | --- | --- |
 * | `late` | so long after a frame was sent | with its verdict, or with the link |
 * | `outage` | so long after the link went down | with a Welcome |
 * | `resend` | when the server said | at once, or with the link |
 */
export class LinkWatch {
  /** Whether this has begun and not ended. */
  late = false;
  /** The same. A link that never was up is an outage. */
  outage = true;
  private sentAt: number | undefined;
  private patience = Infinity;
  private downSince: number | undefined;
  private resendAt: number | undefined;
  private rowsBy: number | undefined;
  private readonly stamps = new Map<number, number>(); // when the frames with these were sent

  constructor(private readonly settings: LoopSettings) {}

  /** Frames with stamps up to the `newest` were sent. */
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

  /** Seconds that this frame and its answer took on the link; undefined where it was not sent on this one. */
  echoed(stamp: number, heldS: number, now: number): number | undefined {
    const sent = this.stamps.get(stamp);
    this.stamps.delete(stamp);
    return sent === undefined ? undefined : Math.max(0, now - sent - heldS);
  }

  /** Memory rows follow the verdict that came. */
  awaitRows(now: number): void {
    this.rowsBy = now + ROWS_PATIENCE_S;
  }

  /** Whether to wait for them still. */
  rowsMayCome(now: number): boolean {
    return this.rowsBy !== undefined && now < this.rowsBy;
  }

  /** A frame that will be answered was sent; `prefill`: a prompt. */
  sent(now: number, prefill: boolean): void {
    this.sentAt = now;
    this.patience = prefill ? this.settings.prefillLateAfterS : this.settings.lateAfterS;
  }

  /** It was. Returns seconds since it was sent. */
  answered(now: number): number {
    const waitedS = this.sentAt === undefined ? 0 : now - this.sentAt;
    this.idle();
    return waitedS;
  }

  /** No answer is awaited. */
  idle(): void {
    this.sentAt = undefined;
    this.late = false;
  }

  /** What is in flight is to be sent again, not earlier than `at`. */
  resend(at: number): void {
    this.resendAt = at;
  }

  /** The link is up. */
  up(): void {
    this.outage = false;
    this.downSince = undefined;
  }

  /** The link is down, since `now` if it was not before; `onPurpose`: an outage from the first moment on. */
  down(now: number, onPurpose = false): void {
    if (onPurpose) this.downSince = -Infinity;
    else if (this.downSince === undefined && !this.outage) this.downSince = now;
    this.resendAt = this.rowsBy = undefined;
    this.stamps.clear();
    this.idle();
  }

  /** When the next alarm begins, or rows are no longer waited for; null for never. */
  wakeAt(now: number): number | null {
    const times = this.alarms()
      .map(([, at]) => at)
      .filter((at) => at < Infinity);
    if (this.rowsBy !== undefined && now < this.rowsBy) times.push(this.rowsBy);
    return times.length ? Math.min(...times) : null;
  }

  /** Alarms that begin now. */
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
