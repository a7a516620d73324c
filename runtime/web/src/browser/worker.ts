/** The program of a worker with a page's models. It imports onnxruntime-web from the page's address for it. */

import type { Ort } from "../backends/onnx.js";
import { serveModels } from "../models/serve.js";
import type { PageLike } from "../models/types.js";

serveModels(self as unknown as PageLike, async (address) => {
  const module = (await import(address!)) as { default?: Ort } & Ort;
  const ort = module.default ?? module;
  ort.env.wasm.numThreads = 1; // pages without cross-origin isolation have one; a second hardly speeds up a model this small
  return ort;
});
