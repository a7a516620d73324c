/** A graph that is loaded when it is first needed. */

import type { Backend, KvShape, StepInputs, StepResult } from "./backend.js";

/** Loads with its first step: what writes offline costs neither time nor memory while nobody is offline. */
export class DeferredBackend implements Backend {
  readonly needsRow = false;
  private loaded: Promise<Backend> | undefined;

  /**
   * @param load what it loads takes no memory rows. Called again where it failed.
   * @param kvShape of that.
   */
  constructor(
    private readonly load: () => Promise<Backend>,
    readonly kvShape: KvShape,
  ) {}

  /** See {@link Backend.step}; fails where it cannot be loaded. */
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
