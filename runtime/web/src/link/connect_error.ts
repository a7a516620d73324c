/** Why there is no connection to the verifier, in a sentence that says what to do. */

import { MoaError } from "../errors.js";
import type { Endpoint } from "./endpoint.js";
import type { Answered, Host } from "./host.js";

/** The verifier cannot be reached or refuses the connection. */
export class ConnectError extends MoaError {
  override readonly name = "ConnectError";

  /** @param final trying again with the same settings cannot help. */
  constructor(
    text: string,
    readonly final: boolean,
    options?: { readonly cause: unknown },
  ) {
    super(text, options);
  }
}

/** A defect that ended the link: with its name, as nothing else is known of it. */
export function unexpectedError(address: string, error: unknown): ConnectError {
  return new ConnectError(`the connection to ${address} failed unexpectedly: ${String(error)}`, true, { cause: error });
}

/** No connection stood within so many seconds. */
export function tooLate(address: string, withinS: number): ConnectError {
  return new ConnectError(`nothing answers at ${address} within ${withinS} s: a verifier may still be starting`, false);
}

/**
 * Why a WebSocket could not be made. The WebSocket API tells nobody, so the verifier is asked by HTTP, which a browser tells
 * more about.
 *
 * @param withinS seconds that each request may take.
 */
export async function connectError(endpoint: Endpoint, host: Host, withinS: number): Promise<ConnectError> {
  const { address, onThisMachine } = endpoint;
  const { origin } = host;
  if (origin?.startsWith("https:") && address.startsWith("ws:") && !onThisMachine) {
    const text = `a page that came over https may connect by wss:// only, not to ${address}`;
    return new ConnectError(`${text}: start moa-serve with --tls-cert and --tls-key, and use wss://`, true);
  }
  const answered = await host.ask(endpoint.at("/v1/status"), endpoint.token, true, withinS);
  if (answered) return refused(endpoint, answered);
  // Not final: a proxy whose verifier is just starting looks the same from a page.
  if (origin !== undefined && (await host.ask(endpoint.at("/healthz"), "", false, withinS))) {
    const text = `what answers at ${address} does not let web pages of ${origin} connect`;
    return new ConnectError(`${text}: start moa-serve with --allow-origin ${origin}`, false);
  }
  const trusted = `; if one runs there, open ${endpoint.at("/healthz")} to see whether its certificate is trusted`;
  const hint = address.startsWith("wss:") ? trusted : "";
  return new ConnectError(`no verifier answers at ${address}; start one with moa-serve${hint}`, false);
}

function refused({ address, token }: Endpoint, { elsewhere, status }: Answered): ConnectError {
  if (status === 401 || status === 403) {
    const text = token === "" ? "asks for a token, and none is given" : "refused the token; check it";
    return new ConnectError(`the verifier at ${address} ${text}`, true);
  }
  if (elsewhere) {
    const text = `${address} sends its clients elsewhere, which is not followed`;
    return new ConnectError(`${text}: name the verifier's own address`, true);
  }
  if (status === 503) return new ConnectError(`the verifier at ${address} is full or shutting down`, false);
  if (status === 200) {
    const text = `what answers at ${address} takes requests, but no WebSocket`;
    return new ConnectError(`${text}: a proxy between may have to let it through`, false);
  }
  const final = status >= 400 && status < 500 && status !== 408 && status !== 429;
  return new ConnectError(`${address} answered HTTP ${status}: is it a moa-edge verifier?`, final);
}
