/** Whether the other end of a connection still lives, found out where no WebSocket ping can be sent, as in a page. */

import { create, toBinary } from "@bufbuild/protobuf";

import { ClientMessageSchema } from "../wire/moa/v1/session_pb.js";
import type { Host } from "./host.js";
import type { Timing } from "./timing.js";

/** What the verifier answers at once, whatever else it does. Without a stamp, which is the session's. */
export const PING = toBinary(ClientMessageSchema, create(ClientMessageSchema, { event: { case: "ping", value: {} } }));

/**
 * Asks for a sign of life where none came for a while. A page that was frozen, or whose timers were held back, has not
 * listened: it asks once more.
 */
export class Pinger {
  private heardAt = 0;
  private askedAt: number | undefined; // and nothing was heard since
  private stopTimer = (): void => undefined;
  private running = false;

  /**
   * @param ask send a ping.
   * @param silent nothing came.
   */
  constructor(
    private readonly host: Host,
    private readonly timing: Timing,
    private readonly ask: () => void,
    private readonly silent: () => void,
  ) {}

  /** Begin, or go on; the first sign of life is asked for at once where nothing was heard lately. */
  start(): void {
    if (this.running) return;
    this.running = true;
    this.askedAt = undefined;
    this.look();
  }

  /** Ask no more for now. */
  stop(): void {
    this.running = false;
    this.stopTimer();
  }

  /** A frame came. */
  heard(): void {
    this.heardAt = this.host.now();
    this.askedAt = undefined;
  }

  private look(): void {
    const { pingInterval } = this.timing;
    const now = this.host.now();
    if (now - this.heardAt >= pingInterval) this.askNow(now);
    else this.wake(this.heardAt + pingInterval - now, () => this.look());
  }

  private askNow(now: number): void {
    const { pingTimeout } = this.timing;
    this.askedAt = now;
    this.ask();
    this.wake(pingTimeout, () => {
      const waited = this.host.now() - now;
      if (this.askedAt === undefined) this.look();
      else if (waited < 2 * pingTimeout) this.silent();
      else this.askNow(this.host.now());
    });
  }

  private wake(seconds: number, action: () => void): void {
    this.stopTimer = this.host.later(seconds, action);
  }
}
