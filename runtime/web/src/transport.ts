/** The link to the verifier: connects, reconnects, and moves whole frames both ways. */

import { Connection, openSocket, type Timing } from "./connection.js";
import { Ending } from "./ending.js";
import type { Endpoint } from "./endpoint.js";
import { ConnectError } from "./errors.js";
import type { Host, Socket } from "./host.js";

/** Seconds for the other end to close. */
const CLOSE_TIMEOUT = 1;
/**
 * Limit of received bytes that are not processed yet, for example while the device drafts. Reading from a WebSocket cannot be
 * paused, so beyond the limit it is closed; the next connection continues after the processed frames.
 */
const MOST_WAITING_BYTES = 16 << 20;

/** Handlers of events on the link, called in order. */
export interface TransportHandlers {
  /** No connection is attempted for now, see {@link Transport.hold}. */
  held(): void;
  connecting(): void;
  opened(): void;
  frame(data: Uint8Array): void;
  /** `retryInS`: seconds until the next attempt to connect; null if there will be none. */
  closed(problem: ConnectError, retryInS: number | null): void;
}

/** Keep one connection after the other open, while {@link run} runs. */
export class Transport {
  /** Payload bytes sent and received so far. */
  bytesUp = 0;
  bytesDown = 0;
  private connection: Connection | undefined;
  private wanted = true;
  private want = new Ending(); // ends a period in which no connection is wanted
  private waiting = 0; // bytes that are not processed yet
  private closeTimeout = CLOSE_TIMEOUT;

  /** @param sessionId of the conversation, for proxies. */
  constructor(
    private readonly endpoint: Endpoint,
    private readonly sessionId: string,
    private readonly handlers: TransportHandlers,
    private readonly timing: Timing,
    private readonly host: Host,
  ) {}

  /** Send a frame, without waiting; it is dropped if no connection is open. */
  send(frame: Uint8Array): void {
    this.connection?.send(frame);
  }

  /** Note that the verifier has answered the Hello. */
  welcomed(): void {
    this.connection?.welcomed();
  }

  /** Note that a frame has been processed. */
  processed(frame: Uint8Array): void {
    this.waiting -= frame.length;
  }

  /** Set whether to make no new connection for now; an open one stays, but is not kept alive. */
  hold(held: boolean): void {
    if (held && this.wanted) this.want = new Ending();
    else if (!held) this.want.end();
    this.wanted = !held;
    this.connection?.hold(held);
  }

  /** Have {@link run}, when it ends next, not wait for the other end, which may be unreachable. */
  drop(): void {
    if (this.connection) this.closeTimeout = 0;
  }

  /** Keep a connection open until the end. Return earlier only after a refusal that trying again cannot mend. */
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
        const opened = this.host.now();
        problem = await this.pump(socket, ending);
        if (this.host.now() - opened > longestBackoff) backoff = firstBackoff;
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

  /** Move frames until the connection is over; return the reason, undefined for the end. */
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
