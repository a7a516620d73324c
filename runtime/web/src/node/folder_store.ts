/** A bundle in a folder. */

import { mkdir, readFile, readdir, rename, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";

import { Bundle } from "../bundle/bundle.js";
import { ChangedError, type BundleFiles } from "../bundle/download.js";
import { BundleError, MANIFEST_FILE, readManifest, type FileEntry } from "../bundle/manifest.js";
import { sha256 } from "../bundle/sha256.js";
import type { BundleStore } from "../bundle/store.js";

/** A store in a folder: a file for each piece. */
export class FolderStore implements BundleStore {
  constructor(private readonly folder: string) {}

  async get(name: string): Promise<Uint8Array | undefined> {
    return unlessMissing(() => readFile(join(this.folder, name)), undefined);
  }

  async put(name: string, piece: Uint8Array): Promise<void> {
    await mkdir(this.folder, { recursive: true });
    const scratch = join(this.folder, `${name}.${process.pid}.part`);
    await writeFile(scratch, piece);
    await rename(scratch, join(this.folder, name));
  }

  async delete(name: string): Promise<void> {
    await rm(join(this.folder, name), { force: true });
  }

  async names(): Promise<readonly string[]> {
    return unlessMissing(() => readdir(this.folder), []);
  }
}

/**
 * Open a bundle that `moa-export` wrote to this machine.
 *
 * @throws BundleError there is none, or its manifest cannot be read.
 */
export async function openBundle(folder: string): Promise<Bundle> {
  const text = await unlessMissing(() => readFile(join(folder, MANIFEST_FILE), "utf-8"), undefined);
  if (text === undefined) throw new BundleError(`${folder} is no bundle: it has no ${MANIFEST_FILE}; make one with moa-export`);
  return new Bundle(readManifest(text), new FolderFiles(folder));
}

class FolderFiles implements BundleFiles {
  constructor(private readonly folder: string) {}

  async read(name: string, entry: FileEntry): Promise<Uint8Array> {
    const bytes = await unlessMissing(() => readFile(join(this.folder, name)), undefined);
    if (!bytes) throw new BundleError(`the bundle ${this.folder} lacks its file ${name}: export or copy it again`);
    if (bytes.length !== entry.bytes || (await sha256(bytes)) !== entry.sha256) throw new ChangedError(name);
    return bytes;
  }
}

/** Return the result of `read`, or `otherwise` if there is no such file. */
async function unlessMissing<T, U>(read: () => Promise<T>, otherwise: U): Promise<T | U> {
  try {
    return await read();
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return otherwise;
    throw error;
  }
}
