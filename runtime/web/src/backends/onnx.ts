/** A graph on onnxruntime. */

import type { TargetEntry } from "../bundle/manifest.js";
import type { KvArray } from "../session/memory_rows.js";
import { EngineError, saidBy, type Backend, type KvShape, type StepInputs, type StepResult } from "./base.js";

/** Run a graph written by `moa-export --target web`: a device half, or a writer, which has no inputs for memory rows. */
export class OnnxBackend implements Backend {
  readonly needsRow: boolean;
  private last: Promise<unknown> = Promise.resolve();

  private constructor(
    private readonly ort: Ort,
    private readonly session: OrtSession,
    readonly kvShape: KvShape,
  ) {
    this.needsRow = session.inputNames.includes("memory_keys");
  }

  /**
   * Load a graph.
   *
   * @param graph the `.onnx` file, which may be dropped afterwards.
   * @param entry the graph's entry in the bundle's manifest; its `details.session` has matrices widened at load.
   * @param providers execution providers of the app's onnxruntime, in the order in which they are tried.
   * @throws EngineError onnxruntime cannot load it, or it is no graph of a device half.
   */
  static async load(ort: Ort, graph: Uint8Array, entry: TargetEntry, providers: readonly string[] = ["wasm"]): Promise<OnnxBackend> {
    const kvShape = kvShapeOf(entry);
    const options = { executionProviders: providers, logSeverityLevel: 3, ...entry.session };
    try {
      return new OnnxBackend(ort, await ort.InferenceSession.create(graph, options), kvShape);
    } catch (error) {
      throw new EngineError(`onnxruntime cannot load ${entry.file}: ${saidBy(error)}`, { cause: error });
    }
  }

  /** See {@link Backend.step}. Steps of several drafters are queued: a session runs one at a time. */
  step(inputs: StepInputs): Promise<StepResult> {
    const made = this.last.then(() => this.run(inputs));
    this.last = made.catch(() => undefined); // reported to the caller of that step
    return made;
  }

  async release(): Promise<void> {
    await this.last;
    await this.session.release();
  }

  private async run(inputs: StepInputs): Promise<StepResult> {
    try {
      const made = await this.session.run(this.tensors(inputs));
      return {
        topTokens: rowsOf(made["top_tokens"]!, Number),
        topLogprobs: rowsOf(made["top_logprobs"]!, Number),
        keys: this.entries(made["keys"]!),
        values: this.entries(made["values"]!),
      };
    } catch (error) {
      throw new EngineError(`onnxruntime cannot run the graph: ${saidBy(error)}`, { cause: error });
    }
  }

  private tensors(inputs: StepInputs): { [name: string]: OrtTensor } {
    const { ort } = this;
    const whole = (numbers: readonly number[]): OrtTensor =>
      new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), [numbers.length]);
    const floats = ({ data, count, kvHeads, headDim }: KvArray): OrtTensor =>
      new ort.Tensor("float32", data, [count, kvHeads, headDim]);
    const given: { [name: string]: OrtTensor } = {
      tokens: whole(inputs.tokens),
      positions: whole(inputs.positions),
      queries: whole(inputs.queries),
      self_keys: floats(inputs.selfKeys),
      self_values: floats(inputs.selfValues),
      self_mask: new ort.Tensor("bool", inputs.selfMask, [inputs.tokens.length, inputs.selfKeys.count + inputs.tokens.length]),
    };
    if (!this.needsRow) return given;
    return { ...given, memory_keys: floats(inputs.memoryKeys), memory_values: floats(inputs.memoryValues) };
  }

  private entries({ data, dims }: OrtTensor): KvArray {
    return { ...this.kvShape, count: dims[0]!, data: data as Float32Array };
  }
}

/**
 * Return the shape of a graph's cache entries, and of its memory rows, if it takes any.
 *
 * @throws EngineError it is no graph of a device half, or begins with layers of the target, whose rows have fewer heads.
 */
export function kvShapeOf({ file, inputs }: TargetEntry): KvShape {
  const sizesOf = (input: string) => inputs.find(({ name }) => name === input)?.shape.slice(1);
  const [kvHeads, headDim] = sizesOf("self_keys") ?? [];
  if (typeof kvHeads !== "number" || typeof headDim !== "number") {
    throw new EngineError(`${file} is no graph of a device half: the manifest names no self_keys of a fixed size`);
  }
  if ((sizesOf("memory_keys")?.[0] ?? kvHeads) !== kvHeads) {
    throw new EngineError(`${file} begins with layers of the target, which is no longer supported`);
  }
  return { kvHeads, headDim };
}

/** Return a matrix as a list of its rows. */
function rowsOf<T extends number | bigint>({ data, dims }: OrtTensor, number: (value: T) => number): number[][] {
  const [rows, columns] = dims as [number, number];
  const all = Array.from(data as ArrayLike<T>, number);
  return Array.from({ length: rows }, (_, row) => all.slice(row * columns, (row + 1) * columns));
}

export interface OrtTensor {
  readonly data: unknown;
  readonly dims: readonly number[];
}

interface OrtTensorConstructor {
  new (type: "int64", data: BigInt64Array, dims: readonly number[]): OrtTensor;
  new (type: "float32", data: Float32Array, dims: readonly number[]): OrtTensor;
  new (type: "bool", data: Uint8Array, dims: readonly number[]): OrtTensor;
}

export interface OrtSession {
  readonly inputNames: readonly string[];
  run(inputs: { readonly [name: string]: OrtTensor }): Promise<{ readonly [name: string]: OrtTensor }>;
  release(): Promise<void>;
}

/**
 * The parts of onnxruntime that are used; an app hands in the module of onnxruntime-web or onnxruntime-node. Settings of its
 * `env`, such as threads and the address of the `.wasm`, are made before the first graph is loaded.
 */
export interface Ort {
  readonly env: { readonly wasm: { numThreads?: number } };
  readonly Tensor: OrtTensorConstructor;
  readonly InferenceSession: { create(graph: Uint8Array, options?: object): Promise<OrtSession> };
}
