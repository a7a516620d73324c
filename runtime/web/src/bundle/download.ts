/** Files of a bundle: requests for them, and downloads in pieces, so that a broken one is resumed. */

import { saidBy } from "../backends/base.js";
import { BundleError, type FileEntry } from "./manifest.js";
import { sha256 } from "./sha256.js";
import { keep, type BundleStore } from "./store.js";

/** Bytes of a piece: the most that a killed tab loses. */
const PIECE = 1 << 20;

/** A file differs from the manifest's. */
export class ChangedError extends BundleError {
  constructor(file: string) {
    super(
      `${file} is not the one that the bundle's manifest names: its SHA-256 is another. The bundle at the server is ` +
        "damaged or just being changed; try again, or export it again",
    );
  }
}

/** Options of a download. */
export interface Transfer {
  readonly signal?: Signal | undefined;
  /** Called with the bytes of the file that are stored. */
  readonly onHeld?: (bytes: number) => void;
}

/** The source of a bundle's files. */
export interface BundleFiles {
  /**
   * Return a file, checked against the manifest.
   *
   * @throws BundleError it cannot be read, or differs.
   */
  read(name: string, entry: FileEntry, transfer?: Transfer): Promise<Uint8Array>;
}

/** A bundle's files in a store, by their digest, so that an update keeps unchanged files. Missing files are downloaded. */
export class StoredFiles implements BundleFiles {
  /**
   * @param bundle its address.
   * @param fetch requests files.
   */
  constructor(
    private readonly bundle: string,
    private readonly store: BundleStore,
    private readonly fetch: Fetch,
  ) {}

  /** Return the bytes of a file that are stored, in whole pieces from the first on. */
  async held(entry: FileEntry): Promise<number> {
    const names = new Set(await this.store.names());
    let pieces = 0;
    while (pieces < piecesOf(entry) && names.has(nameOf(entry, pieces))) pieces++;
    return Math.min(pieces * PIECE, entry.bytes);
  }

  async read(name: string, entry: FileEntry, transfer: Transfer = {}): Promise<Uint8Array> {
    await this.download(name, entry, transfer);
    const stored = await this.whole(entry);
    if (stored) return stored;
    await this.forget(entry); // the store damaged it
    await this.download(name, entry, transfer);
    const whole = await this.whole(entry);
    if (!whole) throw new BundleError(`the store does not keep ${name} of the bundle as it is: clear the site's data`);
    return whole;
  }

  /**
   * Download the missing part of a file, and check it. If the connection breaks, request the rest, as long as there is progress.
   *
   * @throws ChangedError it differs from the manifest's.
   * @throws BundleError it cannot be downloaded; the received part is kept.
   */
  async download(name: string, entry: FileEntry, transfer: Transfer = {}): Promise<void> {
    for (let held = await this.held(entry); held < entry.bytes; ) {
      const begun = held;
      while (held < entry.bytes) held = await this.goOn(name, entry, held, transfer);
      if (await this.whole(entry)) break;
      await this.forget(entry);
      if (!begun) throw new ChangedError(name); // else its stored beginning may be of another file
      held = 0;
    }
    transfer.onHeld?.(entry.bytes);
  }

  /** Delete all files but these. */
  async keepOnly(entries: Iterable<FileEntry>): Promise<void> {
    const kept = new Set(Array.from(entries, ({ sha256: digest }) => digest));
    for (const name of await this.store.names()) {
      const [digest, number] = name.split(".");
      if (number !== undefined && !kept.has(digest!)) await this.store.delete(name);
    }
  }

  /** Return a file; undefined if it differs from the manifest's. */
  private async whole(entry: FileEntry): Promise<Uint8Array | undefined> {
    const whole = new Uint8Array(entry.bytes);
    for (let number = 0; number < piecesOf(entry); number++) {
      const piece = await this.store.get(nameOf(entry, number));
      if (piece) whole.set(piece.subarray(0, entry.bytes - number * PIECE), number * PIECE);
    }
    return (await sha256(whole)) === entry.sha256 ? whole : undefined;
  }

  private async forget(entry: FileEntry): Promise<void> {
    for (let number = 0; number < piecesOf(entry); number++) await this.store.delete(nameOf(entry, number));
  }

  /** Request the bytes after those held, until the response ends or breaks; return the bytes held then, which are more. */
  private async goOn(name: string, entry: FileEntry, held: number, transfer: Transfer): Promise<number> {
    let problem: unknown;
    try {
      await this.receive(name, entry, held, transfer);
    } catch (error) {
      transfer.signal?.throwIfAborted();
      if (error instanceof BundleError) throw error;
      problem = error;
    }
    const now = await this.held(entry);
    if (now <= held) throw broken(name, now, entry.bytes, problem);
    return now;
  }

  /** Request the bytes from `start` on, and store each whole piece. */
  private async receive(name: string, entry: FileEntry, start: number, { signal, onHeld }: Transfer): Promise<void> {
    const headers: Record<string, string> = start ? { Range: `bytes=${start}-` } : {};
    const reply = await ask(this.fetch, this.bundle, name, { headers, cache: "no-cache", signal });
    if (reply.status === 416) throw new ChangedError(name); // the file has become shorter
    let at = reply.status === 206 ? start : 0; // a server without ranges sends the whole file
    let piece = new Uint8Array(PIECE);
    let filled = 0;
    const reader = reply.body!.getReader();
    for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) {
      for (let bytes = chunk.value!; bytes.length; ) {
        const taken = bytes.subarray(0, PIECE - filled);
        piece.set(taken, filled);
        filled += taken.length;
        bytes = bytes.subarray(taken.length);
        if (at + filled > entry.bytes) throw new ChangedError(name);
        onHeld?.(at + filled);
        if (filled < PIECE && at + filled < entry.bytes) continue;
        await keep(this.store, nameOf(entry, at / PIECE), piece.subarray(0, filled), name);
        at += filled;
        piece = new Uint8Array(PIECE);
        filled = 0;
      }
    }
  }
}

function broken(name: string, held: number, bytes: number, problem: unknown): BundleError {
  const megabytes = (count: number): string => (count / 1e6).toFixed(1);
  const why = problem === undefined ? "the server sent too little" : saidBy(problem);
  return new BundleError(
    `the download of ${name} stopped at ${megabytes(held)} of ${megabytes(bytes)} MB (${why}): try again, what came is kept`,
    { cause: problem },
  );
}

function piecesOf(entry: FileEntry): number {
  return Math.ceil(entry.bytes / PIECE);
}

function nameOf(entry: FileEntry, number: number): string {
  return `${entry.sha256}.${number}`;
}

/** The parts of a `Response` that are used. */
export interface Reply {
  readonly ok: boolean;
  readonly status: number;
  readonly headers: { get(name: string): string | null };
  readonly body:
    | { getReader(): { read(): Promise<{ readonly done: boolean; readonly value?: Uint8Array | undefined }> } }
    | null
    | undefined;
  text(): Promise<string>;
}

/** `AbortSignal` in browsers and Node. */
export interface Signal {
  throwIfAborted(): void;
}

export interface FetchOptions {
  readonly headers?: Record<string, string>;
  readonly cache?: "no-cache" | "no-store";
  readonly redirect?: "error";
  readonly signal?: Signal | undefined;
}

export type Fetch = (url: string, options: FetchOptions) => Promise<Reply>;

/** The platform's `fetch`. */
export const platformFetch: Fetch = (url, options) => (globalThis as unknown as { fetch: Fetch }).fetch(url, options);

/** Return the address of a bundle's file. */
export function addressOf(bundle: string, file: string): string {
  return bundle.replace(/\/*$/, "/") + file.split("/").map(encodeURIComponent).join("/");
}

/**
 * Request a file.
 *
 * @returns the file, a part of it (206), or that there is no such part (416).
 * @throws BundleError there is no answer, or no file.
 */
export async function ask(fetch: Fetch, bundle: string, file: string, options: FetchOptions): Promise<Reply> {
  let reply: Reply;
  try {
    reply = await fetch(addressOf(bundle, file), options);
  } catch (error) {
    options.signal?.throwIfAborted();
    throw new BundleError(`the bundle at ${bundle} cannot be reached: ${saidBy(error)}`, { cause: error });
  }
  if (reply.ok || reply.status === 416) return reply;
  throw new BundleError(`the server has no ${file} of the bundle at ${bundle} (status ${reply.status}): check the address`);
}
