/** Loading a bundle's models, in this thread or in a worker. */

import { DeferredBackend } from "../backends/deferred.js";
import { OnnxBackend, kvShapeOf } from "../backends/onnx.js";
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
    private readonly half: OnnxBackend | undefined,
    private readonly whole: DeferredBackend | undefined,
  ) {}

  static async load(bundle: Bundle, { ort, providers }: InThisThread & LoadOptions): Promise<LocalModels> {
    const { architecture, webWriter } = bundle.manifest;
    let half: OnnxBackend | undefined;
    if (hasGraph(architecture)) {
      const { entry, bytes } = await bundle.graph();
      half = await OnnxBackend.load(ort, bytes, entry, providers);
    }
    const load = async (): Promise<OnnxBackend> => {
      const writer = await bundle.writer();
      return OnnxBackend.load(ort, writer.bytes, writer.entry, providers);
    };
    return new LocalModels(bundle, half, webWriter && new DeferredBackend(load, kvShapeOf(webWriter)));
  }

  forConversation(): Drafters {
    const { manifest } = this.bundle;
    const writer = this.whole && drafterOf(writerPlan(manifest), this.whole);
    const close = (): void => undefined; // caches are garbage-collected with their drafters
    const drafter = this.half ? drafterOf(drafterPlan(manifest), this.half) : copyingDrafter(manifest);
    return { drafter, writer, close };
  }

  async close(): Promise<void> {
    await this.half?.release();
    await this.whole?.release();
  }
}
