/** What we need of onnxruntime: onnxruntime-web and onnxruntime-node have it, and an app hands one of them in. */

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

/** The module. What its `env` says, such as threads and where the `.wasm` lies, is set before the first graph is loaded. */
export interface Ort {
  readonly env: { readonly wasm: { numThreads?: number } };
  readonly Tensor: OrtTensorConstructor;
  readonly InferenceSession: { create(graph: Uint8Array, options?: object): Promise<OrtSession> };
}
