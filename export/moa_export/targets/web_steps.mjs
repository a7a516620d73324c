// Runs one graph in onnxruntime-web: node web_steps.mjs MODULE GRAPH SESSION
//
// A message is four bytes, little end first: the length of a JSON text; the text; then the bytes of its tensors, one
// after the other. It comes in as {"tensors": [{"name", "type", "dims", "bytes"}]} and goes out in the same form, or as
// {"error": "..."}. The first one, without tensors, goes out when the graph is loaded. The end of the input ends it.
import { readFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

const ARRAYS = { int64: BigInt64Array, float32: Float32Array, bool: Uint8Array };
const [module, graph, session] = process.argv.slice(2);

console.log = console.error; // stdout is for messages alone

class Input {
  #stream = process.stdin[Symbol.asyncIterator]();
  #left = Buffer.alloc(0);

  /** So many bytes, in memory of their own; null at the end. */
  async take(count) {
    const parts = [this.#left];
    let held = this.#left.length;
    while (held < count) {
      const { value, done } = await this.#stream.next();
      if (done) return null;
      parts.push(value);
      held += value.length;
    }
    const all = Buffer.concat(parts);
    this.#left = all.subarray(count);
    return new Uint8Array(all.subarray(0, count));
  }
}

function send(message, arrays = []) {
  const text = Buffer.from(JSON.stringify(message));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(text.length);
  process.stdout.write(Buffer.concat([length, text, ...arrays]));
}

const bytesOf = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength);

async function step(ort, running, input, told) {
  const given = {};
  for (const { name, type, dims, bytes } of told.tensors) {
    const data = await input.take(bytes);
    given[name] = new ort.Tensor(type, new ARRAYS[type](data.buffer), dims);
  }
  const made = await running.run(given);
  const tensors = Object.entries(made).map(([name, { type, dims, data }]) => ({ name, type, dims, bytes: data.byteLength }));
  send({ tensors }, tensors.map(({ name }) => bytesOf(made[name].data)));
}

try {
  const loaded = await import(pathToFileURL(module));
  const ort = loaded.default ?? loaded;
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  const options = { executionProviders: ["wasm"], ...JSON.parse(session) };
  const running = await ort.InferenceSession.create(await readFile(graph), options);
  send({ tensors: [] });
  const input = new Input();
  for (;;) {
    const length = await input.take(4);
    if (length === null) process.exit(0);
    const text = await input.take(new DataView(length.buffer).getUint32(0, true));
    await step(ort, running, input, JSON.parse(Buffer.from(text)));
  }
} catch (error) {
  send({ error: String(error?.message ?? error) });
  process.exitCode = 1;
}
