/** One WebSocket to the verifier, from its opening to its end. */

import { create, toBinary } from "@bufbuild/protobuf";

import type { Ending } from "./ending.js";
import { withSessionId, type Endpoint } from "./endpoint.js";
import { ConnectError } from "./errors.js";
import type { Answered, Host, Socket } from "./host.js";
import { encodeUtf8 } from "./utf8.js";
import { ClientMessageSchema } from "./wire/moa/v1/session_pb.js";

/** Limit of a received frame. The largest are memory rows, of some 300 kB. */
const MOST_FRAME_BYTES = 4 << 20;
const NORMAL = 1000;

/** Move whole frames both ways until the WebSocket of {@link openSocket} is over. */
export class Connection {
  /** Resolves with the reason when no more frames come. */
  readonly over: Promise<ConnectError>;
  private readonly pinger: Pinger;
  private readonly stopWaiting: () => void; // ends the timer of the Welcome
  private readonly closed: Promise<void>;
  private end!: (problem: ConnectError) => void;
  private welcome = false;
  private held = false;

  /**
   * @param received called with each frame.
   * @param sent called with the bytes of each frame.
   */
  constructor(
    private readonly socket: Socket,
    address: string,
    private readonly host: Host,
    timing: Timing,
    private readonly received: (frame: Uint8Array) => void,
    private readonly sent: (bytes: number) => void,
  ) {
    const { welcomeTimeout } = timing;
    this.over = new Promise((resolve) => (this.end = resolve));
    this.closed = new Promise((resolve) => (socket.onclose = () => resolve()));
    void this.closed.then(() => this.fail("the connection was closed"));
    socket.onmessage = ({ data }) => this.take(data);
    this.pinger = new Pinger(
      host,
      timing,
      () => this.send(PING),
      () => this.fail(`nothing came from ${address} for a while`),
    );
    const unwelcome = `${address} has not answered the Hello within ${welcomeTimeout} s: is it a moa-edge verifier?`;
    this.stopWaiting = host.later(welcomeTimeout, () => this.fail(unwelcome));
  }

  /** Send a frame, without waiting; it may be lost if the connection ends. */
  send(frame: Uint8Array): void {
    this.sent(frame.length);
    try {
      this.socket.send(frame);
    } catch {
      // The socket reports its end by itself, after the frames that it has received: a last verdict, or why it was closed.
    }
  }

  /** Note that the verifier has answered the Hello. */
  welcomed(): void {
    this.stopWaiting();
    this.welcome = true;
    this.listen();
  }

  /** Set whether to send no pings for now, so that the verifier may close the silent connection. */
  hold(held: boolean): void {
    this.held = held;
    this.listen();
  }

  /** End the connection with this reason; take no more frames. */
  fail(why: string): void {
    this.pinger.stop();
    this.stopWaiting();
    this.socket.onmessage = null;
    this.end(new ConnectError(why, false));
  }

  /** Close it, and wait at most `withinS` seconds for the other end to close. */
  async close(withinS: number): Promise<void> {
    this.fail("the connection was closed");
    this.socket.close(NORMAL);
    let late = (): void => undefined;
    const stop = this.host.later(withinS, () => late());
    await Promise.race([this.closed, new Promise<void>((resolve) => (late = resolve))]);
    stop();
  }

  private listen(): void {
    if (this.welcome && !this.held) this.pinger.start();
    else this.pinger.stop();
  }

  private take(data: unknown): void {
    this.pinger.heard();
    const bytes = data instanceof ArrayBuffer ? new Uint8Array(data) : data;
    const frame = bytes instanceof Uint8Array ? bytes : encodeUtf8(String(bytes));
    if (frame.length > MOST_FRAME_BYTES) this.fail(`the verifier sent a frame of ${frame.length} bytes`);
    else this.received(frame);
  }
}

/**
 * Return an open WebSocket; undefined if the end comes first.
 *
 * @throws ConnectError it cannot be made.
 */
export async function openSocket(
  endpoint: Endpoint,
  sessionId: string,
  host: Host,
  timing: Timing,
  ending: Ending,
): Promise<Socket | undefined> {
  const { openTimeout } = timing;
  let socket: Socket;
  try {
    socket = host.connect(withSessionId(endpoint.address, sessionId), endpoint.protocols);
  } catch {
    throw await connectError(endpoint, host, openTimeout); // for example in a page that came over https
  }
  socket.binaryType = "arraybuffer";
  socket.onerror = () => undefined; // the close after it says as much
  let tell = (_: "open" | "closed" | "late"): void => undefined;
  const told = new Promise<"open" | "closed" | "late">((resolve) => (tell = resolve));
  socket.onopen = () => tell("open");
  socket.onclose = () => tell("closed");
  const stop = host.later(openTimeout, () => tell("late"));
  const came = (await ending.before(told)) ? await told : undefined;
  stop();
  if (came === "open") return socket;
  socket.onopen = socket.onclose = null;
  socket.close();
  if (came === "late") throw tooLate(endpoint.address, openTimeout);
  if (came === "closed") throw await connectError(endpoint, host, openTimeout);
  return undefined;
}

/** A frame that the verifier answers at once, whatever else it does. It has no stamp: stamps belong to the session. */
export const PING = toBinary(ClientMessageSchema, create(ClientMessageSchema, { event: { case: "ping", value: {} } }));

/**
 * Ping the other end after a silence: a page cannot send the WebSocket's own pings. A page that was frozen, or whose timers were
 * throttled, may have missed the answer, so it asks once more.
 */
class Pinger {
  private heardAt = 0;
  private askedAt: number | undefined; // if nothing was received since
  private stopTimer = (): void => undefined;
  private running = false;

  /**
   * @param ask sends a ping.
   * @param silent called if nothing came.
   */
  constructor(
    private readonly host: Host,
    private readonly timing: Timing,
    private readonly ask: () => void,
    private readonly silent: () => void,
  ) {}

  /** Begin, or continue; ping at once if nothing was received lately. */
  start(): void {
    if (this.running) return;
    this.running = true;
    this.askedAt = undefined;
    this.look();
  }

  /** Send no more pings for now. */
  stop(): void {
    this.running = false;
    this.stopTimer();
  }

  /** Note that a frame was received. */
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

/**
 * Timeouts of a link, in seconds. A link is given up if nothing is received for `pingInterval + pingTimeout`, or no Welcome within
 * `welcomeTimeout`. The delay before an attempt to connect doubles from `firstBackoff` to `longestBackoff`, until a connection has
 * lasted longer than that: a verifier that fails after each Hello is not asked hundreds of times.
 */
export interface Timing {
  readonly openTimeout: number;
  readonly welcomeTimeout: number;
  /** Silence after which the verifier is pinged. */
  readonly pingInterval: number;
  readonly pingTimeout: number;
  readonly firstBackoff: number;
  readonly longestBackoff: number;
}

export const USUAL_TIMING: Timing = {
  openTimeout: 5,
  welcomeTimeout: 20,
  pingInterval: 4,
  pingTimeout: 4,
  firstBackoff: 0.25,
  longestBackoff: 4,
};

/**
 * Return why a WebSocket could not be made. The WebSocket API gives no reason, so the verifier is asked by HTTP.
 *
 * @param withinS seconds that each request may take.
 */
export async function connectError(endpoint: Endpoint, host: Host, withinS: number): Promise<ConnectError> {
  const { address, onThisMachine } = endpoint;
  const { origin } = host;
  if (origin?.startsWith("https:") && address.startsWith("ws:") && !onThisMachine) {
    const text = `a page that came over https may connect by wss:// only, not to ${address}`;
    return new ConnectError(`${text}: start moa-serve with --tls-cert and --tls-key, and use wss://`, true);
  }
  const answered = await host.ask(endpoint.at("/v1/status"), endpoint.token, true, withinS);
  if (answered) return refused(endpoint, answered);
  // Not final: a proxy whose verifier is just starting looks the same from a page.
  if (origin !== undefined && (await host.ask(endpoint.at("/healthz"), "", false, withinS))) {
    const text = `what answers at ${address} does not let web pages of ${origin} connect`;
    return new ConnectError(`${text}: start moa-serve with --allow-origin ${origin}`, false);
  }
  const trusted = `; if one runs there, open ${endpoint.at("/healthz")} to see whether its certificate is trusted`;
  const hint = address.startsWith("wss:") ? trusted : "";
  return new ConnectError(`no verifier answers at ${address}; start one with moa-serve${hint}`, false);
}

function refused(endpoint: Endpoint, { elsewhere, status }: Answered): ConnectError {
  const { address } = endpoint;
  const refusal = endpoint.refusal(status);
  if (refusal) return new ConnectError(refusal, true);
  if (elsewhere) {
    const text = `${address} sends its clients elsewhere, which is not followed`;
    return new ConnectError(`${text}: name the verifier's own address`, true);
  }
  if (status === 503) return new ConnectError(`the verifier at ${address} is full or shutting down`, false);
  if (status === 200) {
    const text = `what answers at ${address} takes requests, but no WebSocket`;
    return new ConnectError(`${text}: a proxy between may have to let it through`, false);
  }
  const final = status >= 400 && status < 500 && status !== 408 && status !== 429;
  return new ConnectError(endpoint.unexpected(status), final);
}

/** Return the error for an attempt to connect that took too long. */
function tooLate(address: string, withinS: number): ConnectError {
  return new ConnectError(`nothing answers at ${address} within ${withinS} s: a verifier may still be starting`, false);
}
