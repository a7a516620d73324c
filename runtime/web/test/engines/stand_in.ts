/** A native program's functions in Node: sockets, timers, a bundle in a folder, texts in files, graphs in onnxruntime. */

import { readFile, rename, writeFile } from "node:fs/promises";
import { join } from "node:path";

import { WebSocket } from "ws";

import { OnnxGraph, type Graph, type GraphCache, type KvArray, type KvShape, type Ort } from "../../src/index.js";
import { readManifest, type TargetEntry } from "../../src/bundle/manifest.js";
import type { NativeCore, NativeHost } from "../../src/native/native_host.js";

/** How a program calls the core. */
export type Call = (method: Exclude<keyof NativeCore, "start">, ...given: (number | string | Uint8Array | null)[]) => void;

export class StandIn implements NativeHost {
  /** Steps that were run. */
  steps = 0;
  private readonly timers = new Map<number, NodeJS.Timeout>();
  private readonly sockets = new Map<number, WebSocket>();
  private readonly graphs = new Map<number, Graph>();
  private readonly caches = new Map<number, { readonly cache: GraphCache; readonly rowShape: KvShape | undefined }>();
  private last = 0;

  /**
   * @param bundle its folder.
   * @param texts returns the path of a text.
   * @param ort runs the graphs of the target `web`.
   * @param call calls the core.
   * @param heard takes what the core reports.
   */
  constructor(
    private readonly bundle: string,
    private readonly texts: (key: string) => string,
    private readonly ort: Ort | undefined,
    private readonly call: Call,
    private readonly heard: (said: unknown) => void,
  ) {}

  now(): number {
    return performance.now() / 1000;
  }

  startTimer(timer: number, seconds: number): void {
    this.timers.set(timer, setTimeout(() => this.call("fired", timer), 1000 * seconds));
  }

  stopTimer(timer: number): void {
    clearTimeout(this.timers.get(timer));
    this.timers.delete(timer);
  }

  connect(socket: number, url: string, protocols: string): void {
    const made = new WebSocket(url, protocols ? protocols.split(",") : []);
    let status = 0;
    made.on("open", () => this.call("opened", socket));
    made.on("message", (data: Buffer) => this.call("received", socket, new Uint8Array(data)));
    made.on("unexpected-response", (request, response) => {
      status = response.statusCode ?? 0;
      request.destroy();
    });
    made.on("error", () => undefined); // its end follows
    made.on("close", () => this.call("closed", socket, status));
    this.sockets.set(socket, made);
  }

  send(socket: number, frame: Uint8Array): void {
    if (this.sockets.get(socket)?.readyState === WebSocket.OPEN) this.sockets.get(socket)!.send(frame);
  }

  close(socket: number): void {
    this.sockets.get(socket)?.close(1000);
    this.sockets.delete(socket);
  }

  readFile(call: number, file: string): void {
    this.answer(call, readFile(join(this.bundle, file)).then((bytes) => new Uint8Array(bytes)));
  }

  readText(call: number, key: string): void {
    const missing = (error: NodeJS.ErrnoException): null => {
      if (error.code !== "ENOENT") throw error;
      return null;
    };
    this.answer(call, readFile(this.texts(key), "utf-8").catch(missing));
  }

  writeText(call: number, key: string, text: string): void {
    const path = this.texts(key);
    this.answer(call, writeFile(`${path}.new`, text).then(() => rename(`${path}.new`, path)).then(() => 0));
  }

  loadGraph(call: number, file: string): void {
    const load = async (): Promise<number> => {
      const manifest = readManifest(await readFile(join(this.bundle, "manifest.json"), "utf-8"));
      const entries: TargetEntry[] = [...manifest.targets.values(), ...manifest.writers.values()];
      const entry = entries.find((each) => each.file === file)!;
      const bytes = new Uint8Array(await readFile(join(this.bundle, file)));
      this.graphs.set(++this.last, await OnnxGraph.load(this.ort!, bytes, entry));
      return this.last;
    };
    this.answer(call, load());
  }

  releaseGraph(graph: number): void {
    void this.graphs.get(graph)!.release();
    this.graphs.delete(graph);
  }

  openCache(graph: number, cache = ++this.last): number {
    const { rowShape } = this.graphs.get(graph)!;
    this.caches.set(cache, { cache: this.graphs.get(graph)!.open(), rowShape });
    return cache;
  }

  closeCache(cache: number): void {
    this.caches.get(cache)!.cache.close();
    this.caches.delete(cache);
  }

  putRows(cache: number, start: number, keys: Uint8Array, values: Uint8Array): void {
    const open = this.caches.get(cache)!;
    const rowShape = open.rowShape!;
    const array = (bytes: Uint8Array): KvArray => {
      const data = new Float32Array(bytes.slice().buffer);
      return { ...rowShape, data, count: data.length / rowShape.kvHeads / rowShape.headDim };
    };
    open.cache.putRows(start, array(keys), array(values));
  }

  truncate(cache: number, length: number): void {
    this.caches.get(cache)!.cache.truncate(length);
  }

  step(call: number, cache: number, tokens: Uint8Array, positions: Uint8Array, queries: Uint8Array, mask: Uint8Array, rows: number): void {
    const whole = (bytes: Uint8Array): Int32Array => new Int32Array(bytes.slice().buffer);
    const inputs = { tokens: whole(tokens), positions: whole(positions), queries: whole(queries), mask, rows };
    const step = async (): Promise<Uint8Array> => {
      const { tokens: found, logprobs } = await this.caches.get(cache)!.cache.step(inputs);
      this.steps++;
      return new Uint8Array(Buffer.concat([Buffer.from(found.buffer), Buffer.from(logprobs.buffer)]));
    };
    this.answer(call, step());
  }

  report(json: string): void {
    this.heard(JSON.parse(json));
  }

  private answer(call: number, made: Promise<number | string | Uint8Array | null>): void {
    made.then(
      (value) => this.call("answered", call, value),
      (error: unknown) => this.call("failed", call, (error as Error).message),
    );
  }
}
