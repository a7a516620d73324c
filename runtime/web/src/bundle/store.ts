/** Where a bundle is kept between two starts. */

/**
 * Named pieces of some kilobytes to a megabyte. One store holds one bundle. Several pages may use it at once: what they put
 * under one name is the same.
 */
export interface BundleStore {
  /** The piece of a name, undefined where there is none. */
  get(name: string): Promise<Uint8Array | undefined>;

  /**
   * Keep a piece, wholly or not at all.
   *
   * @throws what the platform throws where there is no room.
   */
  put(name: string, piece: Uint8Array): Promise<void>;

  delete(name: string): Promise<void>;
  names(): Promise<readonly string[]>;
}

/** Forgets all with the page: where nothing else may be used, and for tests. */
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
