/** The verifier's address, and the session ids by which proxies find the verifier of a conversation. */

import { base64Encode } from "@bufbuild/protobuf/wire";

import { Address } from "./address.js";
import { ConnectError } from "./errors.js";
import { encodeUtf8 } from "./utf8.js";

const SESSION_SUBPROTOCOL = "moa.v1";
const BEARER = "moa.bearer.";

/** Address and token of a verifier. */
export class Endpoint {
  /** The WebSocket's address, see {@link Address}. */
  readonly address: string;
  /** Whether the verifier is on this machine. */
  readonly onThisMachine: boolean;
  private readonly parsed: Address;

  /**
   * @param token the bearer token; empty for none.
   * @throws ConnectError not a ws, wss, http or https address.
   */
  constructor(
    readonly url: string,
    readonly token = "",
  ) {
    const parsed = Address.parse(url);
    if (!parsed) throw new ConnectError(`${JSON.stringify(url)} is no verifier address: expected ws://HOST:PORT`, true);
    this.parsed = parsed;
    this.address = parsed.session;
    this.onThisMachine = isLoopback(parsed.hostname);
  }

  /** Return what a status says of access, for sessions and downloads, or undefined. */
  refusal(status: number): string | undefined {
    const { address, token } = this;
    if (status === 401) {
      const text = token === "" ? "asks for a token, and none is given" : "refused the token; check it";
      return `the verifier at ${address} ${text}`;
    }
    if (status === 403) {
      return `${address} refused the connection (HTTP 403): check the address, with its path behind a proxy`;
    }
    if (status !== 421) return undefined;
    return `the verifier behind ${address} does not answer for this host: its moa-serve needs --allow-host NAME`;
  }

  /** Return what a status says that no verifier answers with. */
  unexpected(status: number): string {
    return `${this.address} answered HTTP ${status}: check that this is a moa-edge verifier's address`;
  }

  /** Subprotocols that the WebSocket offers. They carry the token, because a page cannot set headers. */
  get protocols(): string[] {
    if (!this.token) return [];
    return [SESSION_SUBPROTOCOL, BEARER + base64Encode(encodeUtf8(this.token), "url")];
  }

  /** Return the address of another of the verifier's resources. */
  at(path: string): string {
    return this.parsed.at(path);
  }
}

/**
 * Return whether only this machine reaches a host of this name or address.
 *
 * @param host as `URL.hostname` has it: an IPv4 address in four parts, an IPv6 address shortened and in brackets.
 */
export function isLoopback(host: string): boolean {
  return host === "localhost" || host === "[::1]" || /^127(?:\.\d+){3}$/.test(host);
}

/** Name of the query parameter: a page cannot set headers of a WebSocket's request. */
const SESSION_ID = "x-session-id";
const DIGITS = 32;

/** Return 32 random hexadecimal digits. They are no secret: the id gives no access to the conversation. */
export function newSessionId(): string {
  return Array.from({ length: DIGITS }, () => Math.floor(16 * Math.random()).toString(16)).join("");
}

/** Return whether a text is a session id. */
export function isSessionId(text: string): boolean {
  return /^[0-9a-f]{32}$/.test(text);
}

/** Return a WebSocket's address with the id. */
export function withSessionId(address: string, sessionId: string): string {
  return `${address}?${SESSION_ID}=${sessionId}`;
}
