/** Stores of a bundle between two starts. */

import { saidBy } from "../backends/base.js";
import { BundleError } from "./manifest.js";

/**
 * Named pieces of some kilobytes to a megabyte. One store holds one bundle. Several pages may use it at once, because they
 * store the same piece under the same name.
 */
export interface BundleStore {
  /** Return the piece of a name; undefined if there is none. */
  get(name: string): Promise<Uint8Array | undefined>;

  /**
   * Store a piece, wholly or not at all.
   *
   * @throws the platform's error, for example if there is no room.
   */
  put(name: string, piece: Uint8Array): Promise<void>;

  delete(name: string): Promise<void>;
  names(): Promise<readonly string[]>;
}

/**
 * Put a piece into a store.
 *
 * @param file the piece's file, for the error.
 * @throws BundleError it cannot be stored.
 */
export async function keep(store: BundleStore, name: string, piece: Uint8Array, file: string): Promise<void> {
  try {
    await store.put(name, piece);
  } catch (error) {
    const text = `this device cannot keep ${file} of the bundle (${saidBy(error)})`;
    throw new BundleError(`${text}: free some space on it and try again, what came is kept`, { cause: error });
  }
}

/** A store in memory, for pages that may use no other, and for tests. */
export class MemoryStore implements BundleStore {
  private readonly pieces = new Map<string, Uint8Array>();

  async get(name: string): Promise<Uint8Array | undefined> {
    return this.pieces.get(name);
  }

  async put(name: string, piece: Uint8Array): Promise<void> {
    this.pieces.set(name, piece);
  }

  async delete(name: string): Promise<void> {
    this.pieces.delete(name);
  }

  async names(): Promise<readonly string[]> {
    return [...this.pieces.keys()];
  }
}
