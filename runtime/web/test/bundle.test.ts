/** A bundle is downloaded once, piece by piece, checked, and taken from the store from then on. */

import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { readManifest } from "../src/bundle/manifest.js";
import { computed, sha256 } from "../src/bundle/sha256.js";
import { Bundle, BundleError, MemoryStore, type BundleStore } from "../src/index.js";
import { FolderStore, openBundle } from "../src/node/index.js";
import { readJson } from "./vectors.js";

const PIECE = 1 << 20;
const TENSORS = { inputs: [{ name: "self_keys", dtype: "float32", shape: ["S", 1, 2] }], outputs: [] };

/** A bundle as a server has it. */
class Served {
  readonly files = new Map<string, Uint8Array>();
  /** Names asked for, with the ranges. */
  asked: string[] = [];
  /** Bytes after which a reply breaks, each of them once. */
  breaks: number[] = [];
  ranges = true;
  /** In the place of one that fits the files. */
  stale: Record<string, unknown> | undefined;
  url = "";
  /** As a verifier: the token that it wants, and its offers beside the bundle. */
  token = "";
  others: unknown[] = [];
  private readonly server: Server;

  constructor() {
    const tokenizer = new TextEncoder().encode(JSON.stringify(readJson("texts/tokenizer.json")));
    this.files.set("tokenizer.json", tokenizer);
    this.files.set("chat_template.jinja", new TextEncoder().encode("{{ messages[0].content }}"));
    this.files.set("half.onnx", randomBytes(3 * PIECE + 12_345));
    this.files.set("writer.onnx", randomBytes(2 * PIECE));
    this.server = createServer((request, response) => this.reply(request, response));
  }

  get manifest(): Record<string, unknown> {
    const digest = (bytes: Uint8Array): string => createHash("sha256").update(bytes).digest("hex");
    const files = Array.from(this.files, ([name, bytes]) => [name, { sha256: digest(bytes), bytes: bytes.length }]);
    return {
      schema_version: 2,
      fingerprints: { target: "a", tokenizer: "b", drafter: "c" },
      target: "tiny",
      vocab_size: 300,
      max_context: 512,
      stop_tokens: [2],
      special_tokens: {},
      targets: { web: { file: "half.onnx", ...TENSORS, details: { session: { extra: 1 } } } },
      web_writer: { file: "writer.onnx", ...TENSORS, details: { max_context: 256 } },
      files: Object.fromEntries(files),
    };
  }

  get id(): string {
    return createHash("sha256").update(JSON.stringify(this.manifest)).digest("hex");
  }

  async start(): Promise<void> {
    await new Promise<void>((resolve) => this.server.listen(0, "127.0.0.1", resolve));
    this.url = `${this.verifier}a bundle/`;
  }

  get verifier(): string {
    return `http://127.0.0.1:${(this.server.address() as AddressInfo).port}/`;
  }

  stop(): void {
    this.server.closeAllConnections();
    this.server.close();
  }

  private reply(request: IncomingMessage, response: ServerResponse): void {
    const name = decodeURIComponent(request.url!).replace(/^\/(a bundle|v1\/bundles\/[0-9a-f]{64})\//, "");
    const { range, authorization } = request.headers;
    if (this.token && authorization !== `Bearer ${this.token}`) return void response.writeHead(401).end();
    if (name === "/v1/bundles") {
      return void response.end(JSON.stringify({ bundles: [...this.others, { id: this.id, graphs: ["onnx", "web"] }] }));
    }
    this.asked.push(range ? `${name} ${range}` : name);
    const bytes = name === "manifest.json" ? Buffer.from(JSON.stringify(this.stale ?? this.manifest)) : this.files.get(name);
    if (!bytes) return void response.writeHead(404).end();
    const start = this.ranges && range ? Number(/\d+/.exec(range)![0]) : 0;
    if (start >= bytes.length) return void response.writeHead(416).end();
    const rest = bytes.subarray(start);
    response.writeHead(start ? 206 : 200, { "content-length": rest.length });
    const broken = name === "half.onnx" ? this.breaks.shift() : undefined;
    if (broken === undefined) response.end(rest);
    else response.write(rest.subarray(0, broken), () => response.destroy());
  }
}

async function serving(check: (served: Served, store: MemoryStore) => Promise<void>): Promise<void> {
  const served = new Served();
  await served.start();
  try {
    await check(served, new MemoryStore());
  } finally {
    served.stop();
  }
}

test("bundle: a second start asks for nothing", () =>
  serving(async (served, store) => {
    const seen: [number, number][] = [];
    assert.equal(await Bundle.isHeld(served.url, { store }), false);
    const first = await Bundle.open(served.url, { store, onProgress: (received, total) => seen.push([received, total]) });
    assert.deepEqual(served.asked.sort(), ["chat_template.jinja", "half.onnx", "manifest.json", "tokenizer.json"]);
    const total = ["chat_template.jinja", "half.onnx", "tokenizer.json"].reduce((sum, name) => sum + served.files.get(name)!.length, 0);
    assert.deepEqual(seen.at(-1), [total, total]);
    assert.ok(seen.every(([received, of], at) => of === total && received >= (seen[at - 1]?.[0] ?? 0)));
    served.asked = [];
    assert.equal(await Bundle.isHeld(served.url, { store }), true);
    assert.equal(await Bundle.isHeld(served.url, { store, writer: true }), false);
    assert.equal(await Bundle.isHeld(`${served.url}other/`, { store }), false);
    const again = await Bundle.open(served.url, { store });
    for (const bundle of [first, again]) {
      const { entry, bytes } = await bundle.graph();
      assert.deepEqual(Buffer.from(bytes), served.files.get("half.onnx"));
      assert.deepEqual(entry.session, { extra: 1 });
      assert.equal((await bundle.tokenizer()).stopTokens.has(2), true);
    }
    assert.deepEqual(served.asked, []);
    assert.equal((await again.writer()).bytes.length, 2 * PIECE); // only when asked for
    assert.deepEqual(served.asked, ["writer.onnx"]);
    const whole = await Bundle.open(served.url, { store, writer: true });
    assert.equal((await whole.writer()).entry.maxContext, 256);
    assert.deepEqual(served.asked, ["writer.onnx"]);
  }));

test("bundle: without a drafter no graph is downloaded", () =>
  serving(async (served, store) => {
    await Bundle.open(served.url, { store, drafter: false });
    assert.equal(served.asked.includes("half.onnx"), false);
  }));

test("bundle: a broken download goes on where it broke", () =>
  serving(async (served, store) => {
    served.breaks = [PIECE + 1000, PIECE + 5];
    const bundle = await Bundle.open(served.url, { store });
    const graph = served.asked.filter((name) => name.startsWith("half"));
    assert.deepEqual(graph, ["half.onnx", `half.onnx bytes=${PIECE}-`, `half.onnx bytes=${2 * PIECE}-`]);
    assert.deepEqual(Buffer.from((await bundle.graph()).bytes), served.files.get("half.onnx"));
  }));

test("bundle: where nothing more comes it stops with a sentence, and the next start goes on", () =>
  serving(async (served, store) => {
    served.breaks = [2 * PIECE + 7, 100];
    await assert.rejects(Bundle.open(served.url, { store }), (error: Error) => {
      return error instanceof BundleError && /half\.onnx stopped at 2\.1 of 3\.2 MB .* what came is kept/.test(error.message);
    });
    served.asked = [];
    await Bundle.open(served.url, { store });
    assert.deepEqual(served.asked, ["manifest.json", `half.onnx bytes=${2 * PIECE}-`]);
  }));

test("bundle: a server without ranges sends all of it again", () =>
  serving(async (served, store) => {
    served.ranges = false;
    served.breaks = [PIECE + 1000];
    const bundle = await Bundle.open(served.url, { store });
    assert.deepEqual(Buffer.from((await bundle.graph()).bytes), served.files.get("half.onnx"));
  }));

test("bundle: what is asked to stop stops", () =>
  serving(async (served, store) => {
    const controller = new AbortController();
    const onProgress = (received: number): void => {
      if (received > 2 * PIECE) controller.abort(new Error("enough"));
    };
    await assert.rejects(Bundle.open(served.url, { store, signal: controller.signal, onProgress }), /enough/);
    assert.ok((await store.names()).length >= 2);
  }));

test("bundle: a file that is another is refused, and one that the store damaged is fetched anew", () =>
  serving(async (served, store) => {
    const bundle = await Bundle.open(served.url, { store });
    const name = (await store.names()).find((each) => each.endsWith(".3"))!;
    await store.put(name, new Uint8Array(12_345));
    assert.deepEqual(Buffer.from((await bundle.graph()).bytes), served.files.get("half.onnx"));
    served.stale = served.manifest;
    served.files.set("half.onnx", randomBytes(3 * PIECE + 12_345));
    await assert.rejects(Bundle.open(served.url, { store: new MemoryStore() }), /half\.onnx is not the one that .* names/);
  }));

test("bundle: another one at the server is taken by the next start, and what stayed is not downloaded again", () =>
  serving(async (served, store) => {
    await Bundle.open(served.url, { store });
    served.asked = [];
    assert.equal(await Bundle.update(served.url, { store }), false);
    assert.deepEqual(served.asked, ["manifest.json"]);
    served.files.set("half.onnx", randomBytes(PIECE));
    served.asked = [];
    assert.equal(await Bundle.update(served.url, { store }), true);
    assert.deepEqual(served.asked, ["manifest.json", "half.onnx"]);
    served.asked = [];
    const bundle = await Bundle.open(served.url, { store });
    assert.equal((await bundle.graph()).bytes.length, PIECE);
    assert.deepEqual(served.asked, []);
    assert.equal((await store.names()).length, 4); // nothing is left of the old graph
  }));

test("bundle: a store that lost files of a bundle that is gone takes the new one", () =>
  serving(async (served, store) => {
    await Bundle.open(served.url, { store });
    for (const name of await store.names()) if (name.endsWith(".0")) await store.delete(name);
    served.files.set("half.onnx", randomBytes(PIECE + 1));
    const bundle = await Bundle.open(served.url, { store });
    assert.equal((await bundle.graph()).bytes.length, PIECE + 1);
  }));

test("bundle: a stored manifest that is damaged, or of another version, is asked for again", () =>
  serving(async (served, store) => {
    await Bundle.open(served.url, { store });
    const old = JSON.stringify({ url: served.url, text: JSON.stringify({ ...served.manifest, schema_version: 1 }) });
    for (const text of ["", "{", "null", old]) {
      await store.put("manifest", new TextEncoder().encode(text));
      assert.equal(await Bundle.isHeld(served.url, { store }), false);
      served.asked = [];
      await Bundle.open(served.url, { store });
      assert.deepEqual(served.asked, ["manifest.json"]);
    }
  }));

test("bundle: a store without room is a sentence, and the download goes on once there is some", () =>
  serving(async (served, store) => {
    const put = store.put.bind(store);
    let room = 2;
    store.put = (name, piece) => (room-- > 0 ? put(name, piece) : Promise.reject(new Error("Quota exceeded.")));
    await assert.rejects(Bundle.open(served.url, { store }), (error: Error) => {
      return error instanceof BundleError && /cannot keep half\.onnx of the bundle \(Quota exceeded\.\): free some space/.test(error.message);
    });
    room = 100;
    assert.equal((await (await Bundle.open(served.url, { store })).graph()).bytes.length, 3 * PIECE + 12_345);
    room = 0;
    await store.delete("manifest");
    await assert.rejects(Bundle.open(served.url, { store }), /cannot keep manifest\.json/);
  }));

test("bundle: an address without a bundle is a sentence", () =>
  serving(async (served, store) => {
    await assert.rejects(Bundle.open(`${served.url}none/`, { store }), /has no manifest\.json of the bundle at .* \(status 404\)/);
    served.stop();
    await assert.rejects(Bundle.open(served.url, { store }), /cannot be reached: /);
  }));

test("bundle: a verifier hands it out over a link that is cut, and it is here when the verifier is away", () =>
  serving(async (served, store) => {
    served.token = "secret";
    served.others = [{ id: "0".repeat(64), graphs: [] }, { id: "1".repeat(64), graphs: ["onnx"] }];
    served.breaks = [PIECE + 1, PIECE + 2, PIECE + 3];
    const where = { url: served.verifier.replace("http", "ws"), token: "secret" };
    const bundle = await Bundle.fetch(where, { store });
    assert.equal(served.asked.filter((name) => name.startsWith("half.onnx bytes=")).length, 3);
    assert.deepEqual(Buffer.from((await bundle.graph()).bytes), served.files.get("half.onnx"));
    served.asked = [];
    await Bundle.fetch(where, { store });
    assert.deepEqual(served.asked, []);
    await assert.rejects(Bundle.fetch({ ...where, token: "wrong" }, { store }), /refused the token/);
    await assert.rejects(Bundle.fetch({ ...where, token: "" }, { store }), /none is given/);
    served.files.set("half.onnx", randomBytes(PIECE));
    const newer = await Bundle.fetch(where, { store, writer: true });
    assert.equal((await newer.graph()).bytes.length, PIECE);
    assert.equal((await store.names()).length, 6); // nothing is left of the old graph
    served.stop();
    const kept = await Bundle.fetch(where, { store });
    assert.equal((await kept.graph()).bytes.length, PIECE);
    const other = { url: "ws://127.0.0.1:9", token: "secret" };
    await assert.rejects(Bundle.fetch(other, { store }), /127\.0\.0\.1:9.* cannot be reached: /);
  }));

test("bundle: what a verifier hands out is what it offers, and can be given up", () =>
  serving(async (served, store) => {
    const where = { url: served.verifier };
    const controller = new AbortController();
    const onProgress = (received: number): void => {
      if (received > 2 * PIECE) controller.abort(new Error("enough"));
    };
    await assert.rejects(Bundle.fetch(where, { store, signal: controller.signal, onProgress }), /enough/);
    served.asked = [];
    await Bundle.fetch(where, { store });
    assert.ok(/^half\.onnx bytes=\d{7,}-$/.test(served.asked.at(-1)!), served.asked.at(-1));
    served.stale = { ...served.manifest, target: "another" };
    await assert.rejects(Bundle.fetch(where, { store: new MemoryStore() }), /has changed meanwhile/);
    for (const [others, said] of [
      [[null], /list of bundles is malformed/],
      [[{ id: "../x", graphs: ["web"] }], /list of bundles is malformed/],
    ] as const) {
      served.others = [...others];
      await assert.rejects(Bundle.fetch(where, { store }), said);
    }
    const nothing = async () => new Response(JSON.stringify({ bundles: [{ id: "0".repeat(64), graphs: ["coreml"] }] }));
    await assert.rejects(Bundle.fetch(where, { store, fetch: nothing }), /offers no bundle for this client/);
    const endless = async () => new Response(" ".repeat(2 << 20));
    await assert.rejects(Bundle.fetch(where, { store, fetch: endless }), /list of bundles is malformed/);
  }));

test("bundle: in a folder", async () => {
  const folder = await mkdtemp(join(tmpdir(), "moa-"));
  try {
    const stores: BundleStore[] = [new MemoryStore(), new FolderStore(join(folder, "store"))];
    for (const store of stores) {
      assert.deepEqual(await store.names(), []);
      assert.equal(await store.get("a.0"), undefined);
      await store.put("a.0", Uint8Array.of(1, 2));
      await store.put("a.0", Uint8Array.of(3));
      assert.deepEqual([...(await store.get("a.0"))!], [3]);
      assert.deepEqual(await store.names(), ["a.0"]);
      await store.delete("a.0");
      await store.delete("a.0");
      assert.deepEqual(await store.names(), []);
    }
    await assert.rejects(openBundle(folder), /is no bundle: it has no manifest\.json/);
    const served = new Served();
    await writeFile(join(folder, "manifest.json"), JSON.stringify(served.manifest));
    const bundle = await openBundle(folder);
    await assert.rejects(bundle.graph(), /lacks its file half\.onnx/);
    await writeFile(join(folder, "half.onnx"), served.files.get("half.onnx")!);
    assert.equal((await bundle.graph()).bytes.length, 3 * PIECE + 12_345);
    await writeFile(join(folder, "half.onnx"), "other");
    await assert.rejects(bundle.graph(), /not the one that/);
  } finally {
    await rm(folder, { recursive: true });
  }
});

test("bundle: what a manifest may not say", () => {
  const good = new Served().manifest;
  assert.equal(readManifest(JSON.stringify(good)).targets.get("web")?.file, "half.onnx");
  const files = good["files"] as object;
  const entry = { sha256: "0".repeat(64), bytes: 1 };
  const wrong: [object, RegExp][] = [
    [{ schema_version: 3 }, /schema version 3, this moa-edge reads version 2: upgrade/],
    [{ vocab_size: -1 }, /"vocab_size" is not of the form/],
    [{ stop_tokens: "2" }, /"stop_tokens" is not of the form/],
    [{ files: { ...files, "../x": entry } }, /file name "\.\.\/x" leaves the bundle/],
    ...["./x", "a//b", "/a", "a/", "\u001b[2J", "\ud800"].map((name): [object, RegExp] => [{ files: { ...files, [name]: entry } }, /leaves/]),
    [{ files: { "tokenizer.json": entry } }, /files does not list "chat_template\.jinja"/],
    [{ files: { ...files, x: { sha256: "0", bytes: 1 } } }, /"files" is not of the form/],
    [{ manners: { repeated: 1 } }, /"manners" is not of the form/],
    [{ sampling: { temperature: 1, top_p: 0 } }, /"sampling" is not of the form/],
    [{ targets: { web: { file: "half.onnx" } } }, /"targets" is not of the form/],
  ];
  for (const [change, said] of wrong) assert.throws(() => readManifest(JSON.stringify({ ...good, ...change })), said);
  for (const text of ["", "[]", "{}", "null"]) assert.throws(() => readManifest(text), /is no bundle manifest/);
  const { target, ...rest } = good;
  assert.ok(target);
  assert.throws(() => readManifest(JSON.stringify(rest)), /it lacks "target"/);
});

test("bundle: our SHA-256 is that of the platform", async () => {
  for (const length of [0, 1, 55, 56, 63, 64, 65, 1000, 100_001]) {
    const bytes = randomBytes(length);
    const expected = createHash("sha256").update(bytes).digest("hex");
    assert.equal(Buffer.from(computed(bytes)).toString("hex"), expected);
    assert.equal(await sha256(bytes), expected);
  }
});
