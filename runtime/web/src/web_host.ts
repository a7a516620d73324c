/** A host made of the Web's APIs, as browsers, Node and React Native have them. */

import type { Answered, Host, Socket } from "./host.js";

/** The constructor of the WebSocket API. */
export type SocketClass = new (address: string, protocols: string[]) => object;

/** The parts in which platforms differ. */
export interface Platform {
  readonly WebSocket: SocketClass;
  /** See {@link Host.turn}. */
  turn(): Promise<void>;
  /** See {@link Host.origin}. */
  readonly origin?: string | undefined;
}

/** Globals of all of them; the sources are compiled without the types of any. */
interface Globals {
  readonly performance: { now(): number };
  readonly setTimeout: (action: () => void, milliseconds: number) => unknown;
  readonly clearTimeout: (timer: unknown) => void;
  readonly fetch: (url: string, options: object) => Promise<{ readonly status: number; readonly type: string }>;
  readonly AbortController: new () => { readonly signal: object; abort(): void };
}

const globals = globalThis as unknown as Globals;
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** Return a host with the platform's timers, `fetch` and WebSocket. */
export function webHost({ WebSocket, turn, origin }: Platform): Host {
  const connect = (address: string, protocols: string[]): Socket => new WebSocket(address, protocols) as Socket;
  return { now: () => globals.performance.now() / 1000, later, turn, connect, ask, origin };
}

/** See {@link Host.later}. */
export function later(seconds: number, action: () => void): () => void {
  const timer = globals.setTimeout(action, Math.min(1000 * seconds, LONGEST_TIMER_MS));
  return () => globals.clearTimeout(timer);
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
