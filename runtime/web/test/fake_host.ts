/** A host whose clock jumps when nothing is left to do, and sockets whose other end is the test. */

import type { Answered, Host, Socket } from "../src/index.js";

interface Timer {
  readonly at: number;
  readonly action: () => void;
}

/** One WebSocket; what the client hears the test says. */
export class FakeSocket implements Socket {
  binaryType = "";
  onopen: (() => void) | null = null;
  onmessage: ((message: { readonly data: unknown }) => void) | null = null;
  onclose: (() => void) | null = null;
  onerror: (() => void) | null = null;
  /** Frames from the client, in order. */
  readonly sent: Uint8Array[] = [];
  /** Whether the client has closed it. */
  left = false;
  /** Told of each frame. */
  onsent: ((frame: Uint8Array) => void) | undefined;

  constructor(
    readonly address: string,
    readonly protocols: readonly string[],
  ) {}

  send(frame: Uint8Array): void {
    this.sent.push(frame);
    this.onsent?.(frame);
  }

  close(): void {
    this.left = true;
  }

  /** It stands. */
  opens(): void {
    this.onopen?.();
  }

  says(frame: Uint8Array | string): void {
    const data = typeof frame === "string" ? frame : frame.slice().buffer;
    this.onmessage?.({ data });
  }

  /** The other end, or the network, ends it. */
  dies(): void {
    this.onclose?.();
  }
}

export class FakeHost implements Host {
  readonly sockets: FakeSocket[] = [];
  /** What requests are answered with. */
  answer: (url: string, token: string, readable: boolean) => Answered | undefined = () => undefined;
  /** Told of each new socket, one turn later. */
  onsocket: ((socket: FakeSocket) => void) | undefined;
  private time = 1000;
  private timers: Timer[] = [];
  private turns: (() => void)[] = [];

  constructor(readonly origin: string | undefined = undefined) {}

  connect(address: string, protocols: string[]): Socket {
    const socket = new FakeSocket(address, protocols);
    this.sockets.push(socket);
    this.later(0, () => this.onsocket?.(socket));
    return socket;
  }

  /** The newest. */
  get socket(): FakeSocket {
    return this.sockets.at(-1)!;
  }

  now(): number {
    return this.time;
  }

  later(seconds: number, action: () => void): () => void {
    const timer = { at: this.time + seconds, action };
    this.timers.push(timer);
    return () => (this.timers = this.timers.filter((each) => each !== timer));
  }

  turn(): Promise<void> {
    return new Promise((resolve) => this.turns.push(resolve));
  }

  ask(url: string, token: string, readable: boolean): Promise<Answered | undefined> {
    return Promise.resolve(this.answer(url, token, readable));
  }

  /** The clock moves on, and all happens in between. */
  async pass(seconds: number): Promise<void> {
    const end = this.time + seconds;
    await this.settle();
    for (let next = this.due(end); next; next = this.due(end)) {
      this.time = Math.max(this.time, next.at);
      this.timers = this.timers.filter((each) => each !== next);
      next.action();
      await this.settle();
    }
    this.time = end;
  }

  /** The clock moves on, and nothing happens before its end: the page was frozen. */
  async freeze(seconds: number): Promise<void> {
    this.time += seconds;
    await this.pass(0);
  }

  /** All that needs no time. */
  async settle(): Promise<void> {
    for (;;) {
      await new Promise((resolve) => setImmediate(resolve));
      const turns = this.turns.splice(0);
      if (!turns.length) return;
      for (const turn of turns) turn();
    }
  }

  private due(end: number): Timer | undefined {
    return this.timers.filter(({ at }) => at <= end).sort((a, b) => a.at - b.at)[0];
  }
}
