/** The runtime's host, graphs, files and store, made of a native program's functions. */

import { EngineError, type Graph, type GraphCache, type KvShape, type StepInputs, type StepResult } from "../backends/base.js";
import type { BundleFiles } from "../bundle/download.js";
import { BundleError, specOf, type FileEntry, type TargetEntry } from "../bundle/manifest.js";
import type { Answered, Host, Socket } from "../host.js";
import type { KvArray } from "../session/memory_rows.js";
import type { TextStore } from "../text_chat_store.js";
import type { NativeHost } from "./native_host.js";

/** Bytes from the program. */
export type Given = Uint8Array | ArrayBuffer | Int8Array;

interface Waiting {
  readonly resolve: (value: unknown) => void;
  readonly reject: (error: Error) => void;
}

/** See `NativeHost`; `NativeCore` hands on what the program reports. */
export class NativeBridge implements Host, BundleFiles, TextStore {
  readonly origin = undefined;
  private numbers = 0; // the last number of a timer, socket or call
  private readonly timers = new Map<number, () => void>();
  private readonly sockets = new Map<number, NativeSocket>();
  private readonly calls = new Map<number, Waiting>();
  private readonly refused = new Map<string, number>(); // last HTTP status by host and port

  constructor(readonly native: NativeHost) {}

  // -- the host ----------------------------------------------------------------------------------

  now(): number {
    return this.native.now();
  }

  later(seconds: number, action: () => void): () => void {
    const timer = ++this.numbers;
    this.timers.set(timer, action);
    this.native.startTimer(timer, seconds);
    return () => {
      if (this.timers.delete(timer)) this.native.stopTimer(timer);
    };
  }

  turn(): Promise<void> {
    return new Promise((resolve) => this.later(0, resolve));
  }

  connect(address: string, protocols: string[]): Socket {
    const number = ++this.numbers;
    const close = (): void => {
      if (this.sockets.delete(number)) this.native.close(number);
    };
    const socket = new NativeSocket(address, (frame) => this.native.send(number, frame), close);
    this.sockets.set(number, socket);
    this.native.connect(number, address, protocols.join(","));
    return socket;
  }

  /** Return the status with which the server refused the last socket at this address; it was told with the socket's end. */
  async ask(url: string): Promise<Answered | undefined> {
    const status = this.refused.get(placeOf(url));
    return status ? { status, elsewhere: status >= 300 && status < 400 } : undefined;
  }

  fired(timer: number): void {
    const action = this.timers.get(timer);
    this.timers.delete(timer);
    action?.();
  }

  opened(number: number): void {
    this.sockets.get(number)?.onopen?.();
  }

  received(number: number, frame: Given): void {
    this.sockets.get(number)?.onmessage?.({ data: bytesOf(frame) });
  }

  closed(number: number, status: number): void {
    const socket = this.sockets.get(number);
    if (!socket) return;
    this.sockets.delete(number);
    this.refused.set(placeOf(socket.address), status);
    socket.onclose?.();
  }

  // -- calls -------------------------------------------------------------------------------------

  /** Call a function of the program that reports its outcome; return that. */
  call(begin: (call: number) => void): Promise<unknown> {
    return new Promise((resolve, reject) => {
      const call = ++this.numbers;
      this.calls.set(call, { resolve, reject });
      begin(call);
    });
  }

  answered(call: number, value: unknown): void {
    const waiting = this.calls.get(call);
    this.calls.delete(call);
    waiting?.resolve(value);
  }

  failed(call: number, reason: string): void {
    const waiting = this.calls.get(call);
    this.calls.delete(call);
    waiting?.reject(new Error(reason));
  }

  // -- files, texts and graphs -------------------------------------------------------------------

  /** See {@link BundleFiles}. The program checks what it downloads; here the size is compared. */
  async read(name: string, entry?: FileEntry): Promise<Uint8Array> {
    let bytes: Uint8Array;
    try {
      bytes = bytesOf((await this.call((call) => this.native.readFile(call, name))) as Given);
    } catch (error) {
      throw new BundleError(`the bundle's file ${name} cannot be read: ${(error as Error).message}`, { cause: error });
    }
    if (entry && bytes.length !== entry.bytes) {
      throw new BundleError(`the bundle's file ${name} has ${bytes.length} bytes, its manifest says ${entry.bytes}: copy it again`);
    }
    return bytes;
  }

  async get(key: string): Promise<string | null> {
    return ((await this.call((call) => this.native.readText(call, key))) as string | null | undefined) ?? null;
  }

  async set(key: string, text: string): Promise<void> {
    await this.call((call) => this.native.writeText(call, key, text));
  }

  /**
   * Load a graph.
   *
   * @throws EngineError the program cannot load it.
   */
  async load(entry: TargetEntry): Promise<Graph> {
    const { native } = this;
    try {
      const graph = (await this.call((call) => native.loadGraph(call, entry.file))) as number;
      const release = async (): Promise<void> => native.releaseGraph(graph);
      const [rowShape, maxPositions] = [rowShapeOf(entry), positionsOf(entry)];
      return { rowShape, maxPositions, open: () => new NativeCache(this, native.openCache(graph)), release };
    } catch (error) {
      throw new EngineError(`this device cannot load ${entry.file}: ${(error as Error).message}`, { cause: error });
    }
  }
}

/** A WebSocket of the program. */
class NativeSocket implements Socket {
  binaryType = "arraybuffer";
  onopen: (() => void) | null = null;
  onmessage: ((message: { readonly data: unknown }) => void) | null = null;
  onclose: (() => void) | null = null;
  onerror: (() => void) | null = null;

  constructor(
    readonly address: string,
    readonly send: (frame: Uint8Array) => void,
    private readonly end: () => void,
  ) {}

  /** The other end need not answer, so the socket is closed at once. */
  close(): void {
    this.end();
    this.onclose?.();
  }
}

class NativeCache implements GraphCache {
  constructor(
    private readonly bridge: NativeBridge,
    private readonly cache: number,
  ) {}

  putRows(start: number, keys: KvArray, values: KvArray): void {
    this.bridge.native.putRows(this.cache, start, bytesOf(keys.data), bytesOf(values.data));
  }

  truncate(length: number): void {
    this.bridge.native.truncate(this.cache, length);
  }

  async step({ tokens, positions, queries, mask, rows }: StepInputs): Promise<StepResult> {
    const { bridge, cache } = this;
    const inputs = [bytesOf(tokens), bytesOf(positions), bytesOf(queries), mask, rows] as const;
    let made: Uint8Array;
    try {
      made = bytesOf((await bridge.call((call) => bridge.native.step(call, cache, ...inputs))) as Given);
    } catch (error) {
      throw new EngineError(`this device cannot run the graph: ${(error as Error).message}`, { cause: error });
    }
    const whole = made.slice().buffer; // aligned
    const half = whole.byteLength / 2;
    return { tokens: new Int32Array(whole, 0, half / 4), logprobs: new Float32Array(whole, half, half / 4) };
  }

  close(): void {
    this.bridge.native.closeCache(this.cache);
  }
}

/** Return the bytes of an array, without a copy. */
function bytesOf(given: Given | Int32Array | Float32Array): Uint8Array {
  if (given instanceof Uint8Array) return given;
  if (given instanceof ArrayBuffer) return new Uint8Array(given);
  return new Uint8Array(given.buffer, given.byteOffset, given.byteLength);
}

/** Return host and port of an address. */
function placeOf(url: string): string {
  return url.split("/")[2]!;
}

/**
 * Return the shape of a graph's memory rows; undefined if it takes none. They are `[M, heads, head_dim]`, in Core ML's caches
 * `[1, heads, positions, head_dim]`.
 */
function rowShapeOf(entry: TargetEntry): KvShape | undefined {
  const shape = specOf(entry, "memory_keys")?.shape;
  if (!shape) return undefined;
  const [kvHeads, headDim] = [shape[1], shape[shape.length - 1]];
  if (typeof kvHeads !== "number" || typeof headDim !== "number") {
    throw new EngineError(`${entry.file} is no graph of a device half: the manifest names no memory_keys of a fixed size`);
  }
  return { kvHeads, headDim };
}

/** Return the positions that caches of a fixed size hold: Core ML's, `[1, heads, positions, head_dim]`. */
function positionsOf(entry: TargetEntry): number | undefined {
  const [first, , positions] = specOf(entry, "self_keys")?.shape ?? [];
  return typeof first === "number" && typeof positions === "number" ? positions : undefined;
}
