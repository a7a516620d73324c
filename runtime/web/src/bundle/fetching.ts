/** What we need of `fetch`, which browsers and Node have. */

import { saidBy } from "../backends/base.js";
import { BundleError } from "./manifest.js";

export interface Reply {
  readonly ok: boolean;
  readonly status: number;
  readonly headers: { get(name: string): string | null };
  readonly body: { getReader(): { read(): Promise<{ readonly done: boolean; readonly value?: Uint8Array | undefined }> } } | null;
  text(): Promise<string>;
}

/** `AbortSignal` in browsers and Node. */
export interface Signal {
  throwIfAborted(): void;
}

export interface FetchOptions {
  readonly headers?: Record<string, string>;
  readonly cache?: "no-cache" | "no-store";
  readonly signal?: Signal | undefined;
}

export type Fetch = (url: string, options: FetchOptions) => Promise<Reply>;

/** The platform's. */
export const platformFetch: Fetch = (url, options) => (globalThis as unknown as { fetch: Fetch }).fetch(url, options);

/** Where a bundle's file is. */
export function addressOf(bundle: string, file: string): string {
  return bundle.replace(/\/*$/, "/") + file.split("/").map(encodeURIComponent).join("/");
}

/**
 * Ask for a file.
 *
 * @returns the file, a part of it (206), or that it has no such part (416).
 * @throws BundleError there is no answer, or it has no file.
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
