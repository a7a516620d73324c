/** A bundle's models, loaded. */

import { DeferredBackend } from "../backends/deferred.js";
import { OnnxBackend, kvShapeOf, type Ort } from "../backends/onnx.js";
import type { Bundle } from "../bundle/bundle.js";
import type { Drafter } from "../drafters/base.js";
import { drafterOf, drafterPlan, writerPlan } from "../drafters/factory.js";
import type { WorkerLike } from "./messages.js";
import { WorkerModels } from "./worker_models.js";

/** What drafts in one conversation. */
export interface Drafters {
  readonly drafter: Drafter;
  /** What writes without a verifier, undefined of a bundle without one. It is loaded, and downloaded, with its first step. */
  readonly writer: Drafter | undefined;

  /** Give their caches back, which grow with the conversation. Nothing is drafted afterwards. */
  close(): void;
}

export interface Models {
  /** With caches of their own; the graphs are shared. */
  forConversation(): Drafters;

  /** Give back what the graphs take. Nothing drafts afterwards. */
  close(): Promise<void>;
}

/** In this thread, which each step blocks for some milliseconds: in Node, and in a page for trying out. */
export interface InThisThread {
  /** The module of onnxruntime-web, or of onnxruntime-node. */
  readonly ort: Ort;
}

/** In a worker, so that a page's thread is free. */
export interface InWorker {
  /** One that runs {@link serveModels}, as `@moa-edge/runtime/worker` does. It is ended with the models. */
  readonly worker: WorkerLike;
  /** The address of onnxruntime-web's module, for the worker to import; undefined where the worker has one. */
  readonly ort?: string;
}

export interface LoadOptions {
  /** Execution providers of onnxruntime in the order in which they are tried: `wasm` alone if nothing is said. */
  readonly providers?: readonly string[];
}

/**
 * Load the drafter's graph; the writer's follows when it is needed.
 *
 * @throws EngineError onnxruntime cannot load it, or the worker fails.
 * @throws BundleError the bundle has no graph for onnxruntime-web, or it cannot be had.
 */
export async function loadModels(bundle: Bundle, options: (InThisThread | InWorker) & LoadOptions): Promise<Models> {
  return "worker" in options ? WorkerModels.load(bundle, options) : LocalModels.load(bundle, options);
}

class LocalModels implements Models {
  private constructor(
    private readonly bundle: Bundle,
    private readonly half: OnnxBackend,
    private readonly whole: DeferredBackend | undefined,
  ) {}

  static async load(bundle: Bundle, { ort, providers }: InThisThread & LoadOptions): Promise<LocalModels> {
    const { entry, bytes } = await bundle.graph();
    const half = await OnnxBackend.load(ort, bytes, entry, providers);
    const { webWriter } = bundle.manifest;
    const load = async (): Promise<OnnxBackend> => {
      const writer = await bundle.writer();
      return OnnxBackend.load(ort, writer.bytes, writer.entry, providers);
    };
    return new LocalModels(bundle, half, webWriter && new DeferredBackend(load, kvShapeOf(webWriter)));
  }

  forConversation(): Drafters {
    const { manifest } = this.bundle;
    const writer = this.whole && drafterOf(writerPlan(manifest), this.whole);
    return { drafter: drafterOf(drafterPlan(manifest), this.half), writer, close: () => undefined }; // collected with them
  }

  async close(): Promise<void> {
    await this.half.release();
    await this.whole?.release();
  }
}
