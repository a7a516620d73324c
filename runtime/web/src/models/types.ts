/** Interfaces of a bundle's models, and the messages between a page and the worker that has them. */

import type { Ort } from "../backends/onnx.js";
import type { TargetEntry } from "../bundle/manifest.js";
import type { Budget, Drafter } from "../drafters/base.js";
import type { DrafterPlan } from "../drafters/factory.js";
import type { KvArray } from "../session/memory_rows.js";
import type { Sampling } from "../session/sampling.js";
import type { DraftTree } from "../session/tree.js";

/** The drafter and the writer of one conversation. */
export interface Drafters {
  /** Undefined if the bundle leaves drafting to the server. */
  readonly drafter: Drafter | undefined;
  /** The offline writer; undefined if the bundle has none. It is downloaded and loaded with its first step. */
  readonly writer: Drafter | undefined;

  /** Free their caches, which grow with the conversation. They cannot draft afterwards. */
  close(): void;
}

/** A bundle's loaded graphs. */
export interface Models {
  /** Return drafters with caches of their own; the graphs are shared. */
  forConversation(): Drafters;

  /** Free the graphs. Their drafters cannot draft afterwards. */
  close(): Promise<void>;
}

/** Load models in this thread, which each step blocks for some milliseconds: in Node, and in a page for experiments. */
export interface InThisThread {
  /** The module of onnxruntime-web or onnxruntime-node. */
  readonly ort: Ort;
}

/** Load models in a worker, so that a page's thread is free. */
export interface InWorker {
  /** A worker that runs {@link serveModels}, such as `@moa-edge/runtime/worker`. It is terminated with the models. */
  readonly worker: WorkerLike;
  /** The address of onnxruntime-web's module, for the worker to import; undefined if the worker has one. */
  readonly ort?: string;
}

export interface LoadOptions {
  /** Execution providers of onnxruntime, in the order in which they are tried; `wasm` when omitted. */
  readonly providers?: readonly string[];
}

/** A graph: the drafter's, or that of the whole model. */
export type ModelName = "drafter" | "writer";

/** A request to the worker. Requests are processed in order; those with a `call` are answered. */
export type Request =
  | {
      readonly do: "load";
      readonly call: number;
      readonly model: ModelName;
      readonly graph: Uint8Array;
      readonly entry: TargetEntry;
      readonly ort: string | undefined;
      readonly providers: readonly string[] | undefined;
    }
  | { readonly do: "make"; readonly drafter: number; readonly model: ModelName; readonly plan: DrafterPlan }
  | { readonly do: "addRows"; readonly drafter: number; readonly start: number; readonly keys: KvArray; readonly values: KvArray }
  | { readonly do: "truncateRows"; readonly drafter: number; readonly length: number }
  | { readonly do: "drop"; readonly drafter: number }
  | {
      readonly do: "propose";
      readonly call: number;
      readonly drafter: number;
      readonly prefix: Uint32Array;
      readonly budget: Budget;
      readonly sampling: Sampling;
    };

/** The answer to a request with a `call`: its result, or an error's sentence. */
export type Answer =
  | { readonly call: number; readonly tree?: DraftTree }
  | { readonly call: number; readonly error: string };

/** The parts of the page's `Worker` that are used. */
export interface WorkerLike {
  postMessage(message: unknown, transfer: ArrayBuffer[]): void;
  addEventListener(type: "message", listener: (event: { readonly data: unknown }) => void): void;
  addEventListener(type: "error" | "messageerror", listener: (event: { readonly message?: string }) => void): void;
  terminate(): void;
}

/** The parts of the worker's `self` that are used. */
export interface PageLike {
  postMessage(message: unknown): void;
  addEventListener(type: "message", listener: (event: { readonly data: unknown }) => void): void;
}
