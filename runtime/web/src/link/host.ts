/** What a chat needs of the program around it: a clock, timers, sockets. */

/** A WebSocket, as far as it is used. */
export interface Socket {
  binaryType: string;
  onopen: (() => void) | null;
  onmessage: ((message: { readonly data: unknown }) => void) | null;
  /** Told last; without an opening before it, the connection could not be made. */
  onclose: (() => void) | null;
  /** Why, a browser tells nobody. */
  onerror: (() => void) | null;
  send(frame: Uint8Array): void;
  close(code?: number): void;
}

/** The constructor of the WebSocket API. */
export type SocketClass = new (address: string, protocols: string[]) => Socket;

/** What a request was answered with. */
export interface Answered {
  /** Of HTTP; 0 where the browser does not say. */
  readonly status: number;
  /** Whether it was a redirect, which is not followed. */
  readonly elsewhere: boolean;
}

/** `ownHost` makes that of a browser, a worker or Node. */
export interface Host {
  /** Seconds of a clock that only goes forward. */
  now(): number;

  /** Do something in so many seconds, or later where timers are held back; returns what takes it back. */
  later(seconds: number, action: () => void): () => void;

  /** Let the program do what waits: frames that came, what users do, what is to be drawn. */
  turn(): Promise<void>;

  readonly WebSocket: SocketClass;

  /**
   * Make a GET request.
   *
   * @param readable whether the answer is to be read, which a browser allows where the server does; else it only says
   *   whether anybody answers.
   * @returns undefined where nobody answers within so many seconds, or the browser does not say what.
   */
  ask(url: string, token: string, readable: boolean, seconds: number): Promise<Answered | undefined>;

  /** The origin that the browser tells servers; undefined where there is no page. */
  readonly origin: string | undefined;
}
