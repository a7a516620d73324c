/** In onnxruntime's place: a graph is a text, and what it computes is a sum. */

import type { OrtSession, OrtTensor } from "../src/backends/onnx.js";
import type { KvArray, Ort } from "../src/index.js";
import { CountingBackend } from "./counting_backend.js";

class Tensor implements OrtTensor {
  constructor(
    readonly type: string,
    readonly data: BigInt64Array | Float32Array | Uint8Array,
    readonly dims: readonly number[],
  ) {}
}

/** Loads what begins with "drafter" or "writer"; `loaded` has what it was given. */
export class CountingOrt implements Ort {
  readonly env = { wasm: {} };
  readonly Tensor = Tensor;
  readonly loaded: { graph: string; options: object }[] = [];
  released = 0;
  /** Why the next step fails. */
  fails: string | undefined;
  readonly InferenceSession = {
    create: async (bytes: Uint8Array, options: object = {}): Promise<OrtSession> => {
      const graph = new TextDecoder().decode(bytes);
      if (!/^(drafter|writer)/.test(graph)) throw new Error("no\n  graph");
      this.loaded.push({ graph, options });
      return this.session(graph.startsWith("drafter"));
    },
  };

  private session(needsRow: boolean): OrtSession {
    const backend = new CountingBackend(needsRow);
    let running = false;
    return {
      inputNames: needsRow ? ["tokens", "memory_keys", "memory_values"] : ["tokens"],
      release: async () => void this.released++,
      run: async (given) => {
        if (running) throw new Error("a session runs one step at a time");
        if (this.fails) throw new Error(this.fails);
        running = true;
        const made = await backend.step({
          tokens: whole(given["tokens"]!),
          positions: whole(given["positions"]!),
          queries: whole(given["queries"]!),
          selfKeys: numbers(given["self_keys"]!),
          selfValues: numbers(given["self_values"]!),
          selfMask: given["self_mask"]!.data as Uint8Array,
          memoryKeys: numbers(given["memory_keys"]),
          memoryValues: numbers(given["memory_values"]),
        });
        running = false;
        const dims = [made.topTokens.length, made.topTokens[0]!.length];
        return {
          top_tokens: new Tensor("int64", BigInt64Array.from(made.topTokens.flat(), BigInt), dims),
          top_logprobs: new Tensor("float32", Float32Array.from(made.topLogprobs.flat()), dims),
          keys: tensor(made.keys),
          values: tensor(made.values),
        };
      },
    };
  }
}

function whole({ data, dims }: OrtTensor): number[] {
  return Array.from(data as BigInt64Array, Number).slice(0, dims[0]);
}

function numbers(tensor: OrtTensor | undefined): KvArray {
  if (!tensor) return { count: 0, kvHeads: 1, headDim: 2, data: new Float32Array() };
  const [count, kvHeads, headDim] = tensor.dims as [number, number, number];
  return { count, kvHeads, headDim, data: tensor.data as Float32Array };
}

function tensor({ count, kvHeads, headDim, data }: KvArray): Tensor {
  return new Tensor("float32", data, [count, kvHeads, headDim]);
}
