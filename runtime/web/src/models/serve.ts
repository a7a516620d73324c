/** The worker's side: loading graphs, and drafting with them. */

import { EngineError, saidBy, type Graph } from "../backends/base.js";
import { DeferredGraph } from "../backends/deferred.js";
import { OnnxGraph, type Ort } from "../backends/onnx.js";
import { drafterOf } from "../drafters/factory.js";
import type { MoaDrafter } from "../drafters/moa.js";
import { MoaError } from "../errors.js";
import type { Answer, ModelName, PageLike, Request } from "./types.js";

/**
 * Serve the models of one page.
 *
 * @param self the worker's own.
 * @param engine onnxruntime, or a function that imports it from the page's address.
 */
export function serveModels(self: PageLike, engine: Ort | ((address: string | undefined) => Promise<Ort>)): void {
  const served = new ServedModels(async (address) => (typeof engine === "function" ? engine(address) : engine));
  let last = Promise.resolve();
  self.addEventListener("message", ({ data }) => {
    const request = data as Request;
    last = last.then(async () => {
      const answer = await served.answer(request);
      if (answer) self.postMessage(answer);
    });
  });
}

class ServedModels {
  private readonly models = new Map<ModelName, Graph>();
  private readonly drafters = new Map<number, MoaDrafter>();
  private problem: string | undefined; // of a request without an answer; reported with the next answer

  constructor(private readonly engine: (address: string | undefined) => Promise<Ort>) {}

  /** Process a request; return its answer, if it has one. */
  async answer(request: Request): Promise<Answer | undefined> {
    try {
      if (this.problem) throw new EngineError(this.problem);
      return await this.do(request);
    } catch (error) {
      const said = error instanceof MoaError ? error.message : `the drafter failed: ${saidBy(error)}`;
      if ("call" in request) return { call: request.call, error: said };
      this.problem = said;
      return undefined;
    }
  }

  private async do(request: Request): Promise<Answer | undefined> {
    switch (request.do) {
      case "load":
        await this.load(request);
        return { call: request.call };
      case "make": {
        const { drafter, model, plan } = request;
        // A writer's graph is loaded with its first step.
        const graph = this.models.get(model) ?? new DeferredGraph(async () => this.models.get(model)!);
        this.drafters.set(drafter, drafterOf(plan, graph));
        return undefined;
      }
      case "addRows":
        this.drafters.get(request.drafter)?.addRows(request.start, request.keys, request.values);
        return undefined;
      case "truncateRows":
        this.drafters.get(request.drafter)?.truncateRows(request.length);
        return undefined;
      case "drop":
        this.drafters.get(request.drafter)?.close();
        this.drafters.delete(request.drafter);
        return undefined;
      case "propose": {
        const { call, drafter, prefix, budget, sampling } = request;
        const asked = this.drafters.get(drafter);
        if (!asked) throw new EngineError("the drafter was closed");
        return { call, tree: await asked.propose([...prefix], budget, sampling) };
      }
    }
  }

  private async load({ model, graph, entry, ort, providers }: Extract<Request, { do: "load" }>): Promise<void> {
    let engine: Ort;
    try {
      engine = await this.engine(ort);
    } catch (error) {
      throw new EngineError(`onnxruntime-web cannot be loaded from ${ort}: ${saidBy(error)}`, { cause: error });
    }
    this.models.set(model, await OnnxGraph.load(engine, graph, entry, providers));
  }
}
