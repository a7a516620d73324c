/** The page's side: models in a worker, and what stands for their drafters. */

import { kvShapeOf } from "../backends/onnx.js";
import type { Bundle } from "../bundle/bundle.js";
import type { TargetEntry } from "../bundle/manifest.js";
import { drafterPlan, writerPlan, type DrafterPlan } from "../drafters/factory.js";
import type { ModelName } from "./messages.js";
import type { Drafters, InWorker, LoadOptions, Models } from "./models.js";
import { WorkerDrafter } from "./worker_drafter.js";
import { WorkerLink } from "./worker_link.js";

export class WorkerModels implements Models {
  private made = 0;
  private writerLoaded: Promise<void> | undefined;

  private constructor(
    private readonly bundle: Bundle,
    private readonly link: WorkerLink,
    private readonly options: InWorker & LoadOptions,
  ) {}

  /** See {@link loadModels}. */
  static async load(bundle: Bundle, options: InWorker & LoadOptions): Promise<WorkerModels> {
    const models = new WorkerModels(bundle, new WorkerLink(options.worker), options);
    try {
      const { entry, bytes } = await bundle.graph();
      await models.loadGraph("drafter", entry, bytes);
    } catch (error) {
      models.link.close();
      throw error;
    }
    return models;
  }

  forConversation(): Drafters {
    const { manifest } = this.bundle;
    const drafter = this.make("drafter", manifest.web!, drafterPlan(manifest), async () => undefined);
    const { webWriter } = manifest;
    const writer = webWriter && this.make("writer", webWriter, writerPlan(manifest), () => this.loadWriter());
    const close = (): void => [drafter, writer].forEach((each) => each?.close());
    return { drafter, writer, close };
  }

  async close(): Promise<void> {
    this.link.close();
  }

  private make(model: ModelName, entry: TargetEntry, plan: DrafterPlan, ready: () => Promise<void>): WorkerDrafter {
    const drafter = this.made++;
    const kvShape = kvShapeOf(entry);
    this.link.tell({ do: "make", drafter, model, kvShape, plan });
    const served = { drafter, kvShape, needsRows: model === "drafter", manners: plan.manners };
    return new WorkerDrafter(this.link, served, ready);
  }

  /** Once; again where it failed, as without a network to download it. */
  private async loadWriter(): Promise<void> {
    const load = async (): Promise<void> => {
      const { entry, bytes } = await this.bundle.writer();
      await this.loadGraph("writer", entry, bytes);
    };
    this.writerLoaded ??= load();
    try {
      await this.writerLoaded;
    } catch (error) {
      this.writerLoaded = undefined;
      throw error;
    }
  }

  private async loadGraph(model: ModelName, entry: TargetEntry, graph: Uint8Array): Promise<void> {
    const { ort, providers } = this.options;
    const bytes = graph.byteLength === graph.buffer.byteLength ? graph : graph.slice(); // what is transferred is whole
    await this.link.ask((call) => ({ do: "load", call, model, graph: bytes, entry, ort, providers }), [bytes.buffer as ArrayBuffer]);
  }
}
