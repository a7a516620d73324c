// The browser's side of bench.mjs, for the page and for its worker: steps run in a worker, as in the runtime.
if (typeof document !== "undefined") await serveWorker();
else await answerJobs();

/** In the page: hand jobs of the program to a worker, and its answers back. */
async function serveWorker() {
  const say = (said) => fetch("/said", { method: "POST", body: JSON.stringify(said) });
  const worker = new Worker(import.meta.url, { type: "module" });
  worker.onerror = ({ message }) => say({ error: message || "the worker cannot be started, or there is too little memory" });
  for (;;) {
    const answered = new Promise((done) => (worker.onmessage = ({ data }) => done(data)));
    worker.postMessage(await (await fetch("/next")).json());
    await say(await answered);
  }
}

/** In the worker: load a graph, prepare inputs, time steps. */
async function answerJobs() {
  const waiting = [];
  onmessage = ({ data }) => waiting.push(data); // until the engine is there
  const module = await import("/ort/ort.wasm.bundle.min.mjs");
  const ort = module.default ?? module;
  ort.env.wasm.numThreads = 1;
  ort.env.logLevel = "error";
  let session, inputs;

  const floats = (dims) => new ort.Tensor("float32", Float32Array.from({ length: dims.reduce((a, b) => a * b, 1) }, Math.random), dims);
  const whole = (numbers) => new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), [numbers.length]);

  const jobs = {
    async load({ graph, session: options }) {
      const bytes = new Uint8Array(await (await fetch(graph)).arrayBuffer());
      const began = performance.now();
      session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"], ...options });
      return { load_ms: performance.now() - began, version: ort.env.versions.web, agent: navigator.userAgent };
    },

    /** Make a chain of tokens after cached ones; every token is a query. */
    prepare({ tokens, context, vocab }) {
      const each = [...Array(tokens).keys()];
      const seen = each.flatMap((at) => Array.from({ length: context + tokens }, (_, column) => Number(column <= context + at)));
      const shapes = Object.fromEntries(session.inputMetadata.map(({ name, shape }) => [name, shape]));
      inputs = {
        tokens: whole(each.map(() => Math.floor(Math.random() * vocab))),
        positions: whole(each.map((at) => context + at)),
        queries: whole(each),
        self_mask: new ort.Tensor("bool", Uint8Array.from(seen), [tokens, context + tokens]),
      };
      for (const name of ["self_keys", "self_values", "memory_keys", "memory_values"])
        if (shapes[name]) inputs[name] = floats([context, ...shapes[name].slice(1)]);
      return {};
    },

    async time({ repeats, warmUp }) {
      const ms = [];
      for (let count = 0; count < warmUp + repeats; count++) {
        await session.run(inputs); // leaves the weights in the caches as the step before does
        const began = performance.now();
        await session.run(inputs);
        ms.push(performance.now() - began);
      }
      return { ms: ms.slice(warmUp) };
    },
  };

  const answer = async (job) => {
    try {
      postMessage(await jobs[job.do](job));
    } catch (error) {
      postMessage({ error: String(error?.message ?? error).replaceAll(/\s+/g, " ") });
    }
  };
  onmessage = ({ data }) => answer(data);
  waiting.forEach(answer);
}
