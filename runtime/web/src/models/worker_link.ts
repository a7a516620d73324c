/** Requests to a worker, and its answers. */

import { EngineError } from "../backends/base.js";
import type { DraftTree } from "../session/tree.js";
import type { Answer, Request, WorkerLike } from "./messages.js";

interface Waiting {
  readonly resolve: (tree: DraftTree | undefined) => void;
  readonly reject: (error: Error) => void;
}

/** A worker whose end, or failure, is a sentence to everybody who waits, and who asks later. */
export class WorkerLink {
  private readonly waiting = new Map<number, Waiting>();
  private calls = 0;
  private ended: EngineError | undefined;

  constructor(private readonly worker: WorkerLike) {
    worker.addEventListener("message", ({ data }) => this.answered(data as Answer));
    worker.addEventListener("error", ({ message }) => {
      this.end(`the drafter's worker failed: ${message || "its program cannot be loaded, or there is too little memory"}`);
    });
    worker.addEventListener("messageerror", () => this.end("the drafter's worker failed: its answer cannot be read"));
  }

  /** Say something that is not answered. */
  tell(request: Request, transfer: ArrayBuffer[] = []): void {
    if (!this.ended) this.worker.postMessage(request, transfer);
  }

  /**
   * Ask for something.
   *
   * @param request with the number that its answer will have.
   * @throws EngineError it cannot be done, or the worker has ended.
   */
  ask(request: (call: number) => Request, transfer: ArrayBuffer[] = []): Promise<DraftTree | undefined> {
    return new Promise((resolve, reject) => {
      if (this.ended) throw this.ended;
      const call = this.calls++;
      this.waiting.set(call, { resolve, reject });
      this.worker.postMessage(request(call), transfer);
    });
  }

  close(): void {
    this.end("the drafter was closed");
  }

  private answered(answer: Answer): void {
    const waiting = this.waiting.get(answer.call);
    this.waiting.delete(answer.call);
    if ("error" in answer) waiting?.reject(new EngineError(answer.error));
    else waiting?.resolve(answer.tree);
  }

  private end(why: string): void {
    this.ended ??= new EngineError(why);
    this.worker.terminate();
    for (const { reject } of this.waiting.values()) reject(this.ended);
    this.waiting.clear();
  }
}
