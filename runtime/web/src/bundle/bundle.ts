/** The bundle: the files that `moa-export` writes, on a server and, once downloaded, in a store. */

import type { Where } from "../chat_options.js";
import { ChatTokenizer } from "../chat_tokenizer.js";
import { Endpoint } from "../endpoint.js";
import { decodeUtf8, encodeUtf8 } from "../utf8.js";
import {
  ChangedError,
  StoredFiles,
  ask,
  platformFetch,
  type BundleFiles,
  type Fetch,
  type Signal,
} from "./download.js";
import {
  BundleError,
  CHAT_TEMPLATE_FILE,
  MANIFEST_FILE,
  TOKENIZER_FILE,
  hasGraph,
  readManifest,
  type FileEntry,
  type Manifest,
  type TargetEntry,
  type WriterEntry,
} from "./manifest.js";
import { AwayError, bestOffer, bundlesAt, textOf, withToken } from "./offers.js";
import { sha256 } from "./sha256.js";
import { keep, type BundleStore } from "./store.js";

/** Called with the bytes received, and the total. */
export type OnProgress = (received: number, total: number) => void;

export interface ReadOptions {
  readonly onProgress?: OnProgress | undefined;
  /** An `AbortSignal`; the received part is kept. */
  readonly signal?: Signal | undefined;
}

export interface OpenOptions extends ReadOptions {
  readonly store: BundleStore;
  /** Whether to download the drafter's graph, too; a page that only streams does not need it. Yes when omitted. */
  readonly drafter?: boolean;
  /** Whether to download the writer, too; else it is downloaded when it is first needed. */
  readonly writer?: boolean;
  /** Used in place of the platform's. */
  readonly fetch?: Fetch;
}

/** Options of a download, with the digest of the manifest if it is known. */
type Asked = OpenOptions & { readonly id?: string };

/** Name of the stored manifest of the bundle that is complete in the store. */
const STORED_MANIFEST = "manifest";
/** Target of the graphs for onnxruntime-web. */
const GRAPH = "web";
/** Beginning of the names of the licences of target and drafter, which travel with the bundle. */
const LICENCES = "licenses/";
const MOST_MANIFEST_BYTES = 1 << 24;

/** A bundle. Files that were downloaded when it was opened can be read without a network. */
export class Bundle {
  /** @param files reads the bundle's files. */
  constructor(
    readonly manifest: Manifest,
    private readonly files: BundleFiles,
  ) {}

  /**
   * Open the bundle at an address: from the store, without any request, if it was downloaded; else download its files for
   * browsers, and resume an earlier download.
   *
   * @param url of the folder of `manifest.json`.
   * @throws BundleError it cannot be reached, is no bundle, is damaged, or lacks a requested file.
   */
  static async open(url: string, options: OpenOptions): Promise<Bundle> {
    const held = await heldManifest(url, options.store);
    if (held !== undefined) {
      try {
        return await opened(url, held, options);
      } catch (error) {
        if (!(error instanceof ChangedError)) throw error; // else the store lost a file that the server no longer has
      }
    }
    return opened(url, await newestManifest(url, options), options);
  }

  /**
   * Bring the best bundle for browsers that a verifier offers, or take it from the store; resume an earlier download. It
   * replaces another one in the store. If the verifier is away, it is the one that was last fetched from this address.
   *
   * @param where the verifier, whose token is sent to it alone.
   * @throws BundleError the verifier offers none, or it cannot be downloaded, see {@link Bundle.open}.
   */
  static async fetch({ url, token = "" }: Where, options: OpenOptions): Promise<Bundle> {
    const endpoint = new Endpoint(url, token);
    const own = { ...options, fetch: withToken(options.fetch ?? platformFetch, token) };
    try {
      const offer = await bestOffer(endpoint, GRAPH, own.fetch, options.signal);
      return await Bundle.open(offer.url, { ...own, id: offer.id } as Asked);
    } catch (error) {
      const held = error instanceof AwayError ? await heldAddress(options.store) : undefined;
      if (!held?.startsWith(bundlesAt(endpoint))) throw error;
      return Bundle.open(held, own);
    }
  }

  /** Return whether {@link Bundle.open} would make no request. */
  static async isHeld(url: string, options: OpenOptions): Promise<boolean> {
    const text = await heldManifest(url, options.store);
    if (text === undefined) return false;
    const files = new StoredFiles(url, options.store, options.fetch ?? platformFetch);
    for (const [, entry] of wantedOf(readManifest(text), options)) {
      if ((await files.held(entry)) < entry.bytes) return false;
    }
    return true;
  }

  /**
   * Ask the server, by one request that caches may answer, whether it has a new bundle; if so, download it. The next
   * {@link Bundle.open} uses it; open bundles are not changed.
   *
   * @param options as for {@link Bundle.open}.
   * @returns whether there was a new one.
   * @throws BundleError see {@link Bundle.open}.
   */
  static async update(url: string, options: OpenOptions): Promise<boolean> {
    const newest = await newestManifest(url, options);
    if (newest === (await heldManifest(url, options.store))) return false;
    await downloaded(url, newest, options);
    return true;
  }

  /** Return the drafter's graph for onnxruntime-web. Throws BundleError if the bundle has none, or it cannot be downloaded. */
  async graph(options: ReadOptions = {}): Promise<{ entry: TargetEntry; bytes: Uint8Array }> {
    const entry = graphOf(this.manifest);
    return { entry, bytes: await this.read(entry.file, options) };
  }

  /** Return the writer for onnxruntime-web; download it if necessary. Throws BundleError if the bundle has none, or it cannot be downloaded. */
  async writer(options: ReadOptions = {}): Promise<{ entry: WriterEntry; bytes: Uint8Array }> {
    const entry = writerOf(this.manifest);
    return { entry, bytes: await this.read(entry.file, options) };
  }

  /** Return tokenizer and chat template. Throws BundleError, TokenizerError or ChatTemplateError if they cannot be read. */
  async tokenizer(): Promise<ChatTokenizer> {
    const [file, template] = [await this.text(TOKENIZER_FILE), await this.text(CHAT_TEMPLATE_FILE)];
    let said: unknown;
    try {
      said = JSON.parse(file);
    } catch {
      throw new BundleError(`${TOKENIZER_FILE} of the bundle is no JSON: export the bundle again`);
    }
    return new ChatTokenizer(said, template, this.manifest.specialTokens, this.manifest.stopTokens);
  }

  private async read(name: string, { onProgress, signal }: ReadOptions = {}): Promise<Uint8Array> {
    const entry = this.manifest.files.get(name)!; // `readManifest` checks that it is listed
    return this.files.read(name, entry, { signal, onHeld: (bytes) => onProgress?.(bytes, entry.bytes) });
  }

  private async text(name: string): Promise<string> {
    return decodeUtf8(await this.read(name));
  }
}

/** Return the bundle of this manifest, with the requested files in the store. */
async function opened(url: string, text: string, options: OpenOptions): Promise<Bundle> {
  const { manifest, files } = await downloaded(url, text, options);
  await files.keepOnly(manifest.files.values());
  return new Bundle(manifest, files);
}

async function downloaded(url: string, text: string, options: OpenOptions): Promise<{ manifest: Manifest; files: StoredFiles }> {
  const { store, fetch = platformFetch, signal, onProgress } = options;
  const manifest = readManifest(text);
  const files = new StoredFiles(url, store, fetch);
  const wanted = wantedOf(manifest, options);
  const held = new Map<string, number>();
  for (const [name, entry] of wanted) held.set(name, await files.held(entry));
  const sum = (counts: Iterable<number>): number => [...counts].reduce((all, count) => all + count, 0);
  const total = sum(wanted.map(([, { bytes }]) => bytes));
  for (const [name, entry] of wanted) {
    const onHeld = (bytes: number): void => onProgress?.(sum(held.set(name, bytes).values()), total);
    await files.download(name, entry, { signal, onHeld });
  }
  // Last, because it marks the bundle as complete.
  if (text !== (await heldManifest(url, store))) {
    await keep(store, STORED_MANIFEST, encodeUtf8(JSON.stringify({ url, text })), MANIFEST_FILE);
  }
  return { manifest, files };
}

function wantedOf(manifest: Manifest, { drafter = true, writer = false }: OpenOptions): [string, FileEntry][] {
  const names = [TOKENIZER_FILE, CHAT_TEMPLATE_FILE];
  for (const name of manifest.files.keys()) if (name.startsWith(LICENCES)) names.push(name);
  if (drafter && hasGraph(manifest.architecture)) names.push(graphOf(manifest).file);
  if (writer) names.push(writerOf(manifest).file);
  return names.map((name) => [name, manifest.files.get(name)!]);
}

function writerOf({ writers }: Manifest): WriterEntry {
  const writer = writers.get("web");
  if (!writer) throw lacking("no writer for onnxruntime-web");
  return writer;
}

/** Return the drafter's graph. Throws BundleError if the bundle has none that this client computes. */
function graphOf({ architecture, targets }: Manifest): TargetEntry {
  if (architecture === "eagle3") {
    throw new BundleError(
      "the bundle drafts with an EAGLE-3 head, which this client does not compute: use the Python client, or export another drafter",
    );
  }
  const web = targets.get("web");
  if (!web) throw lacking("no graph for onnxruntime-web");
  return web;
}

function lacking(what: string): BundleError {
  return new BundleError(`the bundle has ${what}: export it with --target web`);
}

/** Return the text of the stored manifest; undefined if it is of another bundle, or cannot be read. */
async function heldManifest(url: string, store: BundleStore): Promise<string | undefined> {
  const held = await heldBundle(store);
  return held?.url === url ? held.text : undefined;
}

/** Return the address of the stored bundle; undefined if there is none. */
async function heldAddress(store: BundleStore): Promise<string | undefined> {
  return (await heldBundle(store))?.url;
}

async function heldBundle(store: BundleStore): Promise<{ url: string; text: string } | undefined> {
  const piece = await store.get(STORED_MANIFEST);
  if (!piece) return undefined;
  try {
    const held = JSON.parse(decodeUtf8(piece)) as { url: string; text: string };
    readManifest(held.text);
    return held;
  } catch {
    return undefined; // damaged, or of another version of the runtime
  }
}

async function newestManifest(url: string, { fetch = platformFetch, signal, id }: Asked): Promise<string> {
  const reply = await ask(fetch, url, MANIFEST_FILE, { cache: "no-cache", signal });
  const text = await textOf(reply, MOST_MANIFEST_BYTES);
  if (id !== undefined && (await sha256(encodeUtf8(text))) !== id) {
    throw new BundleError("the verifier's bundle has changed meanwhile: try again");
  }
  readManifest(text); // throws if it is no manifest
  return text;
}
