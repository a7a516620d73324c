/** Where the verifier is. */

import { base64Encode } from "@bufbuild/protobuf/wire";

import { encodeUtf8 } from "../utf8.js";
import { ConnectError } from "./connect_error.js";
import { isLoopback } from "./listening.js";

// Browsers and Node have it; the sources are compiled without the types of either.
declare const URL: new (text: string) => {
  readonly protocol: string;
  readonly username: string;
  readonly hostname: string;
  readonly host: string;
  readonly port: string;
  readonly pathname: string;
};

const SESSION_PATH = "/v1/session";
const SESSION_SUBPROTOCOL = "moa.v1";
const BEARER = "moa.bearer.";

export class Endpoint {
  /** The WebSocket's address: a bare server address gets the session's path. */
  readonly address: string;
  /** Whether no network leads there. */
  readonly onThisMachine: boolean;
  private readonly web: string; // its origin, for requests

  /**
   * @param token the bearer token; empty for none.
   * @throws ConnectError not a ws, wss, http or https address.
   */
  constructor(
    readonly url: string,
    readonly token = "",
  ) {
    const [scheme, rest] = url.includes("://") ? partsOf(url) : ["ws", url];
    const known = { ws: "ws", wss: "wss", http: "ws", https: "wss" }[scheme];
    const parts = known && !/\s/.test(url) ? parsed(`${known}://${rest}`) : undefined;
    if (!parts || !parts.hostname || parts.username || parts.port === "0") {
      throw new ConnectError(`${JSON.stringify(url)} is no verifier address: expected ws://HOST:PORT`, true);
    }
    const path = parts.pathname === "/" ? SESSION_PATH : parts.pathname;
    this.address = `${known}://${parts.host}${path}`;
    this.web = `${known === "ws" ? "http" : "https"}://${parts.host}`;
    this.onThisMachine = isLoopback(parts.hostname);
  }

  /** What a WebSocket offers: the token, which a page can put into no header. */
  get protocols(): string[] {
    if (!this.token) return [];
    return [SESSION_SUBPROTOCOL, BEARER + base64Encode(encodeUtf8(this.token), "url")];
  }

  /** The address of another of the verifier's resources. */
  at(path: string): string {
    return this.web + path;
  }
}

function partsOf(url: string): [string, string] {
  const at = url.indexOf("://");
  return [url.slice(0, at).toLowerCase(), url.slice(at + 3)];
}

function parsed(url: string): InstanceType<typeof URL> | undefined {
  try {
    return new URL(url);
  } catch {
    return undefined; // a port, an IPv6 address or a name that cannot be
  }
}
