/** What is said between a page and the worker that has its models. */

import type { KvShape } from "../backends/base.js";
import type { TargetEntry } from "../bundle/manifest.js";
import type { Budget } from "../drafters/base.js";
import type { DrafterPlan } from "../drafters/factory.js";
import type { KvArray } from "../session/memory_rows.js";
import type { Sampling } from "../session/sampling.js";
import type { DraftTree } from "../session/tree.js";

/** The drafter's graph, and that of the whole model. */
export type ModelName = "drafter" | "writer";

/** Each is done when those before it are. Those with a `call` are answered. */
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
  | { readonly do: "make"; readonly drafter: number; readonly model: ModelName; readonly kvShape: KvShape; readonly plan: DrafterPlan }
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

/** To a request with a `call`: what it made, or a sentence. */
export type Answer =
  | { readonly call: number; readonly tree?: DraftTree }
  | { readonly call: number; readonly error: string };

/** What we need of the page's `Worker`. */
export interface WorkerLike {
  postMessage(message: unknown, transfer: ArrayBuffer[]): void;
  addEventListener(type: "message", listener: (event: { readonly data: unknown }) => void): void;
  addEventListener(type: "error" | "messageerror", listener: (event: { readonly message?: string }) => void): void;
  terminate(): void;
}

/** What we need of the worker's own `self`. */
export interface PageLike {
  postMessage(message: unknown): void;
  addEventListener(type: "message", listener: (event: { readonly data: unknown }) => void): void;
}
