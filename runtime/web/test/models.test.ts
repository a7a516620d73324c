/** A bundle's models draft the same in this thread and in a worker, and what fails is a sentence. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { Bundle, EngineError, MoaDrafter, NgramMixture, RowsMismatchError, budgetOf, loadModels, serveModels } from "../src/index.js";
import type { Drafters, Manifest, KvArray, Ort } from "../src/index.js";
import type { WorkerLike } from "../src/models/types.js";
import { CountingGraph } from "./counting_graph.js";
import { CountingOrt } from "./counting_ort.js";

const ENTRY = { inputs: [{ name: "self_keys", dtype: "float32", shape: ["S", 1, 2] }], outputs: [], states: [], session: { extra: 1 } };
const MANIFEST: Manifest = {
  fingerprints: { target: "a", tokenizer: "b", drafter: "c" },
  target: "tiny",
  targetParameters: 0,
  architecture: "moa",
  vocabSize: 12,
  maxContext: 1000,
  stopTokens: [0],
  specialTokens: {},
  targets: new Map([["web", { file: "drafter.onnx", ...ENTRY }]]),
  writers: new Map([["web", { file: "writer.onnx", ...ENTRY, maxContext: 20 }]]),
  manners: null,
  sampling: null,
  files: new Map([["drafter.onnx", { sha256: "", bytes: 7 }], ["writer.onnx", { sha256: "", bytes: 6 }]]),
};

test("models: a graph of an older version that begins with layers of the target is refused", async () => {
  const inputs = [...ENTRY.inputs, { name: "memory_keys", dtype: "float32", shape: ["M", 2, 2] }];
  const bundle = bundleOf([], { ...MANIFEST, targets: new Map([["web", { file: "drafter.onnx", ...ENTRY, inputs }]]) });
  const line = /^EngineError: drafter\.onnx begins with layers of the target, which is no longer supported$/;
  await assert.rejects(loadModels(bundle, { ort: new CountingOrt() }), line);
});

/** A bundle in memory, and what was read of it. */
function bundleOf(read: string[] = [], manifest: Manifest = MANIFEST): Bundle {
  return new Bundle(manifest, {
    read: async (name) => {
      read.push(name);
      return new TextEncoder().encode(name.replace(".onnx", ""));
    },
  });
}

type Listener = (event: { data?: unknown; message?: string }) => void;

/** A worker in this thread: what is said goes through the same copies as between threads. */
class Worker implements WorkerLike {
  ended = false;
  private readonly heard = new Map<string, Listener>();
  private inside: Listener = () => undefined;

  constructor(engine: Parameters<typeof serveModels>[1]) {
    const postMessage = (message: unknown): void => this.later("message", { data: structuredClone(message) });
    serveModels({ postMessage, addEventListener: (_, listener) => void (this.inside = listener as Listener) }, engine);
  }

  postMessage(message: unknown, transfer: ArrayBuffer[]): void {
    const data = structuredClone(message, { transfer });
    setImmediate(() => this.ended || this.inside({ data }));
  }

  addEventListener(type: string, listener: unknown): void {
    this.heard.set(type, listener as Listener);
  }

  terminate(): void {
    this.ended = true;
  }

  /** As the browser tells the page. */
  later(type: string, event: { data?: unknown; message?: string }): void {
    setImmediate(() => this.ended || this.heard.get(type)?.(event));
  }
}

function rows(count: number, start = 0): KvArray {
  return { count, kvHeads: 1, headDim: 2, data: Float32Array.from({ length: 2 * count }, (_, at) => start + at) };
}

const TEXT = [3, 4, 5, 3, 4, 7];

async function drafted({ drafter: made, writer }: Drafters): Promise<unknown[]> {
  const drafter = made!;
  drafter.addRows(0, rows(4), rows(4, 1));
  const chain = await drafter.propose(TEXT, budgetOf(8, 5));
  drafter.truncateRows(2);
  drafter.addRows(2, rows(3), rows(3, 1));
  const tree = await drafter.propose(TEXT, budgetOf(9, 3, { width: 2, branches: true }));
  return [chain, tree, drafter.rows, drafter.needsRows, drafter.stoppingRule, await writer!.propose(TEXT, budgetOf(4, 4))];
}

async function expected(): Promise<unknown[]> {
  const mixture = new NgramMixture([0]);
  const stoppingRule = { leastProbability: 0.4, repeated: 12, longest: 8 };
  const drafter = new MoaDrafter(new CountingGraph(true), { maxContext: 1000, stopTokens: [0], mixture, stoppingRule });
  const writer = new MoaDrafter(new CountingGraph(false), { maxContext: 20, stopTokens: [0] });
  return drafted({ drafter, writer, close: () => undefined });
}

test("models: a worker drafts what this thread drafts", async () => {
  const [here, there] = [new CountingOrt(), new CountingOrt()];
  const worker = new Worker(there);
  const local = await loadModels(bundleOf(), { ort: here, providers: ["webgpu", "wasm"] });
  const served = await loadModels(bundleOf(), { worker });
  assert.deepEqual(await drafted(local.forConversation()), await expected());
  const drafters = served.forConversation();
  assert.deepEqual(await drafted(drafters), await expected());
  assert.deepEqual(await drafted(served.forConversation()), await expected()); // beside the first, with caches of its own
  drafters.close();
  await assert.rejects(async () => drafters.drafter!.propose(TEXT, budgetOf(1, 1)), /^EngineError: the drafter was closed$/);
  assert.deepEqual(here.loaded.map(({ options }) => options), Array(2).fill({ executionProviders: ["webgpu", "wasm"], logSeverityLevel: 3, extra: 1 }));
  assert.deepEqual(there.loaded.map(({ graph }) => graph), ["drafter", "writer"]);
  await local.close();
  assert.equal(here.released, 2);
  await served.close();
  assert.equal(worker.ended, true);
});

test("models: the writer is read and loaded when it is needed, and again where that failed", async () => {
  for (const inWorker of [false, true]) {
    const read: string[] = [];
    const bundle = bundleOf(read);
    const ort = new CountingOrt();
    const models = await loadModels(bundle, inWorker ? { worker: new Worker(ort) } : { ort });
    const { drafter: made, writer } = models.forConversation();
    const drafter = made!;
    await drafter.propose(TEXT, budgetOf(1, 1));
    assert.deepEqual(read, ["drafter.onnx"]);
    const whole = bundle.writer.bind(bundle);
    bundle.writer = async () => Promise.reject(new EngineError("no network"));
    await assert.rejects(async () => writer!.propose(TEXT, budgetOf(1, 1)), /^EngineError: no network$/);
    bundle.writer = whole;
    assert.equal((await writer!.propose(TEXT, budgetOf(2, 2))).tokens.length, 2);
    await writer!.propose(TEXT, budgetOf(2, 2));
    assert.deepEqual(read, ["drafter.onnx", "writer.onnx"]);
    const without = await loadModels(bundleOf([], { ...MANIFEST, writers: new Map() }), { ort });
    assert.equal(without.forConversation().writer, undefined);
  }
});

test("models: rows that do not fit are refused at once", async () => {
  const models = await loadModels(bundleOf(), { worker: new Worker(new CountingOrt()) });
  const drafter = models.forConversation().drafter!;
  drafter.addRows(0, rows(2), rows(2));
  assert.throws(() => drafter.addRows(3, rows(1), rows(1)), RowsMismatchError);
  assert.throws(() => drafter.addRows(2, { ...rows(1), headDim: 3 }, rows(1)), /expected \(1, 1, 2\)/);
  assert.equal(drafter.rows, 2);
});

test("models: a bundle without a graph copies, and writes nothing offline, or leaves drafting to the server", async () => {
  const plain = (architecture: string): Bundle => bundleOf([], { ...MANIFEST, architecture, targets: new Map(), writers: new Map() });
  for (const how of [{ ort: new CountingOrt() }, { worker: new Worker(new CountingOrt()) }]) {
    const { drafter } = (await loadModels(plain("sssd"), how)).forConversation();
    assert.deepEqual((await drafter!.propose(TEXT.slice(0, 5), budgetOf(1, 1))).tokens, [5]);
    assert.equal(drafter!.stoppingRule?.longest, 0);
    assert.equal((await loadModels(plain("none"), how)).forConversation().drafter, undefined);
  }
});

test("models: several drafters of one graph wait for one another", async () => {
  const models = await loadModels(bundleOf(), { ort: new CountingOrt() });
  const made = await Promise.all([1, 2, 3].map(async () => models.forConversation().drafter!.propose(TEXT, budgetOf(4, 4))));
  assert.deepEqual(made[0], made[2]);
});

test("models: what fails is one sentence", async () => {
  const bad = new Bundle(MANIFEST, { read: async () => Uint8Array.of(1) });
  const line = /^EngineError: onnxruntime cannot load drafter\.onnx: no graph$/;
  await assert.rejects(loadModels(bad, { ort: new CountingOrt() }), line);
  await assert.rejects(loadModels(bad, { worker: new Worker(new CountingOrt()) }), line);
  const missing = async (): Promise<Ort> => Promise.reject(new Error("404"));
  await assert.rejects(loadModels(bundleOf(), { worker: new Worker(missing), ort: "/ort.mjs" }), /cannot be loaded from \/ort\.mjs: 404$/);
  await assert.rejects(loadModels(bundleOf([], { ...MANIFEST, targets: new Map() }), { ort: new CountingOrt() }), /no graph for onnxruntime-web/);
  const head = bundleOf([], { ...MANIFEST, architecture: "eagle3" });
  await assert.rejects(loadModels(head, { ort: new CountingOrt() }), /^BundleError: .*EAGLE-3/);
  const ort = new CountingOrt();
  const models = await loadModels(bundleOf(), { worker: new Worker(ort) });
  const drafter = models.forConversation().drafter!;
  ort.fails = "out of memory";
  await assert.rejects(async () => drafter.propose(TEXT, budgetOf(1, 1)), /cannot run the graph: out of memory$/);
  ort.fails = undefined;
  assert.equal((await drafter.propose(TEXT, budgetOf(1, 1))).tokens.length, 1); // it may be asked again
});

test("models: a worker that ends is a sentence to who waits, and to who asks later", async () => {
  const worker = new Worker(new CountingOrt());
  const models = await loadModels(bundleOf(), { worker });
  const drafter = models.forConversation().drafter!;
  worker.postMessage = () => undefined; // it is gone
  const waiting = drafter.propose(TEXT, budgetOf(1, 1));
  worker.later("error", { message: "" });
  const said = /the drafter's worker failed: its program cannot be loaded, or there is too little memory$/;
  await assert.rejects(async () => waiting, said);
  await assert.rejects(async () => drafter.propose(TEXT, budgetOf(1, 1)), said);
  drafter.truncateRows(0); // without a message to the worker
});
