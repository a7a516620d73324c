/** The WebSocket to the verifier: connects, reconnects, and moves whole frames both ways. */

import { ConnectError } from "./connect_error.js";
import { Connection, openSocket } from "./connection.js";
import { Ending } from "./ending.js";
import type { Endpoint } from "./endpoint.js";
import type { Host, Socket } from "./host.js";
import type { Timing } from "./timing.js";

/** Seconds that the other end has to close. */
const CLOSE_TIMEOUT = 1;
/**
 * Of frames that nobody has taken up yet, as while the device drafts. A WebSocket cannot be told to read no more: one on
 * which more comes is closed, and the next one goes on behind what was taken up.
 */
const MOST_WAITING_BYTES = 16 << 20;

/** Called in the order of what happens on the link. */
export interface TransportHandlers {
  /** No attempt is made for now, see {@link Transport.hold}. */
  held(): void;
  connecting(): void;
  opened(): void;
  frame(data: Uint8Array): void;
  /** `retryInS`: until the next attempt to connect; null when there will be none. */
  closed(problem: ConnectError, retryInS: number | null): void;
}

/** One connection after the other, while {@link run} runs. */
export class Transport {
  /** Payload sent and received so far. */
  bytesUp = 0;
  bytesDown = 0;
  private connection: Connection | undefined;
  private wanted = true;
  private want = new Ending(); // of a time in which no connection is wanted
  private waiting = 0; // bytes that were not taken up
  private closeTimeout = CLOSE_TIMEOUT;

  /** @param sessionId of the conversation, for proxies. */
  constructor(
    private readonly endpoint: Endpoint,
    private readonly sessionId: string,
    private readonly handlers: TransportHandlers,
    private readonly timing: Timing,
    private readonly host: Host,
  ) {}

  /** Send a frame on the open connection, without waiting; without one it is dropped. */
  send(frame: Uint8Array): void {
    this.connection?.send(frame);
  }

  /** The verifier has answered the Hello of the connection that stands. */
  welcomed(): void {
    this.connection?.welcomed();
  }

  /** Whoever got the frame is done with it. */
  takenUp(frame: Uint8Array): void {
    this.waiting -= frame.length;
  }

  /** Whether to make no new connection for now; one that stands stays, and is not kept from falling silent. */
  hold(held: boolean): void {
    if (held && this.wanted) this.want = new Ending();
    else if (!held) this.want.end();
    this.wanted = !held;
    this.connection?.hold(held);
  }

  /** Have {@link run}, when it is ended next, not wait for the other end, which may be out of reach. */
  drop(): void {
    if (this.connection) this.closeTimeout = 0;
  }

  /** Keep a connection open until the end. Returns before it only after a refusal that trying again cannot mend. */
  async run(ending: Ending): Promise<void> {
    const { firstBackoff, longestBackoff } = this.timing;
    let backoff = firstBackoff;
    while (!ending.ended) {
      if (!this.wanted) {
        this.handlers.held();
        if (!(await ending.before(this.want.come()))) return;
      }
      this.handlers.connecting();
      let problem: ConnectError | undefined;
      try {
        const socket = await openSocket(this.endpoint, this.sessionId, this.host, this.timing, ending);
        if (!socket) return;
        backoff = firstBackoff;
        problem = await this.pump(socket, ending);
      } catch (error) {
        if (!(error instanceof ConnectError)) throw error;
        problem = error;
      }
      if (!problem || ending.ended) return;
      this.handlers.closed(problem, problem.final ? null : backoff);
      if (problem.final || !(await ending.sleep(this.host, backoff))) return;
      backoff = Math.min(2 * backoff, longestBackoff);
    }
  }

  /** Move frames until the connection is over; says why it is, undefined for the end. */
  private async pump(socket: Socket, ending: Ending): Promise<ConnectError | undefined> {
    const { endpoint, host, timing } = this;
    const received = (frame: Uint8Array): void => this.received(frame);
    const connection = new Connection(socket, endpoint.address, host, timing, received, (bytes) => (this.bytesUp += bytes));
    this.connection = connection;
    this.closeTimeout = CLOSE_TIMEOUT;
    connection.hold(!this.wanted);
    this.handlers.opened();
    const over = await ending.before(connection.over);
    this.connection = undefined;
    await connection.close(over ? 0 : this.closeTimeout);
    return over ? connection.over : undefined;
  }

  private received(frame: Uint8Array): void {
    this.bytesDown += frame.length;
    this.waiting += frame.length;
    this.handlers.frame(frame);
    if (this.waiting > MOST_WAITING_BYTES) this.connection?.fail("frames came faster than this device takes them up");
  }
}
