/** The program around a chat: a clock, timers, sockets. */

import { MoaError } from "./errors.js";

/** The parts of a WebSocket that are used. */
export interface Socket {
  binaryType: string;
  onopen: (() => void) | null;
  onmessage: ((message: { readonly data: unknown }) => void) | null;
  /** Called last; without `onopen` before it, the connection could not be made. */
  onclose: (() => void) | null;
  /** A browser gives no reason. */
  onerror: (() => void) | null;
  send(frame: Uint8Array): void;
  close(code?: number): void;
}

/** The constructor of the WebSocket API. */
export type SocketClass = new (address: string, protocols: string[]) => Socket;

/** The answer to a request. */
export interface Answered {
  /** HTTP status; 0 if the browser hides it. */
  readonly status: number;
  /** Whether it was a redirect, which is not followed. */
  readonly elsewhere: boolean;
}

/** The program's clock, timers and sockets. `ownHost` makes that of a browser, a worker or Node. */
export interface Host {
  /** Seconds of a clock that only goes forward. */
  now(): number;

  /** Run `action` after `seconds`, or later if timers are throttled; return a function that cancels it. */
  later(seconds: number, action: () => void): () => void;

  /** Let waiting events of the program run: frames, user input, rendering. */
  turn(): Promise<void>;

  readonly WebSocket: SocketClass;

  /**
   * Make a GET request.
   *
   * @param readable whether the answer is to be read, which needs the server's permission in a browser; else only whether there
   *   is an answer is known.
   * @returns undefined if there is no answer within `seconds`, or the browser hides it.
   */
  ask(url: string, token: string, readable: boolean, seconds: number): Promise<Answered | undefined>;

  /** The page's origin, which the browser sends to servers; undefined without a page. */
  readonly origin: string | undefined;
}

/** Globals of browsers, workers and Node; the sources are compiled without the types of any. */
interface Globals {
  readonly performance: { now(): number };
  readonly setTimeout: (action: () => void, milliseconds: number) => unknown;
  readonly clearTimeout: (timer: unknown) => void;
  readonly setImmediate?: (action: () => void) => unknown; // Node
  readonly MessageChannel: new () => { port1: { onmessage: unknown }; port2: { postMessage(message: unknown): void } };
  readonly WebSocket?: SocketClass;
  readonly fetch: (url: string, options: object) => Promise<{ readonly status: number; readonly type: string }>;
  readonly AbortController: new () => { readonly signal: object; abort(): void };
  readonly location?: { readonly origin: string }; // browsers and their workers
}

const globals = globalThis as unknown as Globals;
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/**
 * Return the host of this program.
 *
 * @param given a class of the WebSocket API in the place of the global one, which Node has from 22 on: that of the package
 *   `ws`, for example.
 * @throws MoaError there is no WebSocket class.
 */
export function ownHost(given?: new (address: string, protocols: string[]) => object): Host {
  const WebSocket = (given as SocketClass | undefined) ?? globals.WebSocket;
  if (!WebSocket) {
    throw new MoaError("this Node has no WebSocket of its own: hand in that of the package ws, ownHost(WebSocket), or use Node 22");
  }
  const origin = globals.location?.origin;
  return { now: () => globals.performance.now() / 1000, later, turn: newTurn(), WebSocket, ask, origin };
}

function later(seconds: number, action: () => void): () => void {
  const timer = globals.setTimeout(action, Math.min(1000 * seconds, LONGEST_TIMER_MS));
  return () => globals.clearTimeout(timer);
}

/** Return a `turn` without timers, which browsers throttle in hidden pages. */
function newTurn(): () => Promise<void> {
  const { MessageChannel, setImmediate } = globals;
  if (setImmediate) return () => new Promise((resolve) => setImmediate(() => resolve()));
  const { port1, port2 } = new MessageChannel();
  const waiting: (() => void)[] = [];
  port1.onmessage = () => waiting.shift()!();
  return () =>
    new Promise((resolve) => {
      waiting.push(resolve);
      port2.postMessage(null);
    });
}

async function ask(url: string, token: string, readable: boolean, seconds: number): Promise<Answered | undefined> {
  // If the answer may not be read, a browser follows redirects or fails.
  const how = readable ? { mode: "cors", redirect: "manual" } : { mode: "no-cors" };
  // A header takes no other characters; without the header a verifier with a token refuses the request as well.
  const headers = token && readable && /^[ -~]*$/.test(token) ? { Authorization: `Bearer ${token}` } : {};
  // Node's fetch may never report a connection that breaks at once, and a pending AbortSignal.timeout does not keep Node running.
  const patience = new globals.AbortController();
  const stop = later(seconds, () => patience.abort());
  const { signal } = patience;
  try {
    const answer = await globals.fetch(url, { ...how, headers, signal, cache: "no-store", credentials: "omit" });
    const redirected = answer.type === "opaqueredirect" || (answer.status >= 300 && answer.status < 400);
    return { status: answer.status, elsewhere: redirected };
  } catch {
    return undefined;
  } finally {
    stop();
    patience.abort(); // the body is not read
  }
}
