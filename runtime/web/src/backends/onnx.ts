/** A graph on onnxruntime. */

import { specOf, type TargetEntry } from "../bundle/manifest.js";
import { GrowingRows } from "../drafters/kv_buffer.js";
import type { KvArray } from "../session/memory_rows.js";
import { EngineError, saidBy, type Graph, type GraphCache, type KvShape, type StepInputs, type StepResult } from "./base.js";

/** Run a graph written by `moa-export --target web` or `onnx`: a device half, or a writer, which has no inputs for memory rows. */
export class OnnxGraph implements Graph {
  readonly rowShape: KvShape | undefined;
  private last: Promise<unknown> = Promise.resolve();

  private constructor(
    private readonly ort: Ort,
    private readonly session: OrtSession,
    private readonly kvShape: KvShape,
  ) {
    this.rowShape = session.inputNames.includes("memory_keys") ? kvShape : undefined;
  }

  /**
   * Load a graph.
   *
   * @param graph the `.onnx` file, which may be dropped afterwards, or its path, where onnxruntime can read files.
   * @param entry the graph's entry in the bundle's manifest; its `details.session` has matrices widened at load.
   * @param providers execution providers of the app's onnxruntime, in the order in which they are tried.
   * @throws EngineError onnxruntime cannot load it, or it is no graph of a device half.
   */
  static async load(ort: Ort, graph: Uint8Array | string, entry: TargetEntry, providers: readonly string[] = ["wasm"]): Promise<OnnxGraph> {
    const kvShape = kvShapeOf(entry);
    const options = { executionProviders: providers, logSeverityLevel: 3, ...entry.session };
    try {
      return new OnnxGraph(ort, await ort.InferenceSession.create(graph, options), kvShape);
    } catch (error) {
      throw new EngineError(`onnxruntime cannot load ${entry.file}: ${saidBy(error)}`, { cause: error });
    }
  }

  open(): GraphCache {
    return new OnnxCache(this.ort, this.kvShape, this.rowShape, (inputs) => this.run(inputs));
  }

  async release(): Promise<void> {
    await this.last;
    await this.session.release();
  }

  /** Run the session. Runs for several conversations are queued: a session runs one at a time. */
  private run(inputs: Tensors): Promise<Tensors> {
    const made = this.last.then(() => this.session.run(inputs));
    this.last = made.catch(() => undefined); // reported to the caller of that step
    return made;
  }
}

type Tensors = { readonly [name: string]: OrtTensor };

class OnnxCache implements GraphCache {
  private readonly tokens: GrowingRows;
  private readonly memory: GrowingRows;

  /** @param run runs the session. */
  constructor(
    private readonly ort: Ort,
    private readonly kvShape: KvShape,
    private readonly rowShape: KvShape | undefined,
    private readonly run: (inputs: Tensors) => Promise<Tensors>,
  ) {
    this.tokens = new GrowingRows(kvShape);
    this.memory = new GrowingRows(kvShape);
  }

  putRows(start: number, keys: KvArray, values: KvArray): void {
    this.memory.write(start, keys, values);
  }

  truncate(length: number): void {
    this.tokens.truncate(length);
  }

  async step(inputs: StepInputs): Promise<StepResult> {
    try {
      const { length } = this.tokens;
      const made = await this.run(this.tensors(inputs));
      this.tokens.write(length, this.entries(made["keys"]!), this.entries(made["values"]!));
      const tokens = Int32Array.from(made["top_tokens"]!.data as ArrayLike<number | bigint>, Number);
      return { tokens, logprobs: Float32Array.from(made["top_logprobs"]!.data as ArrayLike<number>) };
    } catch (error) {
      throw new EngineError(`onnxruntime cannot run the graph: ${saidBy(error)}`, { cause: error });
    }
  }

  close(): void {
    this.tokens.release();
    this.memory.release();
  }

  private tensors({ tokens, positions, queries, mask, rows }: StepInputs): Tensors {
    const { ort } = this;
    const whole = (numbers: Int32Array): OrtTensor =>
      new ort.Tensor("int64", BigInt64Array.from(numbers as unknown as number[], BigInt), [numbers.length]);
    const floats = ({ data, count, kvHeads, headDim }: KvArray): OrtTensor =>
      new ort.Tensor("float32", data, [count, kvHeads, headDim]);
    const [selfKeys, selfValues] = this.tokens.first(this.tokens.length);
    const given = {
      tokens: whole(tokens),
      positions: whole(positions),
      queries: whole(queries),
      self_keys: floats(selfKeys),
      self_values: floats(selfValues),
      self_mask: new ort.Tensor("bool", mask, [tokens.length, selfKeys.count + tokens.length]),
    };
    if (!this.rowShape) return given;
    const [memoryKeys, memoryValues] = this.memory.first(rows);
    return { ...given, memory_keys: floats(memoryKeys), memory_values: floats(memoryValues) };
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
export function kvShapeOf(entry: TargetEntry): KvShape {
  const { file } = entry;
  const sizesOf = (input: string) => specOf(entry, input)?.shape.slice(1);
  const [kvHeads, headDim] = sizesOf("self_keys") ?? [];
  if (typeof kvHeads !== "number" || typeof headDim !== "number") {
    throw new EngineError(`${file} is no graph of a device half: the manifest names no self_keys of a fixed size`);
  }
  if ((sizesOf("memory_keys")?.[0] ?? kvHeads) !== kvHeads) {
    throw new EngineError(`${file} begins with layers of the target, which is no longer supported`);
  }
  return { kvHeads, headDim };
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
 * The parts of onnxruntime that are used; an app hands in the module of onnxruntime-web, onnxruntime-node or
 * onnxruntime-react-native. Settings of its
 * `env`, such as threads and the address of the `.wasm`, are made before the first graph is loaded.
 */
export interface Ort {
  readonly env: { readonly wasm: { numThreads?: number } };
  readonly Tensor: OrtTensorConstructor;
  readonly InferenceSession: { create(graph: Uint8Array | string, options?: object): Promise<OrtSession> };
}
