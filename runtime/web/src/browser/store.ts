/** Stores of a bundle in a browser. */

import { MemoryStore, type BundleStore } from "../bundle/store.js";

/**
 * Return the best store that this page may use: the origin's private file system; the cache, if a page cannot write to that
 * (Safari before 26); memory without either, for example at a plain `http://` address.
 *
 * @param name of the folder or cache.
 */
export async function browserStore(name = "moa-edge-bundle"): Promise<BundleStore> {
  if (typeof FileSystemFileHandle !== "undefined" && "createWritable" in FileSystemFileHandle.prototype) {
    try {
      return await FileSystemStore.open(name);
    } catch {
      // Private windows of some browsers refuse it.
    }
  }
  try {
    if (typeof caches !== "undefined") return new CacheStore(await caches.open(name));
  } catch {
    // The same.
  }
  return new MemoryStore();
}

/** A store in the origin's private file system: a file for each piece. */
export class FileSystemStore implements BundleStore {
  private constructor(private readonly folder: FileSystemDirectoryHandle) {}

  /** Open it. Throws the browser's error if the page may not use it. */
  static async open(name: string): Promise<FileSystemStore> {
    const root = await navigator.storage.getDirectory();
    return new FileSystemStore(await root.getDirectoryHandle(name, { create: true }));
  }

  async get(name: string): Promise<Uint8Array | undefined> {
    try {
      const handle = await this.folder.getFileHandle(name);
      return new Uint8Array(await (await handle.getFile()).arrayBuffer());
    } catch (error) {
      if (isNotFound(error)) return undefined;
      throw error;
    }
  }

  async put(name: string, piece: Uint8Array): Promise<void> {
    const handle = await this.folder.getFileHandle(name, { create: true });
    const writable = await handle.createWritable(); // beside the file, until it is closed
    await writable.write(piece as Uint8Array<ArrayBuffer>);
    await writable.close();
  }

  async delete(name: string): Promise<void> {
    try {
      await this.folder.removeEntry(name);
    } catch (error) {
      if (!isNotFound(error)) throw error;
    }
  }

  async names(): Promise<readonly string[]> {
    const names: string[] = [];
    for await (const name of this.folder.keys()) names.push(name);
    return names;
  }
}

/** A store in a cache: a response for each piece. */
export class CacheStore implements BundleStore {
  constructor(private readonly cache: Cache) {}

  async get(name: string): Promise<Uint8Array | undefined> {
    const held = await this.cache.match(addressOf(name));
    return held && new Uint8Array(await held.arrayBuffer());
  }

  async put(name: string, piece: Uint8Array): Promise<void> {
    await this.cache.put(addressOf(name), new Response(piece as Uint8Array<ArrayBuffer>));
  }

  async delete(name: string): Promise<void> {
    await this.cache.delete(addressOf(name));
  }

  async names(): Promise<readonly string[]> {
    const requests = await this.cache.keys();
    return requests.map(({ url }) => decodeURIComponent(new URL(url).pathname.slice(1)));
  }
}

/** Return an address as the key of a piece; it is never requested. */
function addressOf(name: string): string {
  return `/${encodeURIComponent(name)}`;
}

function isNotFound(error: unknown): boolean {
  return error instanceof DOMException && error.name === "NotFoundError";
}
