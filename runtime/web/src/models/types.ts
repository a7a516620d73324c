/** Models of a bundle: the interfaces of those in this thread and of those in a worker. */

import type { Ort } from "../backends/onnx.js";
import type { Drafter } from "../drafters/base.js";
import type { WorkerLike } from "./messages.js";

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
