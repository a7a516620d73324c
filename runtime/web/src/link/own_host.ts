/** The clock, the timers and the sockets of a browser, a worker or Node. */

import { MoaError } from "../errors.js";
import type { Answered, Host, SocketClass } from "./host.js";

/** What they all have, but for the marked; the sources are compiled without the types of either. */
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
 * The program's own.
 *
 * @param given a class of the WebSocket API in the place of the global one, which Node has from 22 on: that of the package
 *   `ws`, for example.
 * @throws MoaError there is neither.
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

/** Not by timers, which browsers hold back where nobody looks. */
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
  // Where the answer may not be read, a browser follows redirects or fails.
  const how = readable ? { mode: "cors", redirect: "manual" } : { mode: "no-cors" };
  // No header takes other characters; a verifier that has a token refuses who names none, too.
  const headers = token && readable && /^[ -~]*$/.test(token) ? { Authorization: `Bearer ${token}` } : {};
  // Node's fetch may never tell of a connection that breaks at once, and Node does not wait for AbortSignal.timeout: it ends.
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
    patience.abort(); // nobody reads the body
  }
}
