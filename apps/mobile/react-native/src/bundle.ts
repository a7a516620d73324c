/** A bundle in a folder of the app. */

import {
  AwayError,
  Bundle,
  BundleError,
  encodeUtf8,
  hasGraph,
  offeredBundle,
  readManifest,
  type Manifest,
  type Where,
} from "@moa-edge/runtime";

/** A folder of the app, by `expo-file-system`, `react-native-fs` or the like. */
export interface BundleFolder {
  /** Return a file's text. Throws if there is none. */
  readText(file: string): Promise<string>;

  /** Return a file's path, without `file://`, for onnxruntime. */
  pathOf(file: string): string;

  /** Return whether there is such a file. If omitted, `sha256` tells it, which takes longer; without either, all files are there. */
  has?(file: string): Promise<boolean>;
}

/** A folder into which files can be downloaded. */
export interface DownloadFolder extends BundleFolder {
  /** Download a file into the folder, wholly or not at all, with these headers. Throws if that fails. */
  download(url: string, file: string, headers: { readonly [name: string]: string }): Promise<void>;

  /** Return a file's SHA-256, hexadecimal; undefined if there is no such file. */
  sha256(file: string): Promise<string | undefined>;
}

/** A bundle whose graphs stay in files. */
export interface FolderBundle {
  readonly bundle: Bundle;
  readonly folder: BundleFolder;
}

const MANIFEST = "manifest.json";
/** The manifest of the bundle that was downloaded last, completely or not. */
const NEW_MANIFEST = "manifest.json.new";
const TEXTS = ["tokenizer.json", "chat_template.jinja"];

/**
 * Open a bundle that the app brought along, or whose download is complete.
 *
 * @throws BundleError there is none, its download was not finished, or its manifest cannot be read.
 */
export async function openBundle(folder: BundleFolder): Promise<FolderBundle> {
  const text = await readFrom(folder, MANIFEST);
  const manifest = readManifest(text);
  const newest = await folder.readText(NEW_MANIFEST).catch(() => text);
  if (newest !== text && !(await isWhole(manifest, folder))) {
    throw new BundleError("the download of the bundle was not finished: download it again");
  }
  return { bundle: bundleOf(manifest, folder), folder };
}

export interface FetchOptions {
  /** Target of the drafter's graph: `onnx`, or `web`; undefined without drafting on the phone. */
  readonly graphs?: string | undefined;
  /** Whether to download the writer of the target `web`, too. */
  readonly writer?: boolean;
  /** Called with the number of files that are there, and of all. */
  readonly onProgress?: (files: number, all: number) => void;
}

export interface DownloadOptions extends FetchOptions {
  /** The verifier's bearer token. */
  readonly token?: string;
}

/**
 * Download the newest bundle that a verifier offers and that has these graphs, unless it is in the folder. If the verifier is
 * away, the folder's is opened.
 *
 * @throws BundleError the verifier refuses the token or offers no such bundle; or see {@link downloadBundle}.
 * @throws ConnectError the address is invalid.
 */
export async function fetchBundle(where: Where, folder: DownloadFolder, options: FetchOptions = {}): Promise<FolderBundle> {
  const { token = "" } = where;
  try {
    const offer = await offeredBundle(where, options.graphs);
    return (await heldBundle(offer.id, folder, options)) ?? (await downloadBundle(offer.url, folder, { ...options, token }));
  } catch (error) {
    if (!(error instanceof AwayError)) throw error;
    return openBundle(folder).catch(() => {
      throw error;
    });
  }
}

/**
 * Download what an app needs of a bundle at a known address; files that are there are kept, and all are checked.
 *
 * @param url of the bundle's folder, such as `https://host:8765/v1/bundles/ID/`.
 * @throws BundleError it cannot be reached, is damaged, or has no such graph.
 */
export async function downloadBundle(url: string, folder: DownloadFolder, options: DownloadOptions = {}): Promise<FolderBundle> {
  const { onProgress, token = "" } = options;
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const base = url.replace(/\/*$/, "/");
  const download = async (file: string, to = file): Promise<void> => {
    try {
      await folder.download(base + file, to, headers);
    } catch (error) {
      throw new BundleError(`${file} of the bundle at ${url} cannot be downloaded: ${String(error)}`, { cause: error });
    }
  };
  await download(MANIFEST, NEW_MANIFEST);
  const text = await readFrom(folder, NEW_MANIFEST);
  const manifest = readManifest(text);
  const files = wantedOf(manifest, options);
  for (const [at, file] of files.entries()) {
    onProgress?.(at, files.length);
    const { sha256 } = manifest.files.get(file)!;
    if ((await folder.sha256(file)) === sha256) continue;
    await download(file);
    if ((await folder.sha256(file)) !== sha256) {
      throw new BundleError(`${file} of the bundle at ${url} is not the one that its manifest names: try again, or export it again`);
    }
  }
  // Last, because it marks the bundle as complete.
  if ((await folder.readText(MANIFEST).catch(() => "")) !== text) await download(MANIFEST);
  if ((await readFrom(folder, MANIFEST)) !== text) throw new BundleError(`the bundle at ${url} has changed meanwhile: try again`);
  onProgress?.(files.length, files.length);
  return { bundle: bundleOf(manifest, folder), folder };
}

/** Return the folder's bundle if it is the one of this id, with all files that are wanted. */
async function heldBundle(id: string, folder: DownloadFolder, options: FetchOptions): Promise<FolderBundle | undefined> {
  if ((await folder.sha256(MANIFEST)) !== id) return undefined;
  const held = await openBundle(folder).catch(() => undefined);
  if (!held) return undefined;
  for (const file of wantedOf(held.bundle.manifest, options)) if (!(await isThere(folder, file))) return undefined;
  return held;
}

/** Return whether a folder has a file. */
export async function isThere(folder: BundleFolder | DownloadFolder, file: string): Promise<boolean> {
  if (folder.has) return folder.has(file);
  return !("sha256" in folder) || (await folder.sha256(file)) !== undefined;
}

/** Return whether a later download has left a bundle as it was. */
async function isWhole(manifest: Manifest, folder: BundleFolder | DownloadFolder): Promise<boolean> {
  if (!("sha256" in folder)) return false;
  for (const [file, { sha256 }] of manifest.files) {
    const found = await folder.sha256(file);
    if (found === undefined ? TEXTS.includes(file) : found !== sha256) return false;
  }
  return true;
}

function bundleOf(manifest: Manifest, folder: BundleFolder): Bundle {
  return new Bundle(manifest, { read: async (file) => encodeUtf8(await readFrom(folder, file)) });
}

async function readFrom(folder: BundleFolder, file: string): Promise<string> {
  try {
    return await folder.readText(file);
  } catch (error) {
    throw new BundleError(`the app has no file ${file} of the bundle: download or copy it again`, { cause: error });
  }
}

function wantedOf(manifest: Manifest, { graphs, writer = false }: FetchOptions): string[] {
  const files = [...TEXTS];
  if (graphs !== undefined && hasGraph(manifest.architecture)) files.push(entryOf(manifest, graphs).file);
  if (writer) files.push(writerOf(manifest).file);
  return files;
}

/** Return the drafter's graph of a target. Throws BundleError if there is none. */
export function entryOf({ targets }: Manifest, target: string): NonNullable<ReturnType<Manifest["targets"]["get"]>> {
  const entry = targets.get(target);
  if (!entry) throw new BundleError(`the bundle has no graph for ${target}: export it with --target ${target}`);
  return entry;
}

/** Return the writer that onnxruntime's interface for JavaScript runs. Throws BundleError if there is none. */
export function writerOf({ writers }: Manifest): NonNullable<ReturnType<Manifest["writers"]["get"]>> {
  const entry = writers.get("web");
  if (!entry) throw new BundleError("the bundle has no writer for apps: export it with --target web");
  return entry;
}
