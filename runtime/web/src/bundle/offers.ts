/** Bundles that a verifier offers at `/v1/bundles`, to holders of its token. */

import { saidBy } from "../backends/base.js";
import type { Where } from "../chat_options.js";
import { Endpoint } from "../endpoint.js";
import { decodeUtf8 } from "../utf8.js";
import { later } from "../web_host.js";
import { platformFetch, type Fetch, type Reply, type Signal } from "./download.js";
import { BundleError } from "./manifest.js";

const BUNDLES_PATH = "/v1/bundles";
const MOST_LIST_BYTES = 1 << 20;
/** The list is asked for at each start, perhaps without a network. */
const LIST_TIMEOUT_S = 5;

/** The verifier is away, or busy: another attempt may succeed. */
export class AwayError extends BundleError {}

/** A bundle that a verifier offers. */
export interface Offer {
  /** SHA-256 of its manifest, hexadecimal. */
  readonly id: string;
  /** Address of its folder. */
  readonly url: string;
}

/** Return the address below which the folders of a verifier's bundles are. */
export function bundlesAt(endpoint: Endpoint): string {
  return `${endpoint.at(BUNDLES_PATH)}/`;
}

/** Return a `fetch` that sends the token of a verifier, to it alone. */
export function withToken(fetch: Fetch, token: string): Fetch {
  // A header takes no other characters; without the header a verifier with a token refuses the request as well.
  const own = /^[ -~]+$/.test(token.trim()) ? { Authorization: `Bearer ${token}` } : {};
  return (url, options) => fetch(url, { ...options, headers: { ...options.headers, ...own }, redirect: "error" });
}

/**
 * Return the first offer with a graph of this target, else the first without a graph; the first of all if no target is given.
 *
 * @param fetch sends the token.
 * @throws AwayError the verifier does not answer in time, or is busy.
 * @throws BundleError it refuses the token, offers none that this client can use, or is no verifier.
 */
export async function bestOffer(
  endpoint: Endpoint,
  graph: string | undefined,
  fetch: Fetch,
  signal: Signal | undefined,
): Promise<Offer> {
  const listed = await inTime(listOf(endpoint, fetch, signal), endpoint.address);
  const offers = listed.filter(({ graphs }) => graph === undefined || graphs.includes(graph));
  const [best] = offers.length ? offers : listed.filter(({ graphs }) => !graphs.length);
  if (!best) {
    throw new BundleError(
      `the verifier at ${endpoint.address} offers no bundle for this client: export one with --target ${graph ?? "web"}`,
    );
  }
  return { id: best.id, url: `${bundlesAt(endpoint)}${best.id}/` };
}

/**
 * Return the bundle that a verifier offers to clients with their own downloads.
 *
 * @param graph target of the graph that the client computes; undefined for none.
 * @throws AwayError, BundleError see {@link bestOffer}.
 */
export async function offeredBundle({ url, token = "" }: Where, graph: string | undefined): Promise<Offer> {
  return bestOffer(new Endpoint(url, token), graph, withToken(platformFetch, token), undefined);
}

interface Listed {
  readonly id: string;
  readonly graphs: readonly string[];
}

/** Return what comes within the time of a list; platforms may wait for minutes, or for ever. Throws AwayError. */
async function inTime<T>(coming: Promise<T>, address: string): Promise<T> {
  let stop = (): void => undefined;
  const late = new Promise<never>((_, reject) => {
    const text = `the verifier at ${address} does not answer within ${LIST_TIMEOUT_S} s`;
    stop = later(LIST_TIMEOUT_S, () => reject(new AwayError(text)));
  });
  try {
    return await Promise.race([coming, late]);
  } finally {
    stop();
  }
}

async function listOf(endpoint: Endpoint, fetch: Fetch, signal: Signal | undefined): Promise<Listed[]> {
  const { address } = endpoint;
  const reply = await asked(endpoint, fetch, signal);
  let raw: unknown;
  try {
    raw = JSON.parse(await textOf(reply, MOST_LIST_BYTES));
  } catch {
    signal?.throwIfAborted();
    throw malformed(address);
  }
  const bundles = (raw as { bundles?: unknown } | null)?.bundles;
  if (!Array.isArray(bundles)) throw malformed(address);
  return bundles.map((offer: Partial<Listed> | null) => {
    const { id, graphs } = offer ?? {};
    if (typeof id !== "string" || !/^[0-9a-f]{64}$/.test(id) || !Array.isArray(graphs)) throw malformed(address);
    return { id, graphs: graphs.map(String) };
  });
}

async function asked(endpoint: Endpoint, fetch: Fetch, signal: Signal | undefined): Promise<Reply> {
  const { address } = endpoint;
  let reply: Reply;
  try {
    reply = await fetch(endpoint.at(BUNDLES_PATH), { cache: "no-store", signal });
  } catch (error) {
    signal?.throwIfAborted();
    throw new AwayError(`the verifier at ${address} cannot be reached: ${saidBy(error)}`, { cause: error });
  }
  const { ok, status } = reply;
  if (ok) return reply;
  const refusal = endpoint.refusal(status);
  if (refusal) throw new BundleError(refusal);
  if (status === 408 || status === 429 || status >= 500) {
    throw new AwayError(`the verifier at ${address} is busy (status ${status}): try again`);
  }
  throw new BundleError(endpoint.unexpected(status));
}

/** Return a reply's text. Throws BundleError if it has more than `most` bytes, or the platform's error if it breaks. */
export async function textOf(reply: Reply, most: number): Promise<string> {
  if (!reply.body) return reply.text(); // React Native has no streams
  const reader = reply.body.getReader();
  const pieces: Uint8Array[] = [];
  let bytes = 0;
  for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) {
    pieces.push(chunk.value!);
    bytes += chunk.value!.length;
    if (bytes > most) throw new BundleError(`the server's answer has more than ${most} bytes`);
  }
  const whole = new Uint8Array(bytes);
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return decodeUtf8(whole);
}

function malformed(address: string): BundleError {
  return new BundleError(`${address} is no moa-edge verifier: its list of bundles is malformed`);
}
