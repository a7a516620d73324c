/** The program around a chat: a clock, timers, sockets. */

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

/** The answer to a request. */
export interface Answered {
  /** HTTP status; 0 if the browser hides it. */
  readonly status: number;
  /** Whether it was a redirect, which is not followed. */
  readonly elsewhere: boolean;
}

/**
 * The program's clock, timers and sockets. `browserHost`, `nodeHost` and `NativeBridge` are hosts; `webHost` makes others from the
 * Web's APIs. Graphs are handed in as drafters ({@link Graph}), the place of the chat as a {@link ChatStore}, and the files of a
 * bundle as {@link BundleFiles}.
 */
export interface Host {
  /** Seconds of a clock that only goes forward. */
  now(): number;

  /** Run `action` after `seconds`, or later if timers are throttled; return a function that cancels it. */
  later(seconds: number, action: () => void): () => void;

  /** Let waiting events of the program run: frames, user input, rendering. */
  turn(): Promise<void>;

  /**
   * Begin to open a WebSocket; its events come after this call.
   *
   * @param protocols subprotocols to offer.
   * @throws Error the platform refuses the address.
   */
  connect(address: string, protocols: string[]): Socket;

  /**
   * Make a GET request, to find out why a socket could not be opened.
   *
   * @param readable whether the answer is to be read, which needs the server's permission in a browser; else only whether there
   *   is an answer is known.
   * @returns undefined if there is no answer within `seconds`, or the platform hides it.
   */
  ask(url: string, token: string, readable: boolean, seconds: number): Promise<Answered | undefined>;

  /** The page's origin, which the browser sends to servers; undefined without a page. */
  readonly origin: string | undefined;
}
