/** Addresses of verifiers, as people type them. */

// Browsers and Node have it; the sources are compiled without the types of either.
declare const URL: new (text: string) => {
  readonly username: string;
  readonly password: string;
  readonly hostname: string;
  readonly host: string;
  readonly port: string;
  readonly pathname: string;
};

const SESSION_PATH = "/v1/session";
const SECURE: { readonly [scheme: string]: boolean } = { ws: false, http: false, wss: true, https: true };

/** The address of a verifier, perhaps below a path of a proxy. */
export class Address {
  private constructor(
    readonly secure: boolean,
    /** In lower case, with the brackets of an IPv6 address, without a port. */
    readonly hostname: string,
    /** With a port if it is not the scheme's own. */
    readonly host: string,
    /** Path of the verifier's root, without a slash at its end; empty for that of the host. */
    readonly prefix: string,
  ) {}

  /**
   * Read an address with one of the schemes ws, wss, http and https, or with none, which means `scheme`. A path is the proxy's, or
   * that of the session's WebSocket; query and fragment are left out.
   *
   * @returns undefined if it is no address.
   */
  static parse(text: string, scheme = "ws"): Address | undefined {
    const at = text.indexOf("://");
    const [given, rest] = at < 0 ? [scheme, text] : [text.slice(0, at).toLowerCase(), text.slice(at + 3)];
    const secure = Object.hasOwn(SECURE, given) ? SECURE[given] : undefined;
    // oxlint-disable-next-line no-control-regex
    if (secure === undefined || /^[/?#]|[\s\x00-\x1f\x7f\\]/u.test(rest) || /^[^/?#]*@/u.test(rest)) return undefined;
    try {
      const { hostname, host, port, pathname } = new URL(`${secure ? "wss" : "ws"}://${rest}`);
      if (port === "0" || (!hostname.startsWith("[") && !/^[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?$/u.test(hostname))) return undefined;
      const path = pathname.replace(/\/+$/u, "");
      const prefix = path.endsWith(SESSION_PATH) ? path.slice(0, -SESSION_PATH.length).replace(/\/+$/u, "") : path;
      return new Address(secure, hostname, host, prefix);
    } catch {
      return undefined; // an invalid port, IPv6 address or name
    }
  }

  /** URL of the session's WebSocket. */
  get session(): string {
    return `${this.secure ? "wss" : "ws"}://${this.host}${this.prefix}${SESSION_PATH}`;
  }

  /** Return the URL of another of the verifier's resources, such as `/v1/status`. */
  at(path: string): string {
    return `${this.secure ? "https" : "http"}://${this.host}${this.prefix}${path}`;
  }
}
