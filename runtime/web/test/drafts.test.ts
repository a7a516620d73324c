/** The drafter does with a graph what Python's does: alone, and behind a worker's messages. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { MoaDrafter, NgramMixture, RowsMismatchError, budgetOf, type Budget, type Drafter, type KvArray } from "../src/index.js";
import type { TargetEntry } from "../src/bundle/manifest.js";
import { NativeBridge } from "../src/native/bridge.js";
import type { NativeHost } from "../src/native/native_host.js";
import { CountingGraph } from "./counting_graph.js";
import { budgetFrom, samplingOf, type Fields } from "./figure_inputs.js";
import { alike, plain, read, type Value } from "./vectors.js";

interface Case {
  readonly needs_a_row: boolean;
  readonly ngrams: boolean;
  readonly max_context: number;
  readonly told: readonly (Fields & { readonly call: string })[];
}

test("drafts: what is told, step by step", async () => {
  for (const [number, given] of read<Case>("figures/moa_drafts").entries()) {
    const graph = new CountingGraph(given.needs_a_row);
    const mixture = given.ngrams ? new NgramMixture([0]) : undefined;
    const drafter = new MoaDrafter(graph, { maxContext: given.max_context, stopTokens: [0], mixture });
    assert.equal(drafter.needsRows, given.needs_a_row);
    for (const [at, told] of given.told.entries()) {
      const came = { ...(await tell(drafter, told)), steps: graph.steps, rows: drafter.rows };
      graph.steps = [];
      const expected = Object.fromEntries(Object.keys(came).map((key) => [key, told[key]!]));
      if (!alike(came, expected)) assert.deepEqual(came, expected, `case ${number}, call ${at}`);
      assert.equal("raises" in told, "raises" in came);
    }
  }
});

async function tell(drafter: Drafter, told: Fields & { readonly call: string }): Promise<Fields> {
  switch (told.call) {
    case "add_rows":
      try {
        drafter.addRows(told["start"] as number, numbers(told["keys"]!), numbers(told["values"]!));
      } catch (error) {
        assert.ok(error instanceof RowsMismatchError);
        return { raises: error.message };
      }
      return {};
    case "truncate_rows":
      drafter.truncateRows(told["length"] as number);
      return {};
    case "propose": {
      const tree = await drafter.propose(told["prefix"] as number[], budgetFrom(told["budget"]!), samplingOf(told));
      return { tree: plain(tree) };
    }
    default:
      throw new Error(`the vectors call ${told.call}`);
  }
}

function numbers(said: Value): KvArray {
  const rows = said as number[][];
  return { kvHeads: 1, headDim: 2, count: rows.length, data: Float32Array.from(rows.flat()) };
}

test("drafts: rows of other heads are refused, and one of zeros stands for none", async () => {
  const graph = new CountingGraph(true);
  const drafter = new MoaDrafter(graph, { maxContext: 10 });
  const draft = () => drafter.propose([3, 4], budgetOf(1, 1));
  await draft();
  const other = { kvHeads: 2, headDim: 2, count: 1, data: new Float32Array(4) };
  assert.throws(() => drafter.addRows(0, other, other), RowsMismatchError);
  drafter.addRows(0, numbers([[1, 2]]), numbers([[1, 2]]));
  await draft();
  drafter.truncateRows(0);
  await draft();
  assert.deepEqual(graph.memory, [[0, 0], [1, 2], [0, 0]]);
});

test("drafts: an empty prefix is a mistake", async () => {
  const drafter = new MoaDrafter(new CountingGraph(true), { maxContext: 10 });
  await assert.rejects(drafter.propose([], budgetFrom({ nodes: 1, levels: 1, prices: {} })), /empty prefix/);
});

test("drafts: a graph of a fixed size is not asked for more", async () => {
  const graph = Object.assign(new CountingGraph(false), { maxPositions: 12 });
  const drafter = new MoaDrafter(graph, { maxContext: 100 });
  const drafted = async (length: number, budget: Budget): Promise<number> =>
    (await drafter.propose(Array.from({ length }, () => 1), budget)).tokens.length;
  assert.equal(await drafted(10, budgetOf(8, 8)), 2);
  assert.equal(await drafted(12, budgetOf(8, 8)), 0);
  assert.ok((await drafted(8, budgetOf(60, 8, { width: 3, branches: true, depth: 8 }))) > 0);
  assert.ok(graph.steps.length > 2);
  assert.deepEqual(graph.steps.filter(([fresh, cached]) => fresh! + cached! > 12), []);
});

test("drafts: a program's graph has the size that the manifest names", async () => {
  const host = { loadGraph: (call: number) => bridge.answered(call, 7) } as unknown as NativeHost;
  const bridge = new NativeBridge(host);
  const entry = (shape: (string | number)[]): TargetEntry => {
    const inputs = [{ name: "self_keys", dtype: "float32", shape }];
    return { file: "graph", inputs, outputs: [], states: [], session: {} };
  };
  assert.equal((await bridge.load(entry([1, 3, 2048, 64]))).maxPositions, 2048);
  assert.equal((await bridge.load(entry(["S", 3, 64]))).maxPositions, undefined);
});
