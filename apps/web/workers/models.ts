/** The worker that drafts: onnxruntime-web on one thread, so that the page's own thread is free. */

import { serveModels } from "@moa-edge/runtime";
import * as ort from "onnxruntime-web/wasm";

declare const self: DedicatedWorkerGlobalScope;
declare const ENGINE: string; // by the build: file beside this one

ort.env.wasm.numThreads = 1; // a page that is not isolated has no memory that threads share
ort.env.wasm.wasmPaths = { wasm: new URL(ENGINE, import.meta.url).href };
serveModels(self, ort);
