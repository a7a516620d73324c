/** In onnxruntime's place: a graph is a text, and what it computes is a sum. */

import type { OrtSession, OrtTensor } from "../src/backends/onnx.js";
import type { Ort } from "../src/index.js";
import { count } from "./counting_graph.js";

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
    create: async (bytes: Uint8Array | string, options: object = {}): Promise<OrtSession> => {
      const graph = new TextDecoder().decode(bytes as Uint8Array);
      if (!/^(drafter|writer)/.test(graph)) throw new Error("no\n  graph");
      this.loaded.push({ graph, options });
      return this.session(graph.startsWith("drafter"));
    },
  };

  private session(needsRow: boolean): OrtSession {
    let running = false;
    return {
      inputNames: needsRow ? ["tokens", "memory_keys", "memory_values"] : ["tokens"],
      release: async () => void this.released++,
      run: async (given) => {
        if (running) throw new Error("a session runs one step at a time");
        if (this.fails) throw new Error(this.fails);
        running = true;
        const inputs = {
          tokens: whole(given["tokens"]!),
          positions: whole(given["positions"]!),
          queries: whole(given["queries"]!),
          mask: given["self_mask"]!.data as Uint8Array,
          rows: given["memory_keys"]?.dims[0] ?? 0,
        };
        const [keys, values] = [floats(given["self_keys"]), floats(given["self_values"])];
        const [memoryKeys, memoryValues] = [floats(given["memory_keys"]), floats(given["memory_values"])];
        const made = count(inputs, { keys, values, memoryKeys, memoryValues });
        await undefined;
        running = false;
        const dims = [inputs.queries.length, made.tokens.length / inputs.queries.length];
        return {
          top_tokens: new Tensor("int64", BigInt64Array.from([...made.tokens], BigInt), dims),
          top_logprobs: new Tensor("float32", made.logprobs, dims),
          keys: new Tensor("float32", made.keys, [inputs.tokens.length, 1, 2]),
          values: new Tensor("float32", made.values, [inputs.tokens.length, 1, 2]),
        };
      },
    };
  }
}

function whole({ data, dims }: OrtTensor): Int32Array {
  return Int32Array.from(data as BigInt64Array, Number).slice(0, dims[0]);
}

function floats(tensor: OrtTensor | undefined): Float32Array {
  return (tensor?.data as Float32Array | undefined) ?? new Float32Array();
}
