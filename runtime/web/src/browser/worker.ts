/** The program of the worker that has a page's models. It imports onnxruntime-web from the address that the page gives. */

import type { Ort } from "../backends/onnx.js";
import type { PageLike } from "../models/messages.js";
import { serveModels } from "../models/serve.js";

serveModels(self as unknown as PageLike, async (address) => {
  const module = (await import(address!)) as { default?: Ort } & Ort;
  const ort = module.default ?? module;
  ort.env.wasm.numThreads = 1; // a page without cross-origin isolation has one; two hardly serve a model this small
  return ort;
});
