/** A graph that is loaded with the first step. */

import type { Graph, GraphCache, StepInputs, StepResult } from "./base.js";

/** Load with the first step: the offline writer takes neither time nor memory while the device is online. */
export class DeferredGraph implements Graph {
  readonly rowShape = undefined;
  private loaded: Promise<Graph> | undefined;

  /** @param load loads a graph without memory rows. Called again after a failure. */
  constructor(private readonly load: () => Promise<Graph>) {}

  open(): GraphCache {
    return new DeferredCache(() => this.graph());
  }

  async release(): Promise<void> {
    const { loaded } = this;
    this.loaded = undefined;
    await (await loaded)?.release();
  }

  private async graph(): Promise<Graph> {
    this.loaded ??= this.load();
    try {
      return await this.loaded;
    } catch (error) {
      this.loaded = undefined;
      throw error;
    }
  }
}

class DeferredCache implements GraphCache {
  private opened: GraphCache | undefined;

  constructor(private readonly graph: () => Promise<Graph>) {}

  putRows(): void {
    throw new RangeError("a writer takes no memory rows");
  }

  truncate(length: number): void {
    this.opened?.truncate(length);
  }

  /** See {@link GraphCache.step}; fails if the graph cannot be loaded. */
  async step(inputs: StepInputs): Promise<StepResult> {
    const graph = await this.graph();
    this.opened ??= graph.open();
    return this.opened.step(inputs);
  }

  close(): void {
    this.opened?.close();
  }
}
