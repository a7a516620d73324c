/** The page's side of a worker: its models, the drafters that stand for the worker's, and the messages between them. */

import { EngineError, type KvShape } from "../backends/base.js";
import { kvShapeOf } from "../backends/onnx.js";
import type { Bundle } from "../bundle/bundle.js";
import { hasGraph, type TargetEntry } from "../bundle/manifest.js";
import type { Budget, Drafter } from "../drafters/base.js";
import { copyingDrafter, drafterPlan, writerPlan, type DrafterPlan } from "../drafters/factory.js";
import { checkRows } from "../drafters/kv_buffer.js";
import type { StoppingRule } from "../offline_stopping.js";
import type { KvArray } from "../session/memory_rows.js";
import { GREEDY, type Sampling } from "../session/sampling.js";
import { NOTHING, type DraftTree } from "../session/tree.js";
import type { Answer, Drafters, InWorker, LoadOptions, ModelName, Models, Request, WorkerLike } from "./types.js";

/** Models in a worker. */
export class WorkerModels implements Models {
  private made = 0;
  private writerLoaded: Promise<void> | undefined;

  private constructor(
    private readonly bundle: Bundle,
    private readonly link: WorkerLink,
    private readonly options: InWorker & LoadOptions,
  ) {}

  /** See {@link loadModels}. */
  static async load(bundle: Bundle, options: InWorker & LoadOptions): Promise<WorkerModels> {
    const models = new WorkerModels(bundle, new WorkerLink(options.worker), options);
    if (!hasGraph(bundle.manifest.architecture)) return models;
    try {
      const { entry, bytes } = await bundle.graph();
      await models.loadGraph("drafter", entry, bytes);
    } catch (error) {
      models.link.close();
      throw error;
    }
    return models;
  }

  forConversation(): Drafters {
    const { manifest } = this.bundle;
    const graph = hasGraph(manifest.architecture);
    const made = graph ? this.make("drafter", manifest.targets.get("web")!, drafterPlan(manifest), async () => undefined) : undefined;
    const entry = manifest.writers.get("web");
    const writer = entry && this.make("writer", entry, writerPlan(manifest, entry), () => this.loadWriter());
    const close = (): void => [made, writer].forEach((each) => each?.close());
    return { drafter: made ?? copyingDrafter(manifest), writer, close };
  }

  async close(): Promise<void> {
    this.link.close();
  }

  private make(model: ModelName, entry: TargetEntry, plan: DrafterPlan, ready: () => Promise<void>): WorkerDrafter {
    const drafter = this.made++;
    const kvShape = kvShapeOf(entry);
    this.link.tell({ do: "make", drafter, model, plan });
    const served = { drafter, kvShape, needsRows: model === "drafter", stoppingRule: plan.stoppingRule };
    return new WorkerDrafter(this.link, served, ready);
  }

  /** Load the writer once; again after a failure, for example without a network to download it. */
  private async loadWriter(): Promise<void> {
    const load = async (): Promise<void> => {
      const { entry, bytes } = await this.bundle.writer();
      await this.loadGraph("writer", entry, bytes);
    };
    this.writerLoaded ??= load();
    try {
      await this.writerLoaded;
    } catch (error) {
      this.writerLoaded = undefined;
      throw error;
    }
  }

  private async loadGraph(model: ModelName, entry: TargetEntry, graph: Uint8Array): Promise<void> {
    const { ort, providers } = this.options;
    const bytes = graph.byteLength === graph.buffer.byteLength ? graph : graph.slice(); // only whole buffers can be transferred
    await this.link.ask((call) => ({ do: "load", call, model, graph: bytes, entry, ort, providers }), [bytes.buffer as ArrayBuffer]);
  }
}

interface Served {
  /** Its number in the worker. */
  readonly drafter: number;
  readonly kvShape: KvShape;
  readonly needsRows: boolean;
  readonly stoppingRule: StoppingRule | null;
}

/** A proxy of a `MoaDrafter` in the worker. It counts rows itself, so that rows that do not fit are refused at once. */
export class WorkerDrafter implements Drafter {
  rows = 0;
  readonly needsRows: boolean;
  readonly stoppingRule: StoppingRule | null;

  /** @param ready awaited before each draft. */
  constructor(
    private readonly link: WorkerLink,
    private readonly served: Served,
    private readonly ready: () => Promise<void>,
  ) {
    this.needsRows = served.needsRows;
    this.stoppingRule = served.stoppingRule;
  }

  addRows(start: number, keys: KvArray, values: KvArray): void {
    checkRows(start, keys, values, this.rows, this.served.kvShape);
    this.rows = start + keys.count;
    const [ours, theirs] = [copied(keys), copied(values)]; // copies, because they may be views of larger arrays
    const transfer = [ours.data.buffer, theirs.data.buffer] as ArrayBuffer[];
    this.link.tell({ do: "addRows", drafter: this.served.drafter, start, keys: ours, values: theirs }, transfer);
  }

  truncateRows(length: number): void {
    this.rows = Math.max(0, Math.min(this.rows, length));
    this.link.tell({ do: "truncateRows", drafter: this.served.drafter, length });
  }

  /** Free its caches. It cannot draft afterwards. */
  close(): void {
    this.link.tell({ do: "drop", drafter: this.served.drafter });
  }

  /** See {@link MoaDrafter.propose}. Throws EngineError also if the worker has ended. */
  async propose(prefix: readonly number[], budget: Budget, sampling: Sampling = GREEDY): Promise<DraftTree> {
    await this.ready();
    const { drafter } = this.served;
    const tokens = Uint32Array.from(prefix);
    const request = (call: number) => ({ do: "propose", call, drafter, prefix: tokens, budget, sampling }) as const;
    return (await this.link.ask(request, [tokens.buffer])) ?? NOTHING;
  }
}

function copied(numbers: KvArray): KvArray {
  return { ...numbers, data: numbers.data.slice() };
}

interface Waiting {
  readonly resolve: (tree: DraftTree | undefined) => void;
  readonly reject: (error: Error) => void;
}

/** Requests to a worker, and its answers. After its end or failure all requests fail with a sentence. */
export class WorkerLink {
  private readonly waiting = new Map<number, Waiting>();
  private calls = 0;
  private ended: EngineError | undefined;

  constructor(private readonly worker: WorkerLike) {
    worker.addEventListener("message", ({ data }) => this.answered(data as Answer));
    worker.addEventListener("error", ({ message }) => {
      this.end(`the drafter's worker failed: ${message || "its program cannot be loaded, or there is too little memory"}`);
    });
    worker.addEventListener("messageerror", () => this.end("the drafter's worker failed: its answer cannot be read"));
  }

  /** Send a request without an answer. */
  tell(request: Request, transfer: ArrayBuffer[] = []): void {
    if (!this.ended) this.worker.postMessage(request, transfer);
  }

  /**
   * Send a request and wait for its answer.
   *
   * @param request makes it with the number of the call.
   * @throws EngineError it failed, or the worker has ended.
   */
  ask(request: (call: number) => Request, transfer: ArrayBuffer[] = []): Promise<DraftTree | undefined> {
    return new Promise((resolve, reject) => {
      if (this.ended) throw this.ended;
      const call = this.calls++;
      this.waiting.set(call, { resolve, reject });
      this.worker.postMessage(request(call), transfer);
    });
  }

  close(): void {
    this.end("the drafter was closed");
  }

  private answered(answer: Answer): void {
    const waiting = this.waiting.get(answer.call);
    this.waiting.delete(answer.call);
    if ("error" in answer) waiting?.reject(new EngineError(answer.error));
    else waiting?.resolve(answer.tree);
  }

  private end(why: string): void {
    this.ended ??= new EngineError(why);
    this.worker.terminate();
    for (const { reject } of this.waiting.values()) reject(this.ended);
    this.waiting.clear();
  }
}
