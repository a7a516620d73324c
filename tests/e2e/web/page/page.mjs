// Opens a bundle into a store of the browser, and drafts with it in a worker or in this thread.
import { Bundle, budgetOf, loadModels } from "/dist/src/index.js";
import { CacheStore, FileSystemStore, browserStore } from "/dist/src/browser/index.js";
import { follow } from "./deeds.mjs";

const ORT = "/ort/ort.wasm.bundle.min.mjs";
const stores = { best: browserStore, cache: async (name) => new CacheStore(await caches.open(name)) };

async function drafts({ store: kind, worker, ort = ORT, providers, rows = 0, prefix, levels }) {
  const store = await stores[kind]("bundle");
  const bundle = await Bundle.open(new URL("/bundle/", location.href).href, { store });
  const engine = worker
    ? { worker: new Worker("/dist/src/browser/worker.js", { type: "module" }), ort }
    : { ort: await import(ort) };
  const models = await loadModels(bundle, { ...engine, providers });
  const { drafter, writer } = models.forConversation();
  const [, kvHeads, headDim] = bundle.manifest.targets.get("web").inputs.find(({ name }) => name === "self_keys").shape;
  const numbers = { count: rows, kvHeads, headDim, data: Float32Array.from({ length: rows * kvHeads * headDim }, (_, at) => Math.sin(at)) };
  if (rows) drafter.addRows(0, numbers, numbers);
  const draft = await drafter.propose(prefix, budgetOf(1024, levels));
  const written = await writer.propose(prefix, budgetOf(1024, levels));
  const tokenizer = await bundle.tokenizer();
  await models.close();
  return { kind: store.constructor.name, opfs: store instanceof FileSystemStore, draft, written, size: tokenizer.vocabSize };
}

await follow({
  drafts,
  adapter: async () => ({ adapter: Boolean(await navigator.gpu?.requestAdapter()) }),
});
