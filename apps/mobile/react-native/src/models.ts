/** Drafter and writer on onnxruntime. */

import {
  DeferredGraph,
  OnnxGraph,
  copyingDrafter,
  drafterOf,
  drafterPlan,
  hasGraph,
  writerPlan,
  type Drafters,
  type Graph,
  type Ort,
} from "@moa-edge/runtime";

import { entryOf, isThere, type FolderBundle } from "./bundle.js";

export interface ModelOptions {
  /** The module `onnxruntime-react-native`; its interface is that of `onnxruntime-common`. */
  readonly ort: Pick<Ort, "Tensor" | "InferenceSession">;
  /** Target of the drafter's graph: `onnx` when omitted, or `web`. */
  readonly graphs?: string;
  /** Execution providers, in the order in which they are tried: `cpu` when omitted. */
  readonly providers?: readonly string[];
}

/** The graphs of a bundle, read from their files by onnxruntime. */
export class Models {
  private constructor(
    private readonly from: FolderBundle,
    private readonly half: Graph | undefined,
    private readonly whole: Graph | undefined,
  ) {}

  /**
   * Load the drafter's graph, if the bundle has one; the writer's, which is that of the target `web`, is loaded with its first step.
   * A writer whose file is not in the folder is left out.
   *
   * @throws EngineError onnxruntime cannot load it.
   * @throws BundleError the bundle has no such graph.
   */
  static async load(from: FolderBundle, { ort, graphs = "onnx", providers = ["cpu"] }: ModelOptions): Promise<Models> {
    const { bundle, folder } = from;
    const { architecture, writers } = bundle.manifest;
    const engine = { env: { wasm: {} }, Tensor: ort.Tensor, InferenceSession: ort.InferenceSession };
    const load = (entry: Parameters<typeof OnnxGraph.load>[2]): Promise<Graph> =>
      OnnxGraph.load(engine, folder.pathOf(entry.file), entry, providers);
    const half = hasGraph(architecture) ? await load(entryOf(bundle.manifest, graphs)) : undefined;
    const writer = writers.get("web");
    const whole = writer && (await isThere(folder, writer.file)) ? new DeferredGraph(() => load(writer)) : undefined;
    return new Models(from, half, whole);
  }

  /** Return drafter and writer with caches of their own; the graphs are shared. */
  forConversation(): Drafters {
    const { manifest } = this.from.bundle;
    const drafter = this.half && drafterOf(drafterPlan(manifest), this.half);
    const writer = this.whole && drafterOf(writerPlan(manifest, manifest.writers.get("web")!), this.whole);
    const close = (): void => [drafter, writer].forEach((each) => each?.close());
    return { drafter: drafter ?? copyingDrafter(manifest), writer, close };
  }

  /** Free the graphs. Their drafters cannot draft afterwards. */
  async close(): Promise<void> {
    await this.half?.release();
    await this.whole?.release();
  }
}
