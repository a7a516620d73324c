/** Bundles in a folder of the app: downloads that break, offers of a verifier, and a writer that was not downloaded. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { createServer, type Server } from "node:http";
import { type AddressInfo } from "node:net";
import { test } from "node:test";

import { BundleError, Models, downloadBundle, fetchBundle, openBundle, type DownloadFolder } from "../src/index.js";

const TOKEN = "secret";

function sha256(text: string): string {
  return createHash("sha256").update(text).digest("hex");
}

/** Return the files of a bundle, whose graphs are no graphs. */
function exported(version: string): Map<string, string> {
  const files = new Map(
    ["tokenizer.json", "chat_template.jinja", "half.onnx", "half.web.onnx", "writer.web.onnx"].map((name) => [name, `${name} ${version}`]),
  );
  const tensors = { inputs: [{ name: "self_keys", dtype: "float32", shape: ["S", 1, 2] }], outputs: [], details: { max_context: 64 } };
  const manifest = {
    schema_version: 2,
    fingerprints: { target: "a", tokenizer: "b", drafter: "c" },
    target: "tiny",
    vocab_size: 300,
    max_context: 512,
    stop_tokens: [2],
    special_tokens: {},
    targets: { onnx: { file: "half.onnx", ...tensors }, web: { file: "half.web.onnx", ...tensors } },
    web_writer: { file: "writer.web.onnx", ...tensors },
    files: Object.fromEntries([...files].map(([name, text]) => [name, { sha256: sha256(text), bytes: text.length }])),
  };
  return files.set("manifest.json", JSON.stringify(manifest));
}

/** A verifier with one bundle. */
class Verifier {
  files = exported("1");
  graphs = ["onnx", "web"];
  status = 200;
  private readonly server: Server = createServer((request, response) => {
    const [path] = request.url!.split("?") as [string];
    const file = path.replace(`/v1/bundles/${this.id}/`, "");
    if (this.status !== 200) response.writeHead(this.status).end();
    else if (request.headers.authorization !== `Bearer ${TOKEN}`) response.writeHead(401).end();
    else if (path === "/v1/bundles") response.end(JSON.stringify({ bundles: [{ id: this.id, graphs: this.graphs }] }));
    else if (this.files.has(file)) response.end(this.files.get(file));
    else response.writeHead(404).end();
  });

  get id(): string {
    return sha256(this.files.get("manifest.json")!);
  }

  get where(): { url: string; token: string } {
    return { url: `ws://127.0.0.1:${(this.server.address() as AddressInfo).port}`, token: TOKEN };
  }

  get bundle(): string {
    return `${this.where.url.replace("ws", "http")}/v1/bundles/${this.id}/`;
  }

  start(): Promise<void> {
    return new Promise((resolve) => this.server.listen(0, "127.0.0.1", () => resolve()));
  }

  stop(): void {
    this.server.closeAllConnections();
    this.server.close();
  }
}

/** A folder in memory whose downloads break from a number on. */
class Folder implements DownloadFolder {
  readonly files = new Map<string, string>();
  readonly downloaded: string[] = [];
  hashed: string[] = [];
  breaksAt = Infinity;
  has?: (file: string) => Promise<boolean>;

  pathOf = (file: string): string => `/app/${file}`;

  async readText(file: string): Promise<string> {
    const text = this.files.get(file);
    if (text === undefined) throw new Error(`there is no ${file}`);
    return text;
  }

  async download(url: string, file: string, headers: { readonly [name: string]: string }): Promise<void> {
    if (this.downloaded.length >= this.breaksAt) throw new Error("the network is gone");
    const reply = await fetch(url, { headers });
    if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
    this.downloaded.push(file);
    this.files.set(file, await reply.text());
  }

  async sha256(file: string): Promise<string | undefined> {
    this.hashed.push(file);
    const text = this.files.get(file);
    return text === undefined ? undefined : sha256(text);
  }
}

function serving(name: string, check: (verifier: Verifier, folder: Folder) => Promise<void>): void {
  test(`bundle: ${name}`, async () => {
    const verifier = new Verifier();
    await verifier.start();
    try {
      await check(verifier, new Folder());
    } finally {
      verifier.stop();
    }
  });
}

/** An onnxruntime that loads anything. */
const ort = { InferenceSession: { create: async () => ({ inputNames: ["self_keys"], outputNames: [] }) }, Tensor: class {} } as never;

for (const [name, writer] of [["has no writer", false], ["has its writer", true]] as const) {
  serving(`an app ${writer ? "with" : "without"} the writer's file ${name}`, async ({ bundle }, folder) => {
    const found = await downloadBundle(bundle, folder, { graphs: "onnx", writer, token: TOKEN });
    for (const has of [undefined, async (file: string) => folder.files.has(file)]) {
      if (has) folder.has = has;
      const models = await Models.load(found, { ort });
      assert.equal(models.forConversation().writer !== undefined, writer);
    }
  });
}

serving("a first download that breaks anywhere is no bundle, and the next one completes it", async ({ bundle }, folder) => {
  const options = { graphs: "onnx", token: TOKEN };
  for (let breaksAt = 0; breaksAt < 5; breaksAt++) {
    folder.files.clear();
    folder.downloaded.length = 0;
    folder.breaksAt = breaksAt;
    await assert.rejects(downloadBundle(bundle, folder, options), BundleError);
    await assert.rejects(openBundle(folder), BundleError);
    folder.breaksAt = Infinity;
    await downloadBundle(bundle, folder, options);
    await openBundle(folder);
    assert.equal(folder.files.get("half.onnx"), "half.onnx 1");
  }
});

serving("an update that breaks leaves the old bundle, or none", async (verifier, folder) => {
  const options = { graphs: "onnx", token: TOKEN };
  await downloadBundle(verifier.bundle, folder, options);
  verifier.files = exported("2");
  folder.breaksAt = 6;
  await assert.rejects(downloadBundle(verifier.bundle, folder, options), BundleError);
  assert.equal((await openBundle(folder)).bundle.manifest.files.get("half.onnx")!.sha256, sha256("half.onnx 1"));
  folder.breaksAt = 8;
  await assert.rejects(downloadBundle(verifier.bundle, folder, options), BundleError);
  await assert.rejects(openBundle(folder), /not finished/);
  folder.breaksAt = Infinity;
  await downloadBundle(verifier.bundle, folder, options);
  await openBundle(folder);
});

serving("the bundle that a verifier offers is fetched once, and again when it has changed", async (verifier, folder) => {
  folder.has = async (file) => folder.files.has(file);
  const fetched = (): Promise<unknown> => fetchBundle(verifier.where, folder, { graphs: "onnx" });
  await fetched();
  const all = ["manifest.json.new", "tokenizer.json", "chat_template.jinja", "half.onnx", "manifest.json"];
  assert.deepEqual(folder.downloaded.splice(0), all);
  folder.hashed = [];
  await fetched();
  assert.deepEqual([folder.downloaded, folder.hashed], [[], ["manifest.json"]]);
  await fetchBundle(verifier.where, folder); // no graph is wanted
  assert.deepEqual(folder.downloaded, []);
  await fetchBundle(verifier.where, folder, { graphs: "onnx", writer: true });
  assert.deepEqual(folder.downloaded.splice(0), ["manifest.json.new", "writer.web.onnx"]);
  verifier.files = exported("2");
  await fetched();
  assert.deepEqual(folder.downloaded.splice(0), all);
  for (const status of [503, 429]) {
    verifier.status = status;
    await fetched(); // the verifier is away
  }
  folder.files.clear();
  await assert.rejects(fetched(), /busy/);
});

serving("a verifier that never answers is away", async (verifier, folder) => {
  await fetchBundle(verifier.where, folder, { graphs: "onnx" });
  const { where } = verifier;
  verifier.stop(); // nothing but the timer is left to wait for
  const { fetch: answered, setTimeout: timer } = globalThis;
  globalThis.fetch = () => new Promise(() => undefined);
  // Seconds pass at once for the package alone: Node's own timers of connections call the global one, too.
  const hurried = (action: (...values: unknown[]) => void, milliseconds: number, ...values: unknown[]): unknown =>
    timer(action, milliseconds === 5000 ? 0 : milliseconds, ...values);
  globalThis.setTimeout = hurried as typeof timer;
  try {
    await fetchBundle(where, folder, { graphs: "onnx" });
    await assert.rejects(fetchBundle(where, new Folder()), /does not answer within/);
  } finally {
    Object.assign(globalThis, { fetch: answered, setTimeout: timer });
  }
});

serving("a refused token and a verifier without such graphs are told", async (verifier, folder) => {
  await fetchBundle(verifier.where, folder);
  await assert.rejects(fetchBundle({ ...verifier.where, token: "" }, folder), /asks for a token/);
  await assert.rejects(fetchBundle({ ...verifier.where, token: "schlüssel €" }, folder), /refused the token/);
  verifier.graphs = ["web"];
  await assert.rejects(fetchBundle(verifier.where, folder, { graphs: "onnx" }), /export one with --target onnx/);
});

serving("a platform without streams reads the list of bundles", async (verifier, folder) => {
  const streaming = globalThis.fetch;
  globalThis.fetch = async (url, options) => {
    const reply = await streaming(url, options);
    return { ok: reply.ok, status: reply.status, headers: reply.headers, text: () => reply.text() } as Response;
  };
  try {
    await fetchBundle(verifier.where, folder, { graphs: "web" });
  } finally {
    globalThis.fetch = streaming;
  }
});
