/** Loading a bundle's models, in this thread or in a worker. */

import { DeferredGraph } from "../backends/deferred.js";
import { OnnxGraph } from "../backends/onnx.js";
import type { Bundle } from "../bundle/bundle.js";
import { hasGraph } from "../bundle/manifest.js";
import { copyingDrafter, drafterOf, drafterPlan, writerPlan } from "../drafters/factory.js";
import type { Drafters, InThisThread, InWorker, LoadOptions, Models } from "./types.js";
import { WorkerModels } from "./worker_models.js";

/**
 * Load the drafter's graph, if the bundle has one; the writer's is loaded when it is needed.
 *
 * @throws EngineError onnxruntime cannot load it, or the worker fails.
 * @throws BundleError the bundle has no graph for onnxruntime-web, or it cannot be downloaded.
 */
export async function loadModels(bundle: Bundle, options: (InThisThread | InWorker) & LoadOptions): Promise<Models> {
  return "worker" in options ? WorkerModels.load(bundle, options) : LocalModels.load(bundle, options);
}

class LocalModels implements Models {
  private constructor(
    private readonly bundle: Bundle,
    private readonly half: OnnxGraph | undefined,
    private readonly whole: DeferredGraph | undefined,
  ) {}

  static async load(bundle: Bundle, { ort, providers }: InThisThread & LoadOptions): Promise<LocalModels> {
    const { architecture, writers } = bundle.manifest;
    let half: OnnxGraph | undefined;
    if (hasGraph(architecture)) {
      const { entry, bytes } = await bundle.graph();
      half = await OnnxGraph.load(ort, bytes, entry, providers);
    }
    const load = async (): Promise<OnnxGraph> => {
      const writer = await bundle.writer();
      return OnnxGraph.load(ort, writer.bytes, writer.entry, providers);
    };
    return new LocalModels(bundle, half, writers.has("web") ? new DeferredGraph(load) : undefined);
  }

  forConversation(): Drafters {
    const { manifest } = this.bundle;
    const writer = this.whole && drafterOf(writerPlan(manifest, manifest.writers.get("web")!), this.whole);
    const drafter = this.half && drafterOf(drafterPlan(manifest), this.half);
    const close = (): void => [drafter, writer].forEach((each) => each?.close());
    return { drafter: drafter ?? copyingDrafter(manifest), writer, close };
  }

  async close(): Promise<void> {
    await this.half?.release();
    await this.whole?.release();
  }
}
