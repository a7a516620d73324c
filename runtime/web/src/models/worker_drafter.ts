/** A drafter whose model and caches are in a worker. */

import type { KvShape } from "../backends/base.js";
import type { Budget, Drafter } from "../drafters/base.js";
import { checkRows } from "../drafters/kv_buffer.js";
import type { Manners } from "../offline_stopping.js";
import type { KvArray } from "../session/memory_rows.js";
import { GREEDY, type Sampling } from "../session/sampling.js";
import { NOTHING, type DraftTree } from "../session/tree.js";
import type { WorkerLink } from "./worker_link.js";

interface Served {
  /** Its number. */
  readonly drafter: number;
  readonly kvShape: KvShape;
  readonly needsRows: boolean;
  readonly manners: Manners | null;
}

/** Stands for a `MoaDrafter` there. It counts rows itself, so that rows which do not fit are refused at once. */
export class WorkerDrafter implements Drafter {
  rows = 0;
  readonly needsRows: boolean;
  readonly manners: Manners | null;

  /** @param ready waited for before it drafts. */
  constructor(
    private readonly link: WorkerLink,
    private readonly served: Served,
    private readonly ready: () => Promise<void>,
  ) {
    this.needsRows = served.needsRows;
    this.manners = served.manners;
  }

  addRows(start: number, keys: KvArray, values: KvArray): void {
    checkRows(start, keys, values, this.rows, this.served.kvShape);
    this.rows = start + keys.count;
    const [ours, theirs] = [copied(keys), copied(values)]; // they may be parts of larger arrays
    const transfer = [ours.data.buffer, theirs.data.buffer] as ArrayBuffer[];
    this.link.tell({ do: "addRows", drafter: this.served.drafter, start, keys: ours, values: theirs }, transfer);
  }

  truncateRows(length: number): void {
    this.rows = Math.max(0, Math.min(this.rows, length));
    this.link.tell({ do: "truncateRows", drafter: this.served.drafter, length });
  }

  /** Give its caches back. Nothing is drafted afterwards. */
  close(): void {
    this.link.tell({ do: "drop", drafter: this.served.drafter });
  }

  /** See {@link MoaDrafter.propose}. Throws EngineError where the worker has ended too. */
  async propose(prefix: readonly number[], budget: Budget, sampling: Sampling = GREEDY): Promise<DraftTree> {
    await this.ready();
    const { drafter } = this.served;
    const tokens = Uint32Array.from(prefix);
    const request = (call: number) => ({ do: "propose", call, drafter, prefix: tokens, budget, sampling }) as const;
    return (await this.link.ask(request, [tokens.buffer])) ?? NOTHING;
  }
}

function copied(numbers: KvArray): KvArray {
  return { ...numbers, data: numbers.data.slice() };
}
