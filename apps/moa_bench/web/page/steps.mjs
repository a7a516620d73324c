// Loads a graph and times its steps. Told {graph, session, entry} and {time: {tokens, cached, rows}}, it says what took how long.
import * as module from "/ort/ort.wasm.bundle.min.mjs";

const ort = module.default ?? module;
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "error";
let running;
let inputs;

async function load({ graph, session }) {
  const bytes = new Uint8Array(await (await fetch(graph)).arrayBuffer());
  const began = performance.now();
  running = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"], ...session });
  return { load_ms: performance.now() - began, version: ort.env.versions.web, agent: navigator.userAgent };
}

const floats = (dims) => new ort.Tensor("float32", Float32Array.from({ length: dims.reduce((a, b) => a * b, 1) }, Math.random), dims);
const whole = (numbers) => new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), [numbers.length]);

/** A chain of tokens behind cached ones; every token is a query. */
function prepare({ tokens, cached, rows, kv, vocab }) {
  const each = [...Array(tokens).keys()];
  const seen = each.flatMap((at) => Array.from({ length: cached + tokens }, (_, column) => Number(column <= cached + at)));
  inputs = {
    tokens: whole(each.map(() => Math.floor(Math.random() * vocab))),
    positions: whole(each.map((at) => cached + at)),
    queries: whole(each),
    self_keys: floats([cached, ...kv]),
    self_values: floats([cached, ...kv]),
    self_mask: new ort.Tensor("bool", Uint8Array.from(seen), [tokens, cached + tokens]),
  };
  if (running.inputNames.includes("memory_keys")) Object.assign(inputs, { memory_keys: floats([rows, ...kv]), memory_values: floats([rows, ...kv]) });
  return {};
}

async function step() {
  await running.run(inputs); // the weights are then where a step leaves them
  const began = performance.now();
  await running.run(inputs);
  return { ms: performance.now() - began };
}

onmessage = async ({ data }) => {
  try {
    if (data.load) postMessage(await load(data.load));
    else if (data.prepare) postMessage(prepare(data.prepare));
    else postMessage(await step());
  } catch (error) {
    postMessage({ error: String(error?.message ?? error) });
  }
};
