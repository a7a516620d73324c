/** The worker with the models: onnxruntime-web on one thread, so that the page's thread is free. */

import { serveModels } from "@moa-edge/runtime";
import * as ort from "onnxruntime-web/wasm";

declare const self: DedicatedWorkerGlobalScope;
declare const ENGINE: string; // set by the build: a file beside this one

ort.env.wasm.numThreads = 1; // a page without cross-origin isolation has no shared memory
ort.env.wasm.wasmPaths = { wasm: new URL(ENGINE, import.meta.url).href };
serveModels(self, ort);
