/** One WebSocket to the verifier, from its opening to its end. */

import { encodeUtf8 } from "../utf8.js";
import { ConnectError, connectError, tooLate } from "./connect_error.js";
import type { Ending } from "./ending.js";
import type { Endpoint } from "./endpoint.js";
import type { Host, Socket } from "./host.js";
import { PING, Pinger } from "./pinger.js";
import { withSessionId } from "./session_id.js";
import type { Timing } from "./timing.js";

/** Of a frame that the verifier may send; memory rows are the largest, and come in some 300 kB. */
const MOST_FRAME_BYTES = 4 << 20;
const NORMAL = 1000;

/** Moves whole frames both ways until it is over. Made by {@link openConnection}. */
export class Connection {
  /** Done when no more frames come, with the reason. */
  readonly over: Promise<ConnectError>;
  private readonly pinger: Pinger;
  private readonly stopWaiting: () => void; // for the Welcome
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

  /** Send a frame, without waiting; what has not left when the connection ends is lost. */
  send(frame: Uint8Array): void {
    this.sent(frame.length);
    try {
      this.socket.send(frame);
    } catch {
      // The socket tells of its end by itself, after what it has received: a last verdict, or why it was closed.
    }
  }

  /** The verifier has answered the Hello. */
  welcomed(): void {
    this.stopWaiting();
    this.welcome = true;
    this.listen();
  }

  /** Whether to ask for no sign of life for now, so that the verifier may close what is silent. */
  hold(held: boolean): void {
    this.held = held;
    this.listen();
  }

  /** Take no more frames. */
  fail(why: string): void {
    this.pinger.stop();
    this.stopWaiting();
    this.socket.onmessage = null;
    this.end(new ConnectError(why, false));
  }

  /** Close it, and wait for the other end to do so too, at most so many seconds. */
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
    const frame = data instanceof ArrayBuffer ? new Uint8Array(data) : encodeUtf8(String(data));
    if (frame.length > MOST_FRAME_BYTES) this.fail(`the verifier sent a frame of ${frame.length} bytes`);
    else this.received(frame);
  }
}

/**
 * The WebSocket, once it stands; undefined where the end comes first.
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
    socket = new host.WebSocket(withSessionId(endpoint.address, sessionId), endpoint.protocols);
  } catch {
    throw await connectError(endpoint, host, openTimeout); // as of a page that came over https
  }
  socket.binaryType = "arraybuffer";
  socket.onerror = () => undefined; // the close behind it says as much
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
