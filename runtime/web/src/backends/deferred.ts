/** A backend that loads its graph with the first step. */

import type { Backend, KvShape, StepInputs, StepResult } from "./base.js";

/** Load with the first step: the offline writer takes neither time nor memory while the device is online. */
export class DeferredBackend implements Backend {
  readonly needsRow = false;
  private loaded: Promise<Backend> | undefined;

  /**
   * @param load loads a backend without memory rows. Called again after a failure.
   * @param kvShape of that backend.
   */
  constructor(
    private readonly load: () => Promise<Backend>,
    readonly kvShape: KvShape,
  ) {}

  /** See {@link Backend.step}; fails if the graph cannot be loaded. */
  async step(inputs: StepInputs): Promise<StepResult> {
    this.loaded ??= this.load();
    try {
      await this.loaded;
    } catch (error) {
      this.loaded = undefined;
      throw error;
    }
    return (await this.loaded).step(inputs);
  }

  async release(): Promise<void> {
    const { loaded } = this;
    this.loaded = undefined;
    await (await loaded)?.release();
  }
}
