/** A bundle in a folder of the app. */

import { Bundle, BundleError, encodeUtf8, readManifest, type Manifest } from "@moa-edge/runtime";

/** A folder of the app, by `expo-file-system`, `react-native-fs` or the like. */
export interface BundleFolder {
  /** Return a file's text. Throws if there is none. */
  readText(file: string): Promise<string>;

  /** Return a file's path, without `file://`, for onnxruntime. */
  pathOf(file: string): string;
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
const TEXTS = ["tokenizer.json", "chat_template.jinja"];

/**
 * Open a bundle that the app brought along, or that {@link downloadBundle} downloaded.
 *
 * @throws BundleError there is none, or its manifest cannot be read.
 */
export async function openBundle(folder: BundleFolder): Promise<FolderBundle> {
  const read = async (file: string): Promise<string> => {
    try {
      return await folder.readText(file);
    } catch (error) {
      throw new BundleError(`the app has no file ${file} of the bundle: download or copy it again`, { cause: error });
    }
  };
  const manifest = readManifest(await read(MANIFEST));
  return { bundle: new Bundle(manifest, { read: async (file) => encodeUtf8(await read(file)) }), folder };
}

export interface DownloadOptions {
  /** Target of the drafter's graph: `onnx`, or `web`; undefined without drafting on the phone. */
  readonly graphs?: string | undefined;
  /** Whether to download the writer of the target `web`, too. */
  readonly writer?: boolean;
  /** The verifier's bearer token. */
  readonly token?: string;
  /** Called with the number of files that are there, and of all. */
  readonly onProgress?: (files: number, all: number) => void;
}

/**
 * Download what an app needs of a bundle; files that are there are kept, and all are checked.
 *
 * @param url of the bundle's folder, such as `https://host:8765/bundle/`.
 * @throws BundleError it cannot be reached, is damaged, or has no such graph.
 */
export async function downloadBundle(url: string, folder: DownloadFolder, options: DownloadOptions = {}): Promise<FolderBundle> {
  const { onProgress, token = "" } = options;
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const base = url.replace(/\/*$/, "/");
  const download = async (file: string): Promise<void> => {
    try {
      await folder.download(base + file, file, headers);
    } catch (error) {
      throw new BundleError(`${file} of the bundle at ${url} cannot be downloaded: ${String(error)}`, { cause: error });
    }
  };
  await download(MANIFEST);
  const { bundle } = await openBundle(folder);
  const files = wantedOf(bundle.manifest, options);
  for (const [at, file] of files.entries()) {
    onProgress?.(at, files.length);
    const { sha256 } = bundle.manifest.files.get(file)!;
    if ((await folder.sha256(file)) === sha256) continue;
    await download(file);
    if ((await folder.sha256(file)) !== sha256) {
      throw new BundleError(`${file} of the bundle at ${url} is not the one that its manifest names: try again, or export it again`);
    }
  }
  onProgress?.(files.length, files.length);
  return { bundle, folder };
}

function wantedOf(manifest: Manifest, { graphs, writer = false }: DownloadOptions): string[] {
  const files = [...TEXTS];
  if (graphs !== undefined) files.push(entryOf(manifest, graphs).file);
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
