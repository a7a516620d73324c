/** Addresses of verifiers, as people type them. */

import { encodeUtf8 } from "./utf8.js";

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
    const [, authority, path] = /^([^/?#]*)([^?#]*)/u.exec(rest)!;
    const [, name, port] = /^(\[[^\]]*\]|[^:[\]]*)(?::(\d{0,5}))?$/u.exec(authority!) ?? [];
    const hostname = name && hostnameOf(name);
    if (!hostname || (port && (Number(port) === 0 || Number(port) > 65535))) return undefined;
    const shown = port && Number(port) !== (secure ? 443 : 80) ? `:${Number(port)}` : "";
    const whole = quoted(withoutDots(path || "/")).replace(/\/+$/u, "");
    const prefix = whole.endsWith(SESSION_PATH) ? whole.slice(0, -SESSION_PATH.length).replace(/\/+$/u, "") : whole;
    return new Address(secure, hostname, hostname + shown, prefix);
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

/** Return a host's name in lower case and ASCII, or an IPv6 address shortened and in brackets; undefined if it is neither. */
function hostnameOf(name: string): string | undefined {
  if (name.startsWith("[")) return ipv6(name.slice(1, -1));
  const labels = name.toLowerCase().normalize("NFC").split(".");
  const ascii = labels.map((label) => (/^[\x00-\x7f]*$/u.test(label) ? label : `xn--${punycode(label)}`)).join(".");
  return /^[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?$/u.test(ascii) ? ascii : undefined;
}

function ipv6(text: string): string | undefined {
  const ipv4 = /^(.*:)(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})$/u.exec(text);
  let given = text;
  if (ipv4) {
    const [a, b, c, d] = ipv4.slice(2).map(Number) as [number, number, number, number];
    if (Math.max(a, b, c, d) > 255) return undefined;
    given = `${ipv4[1]}${(256 * a + b).toString(16)}:${(256 * c + d).toString(16)}`;
  }
  const halves = given.split("::");
  const [left = [], right = []] = halves.map((half) => (half === "" ? [] : half.split(":")));
  const count = left.length + right.length;
  if (halves.length > 2 || (halves.length === 2 ? count > 7 : count !== 8)) return undefined;
  if (![...left, ...right].every((group) => /^[0-9a-f]{1,4}$/iu.test(group))) return undefined;
  const groups = [...left, ...Array<string>(8 - count).fill("0"), ...right].map((group) => parseInt(group, 16));
  let [start, length] = [0, 1]; // the first of the longest rows of zeros is left out
  for (let at = 0; at < 8; at++) {
    let zeros = 0;
    while (groups[at + zeros] === 0) zeros++;
    if (zeros > length) [start, length] = [at, zeros];
  }
  const shown = groups.map((group) => group.toString(16));
  if (length === 1) return `[${shown.join(":")}]`;
  return `[${shown.slice(0, start).join(":")}::${shown.slice(start + length).join(":")}]`;
}

/** Return a label in Punycode (RFC 3492). */
function punycode(label: string): string {
  const codes = Array.from(label, (character) => character.codePointAt(0)!);
  const digit = (value: number): string => String.fromCharCode(value < 26 ? 97 + value : 22 + value);
  const basic = codes.filter((code) => code < 128);
  let done = basic.length;
  let text = String.fromCharCode(...basic) + (done ? "-" : "");
  let [last, delta, bias] = [128, 0, 72];
  while (done < codes.length) {
    const next = Math.min(...codes.filter((code) => code >= last));
    delta += (next - last) * (done + 1);
    for (const code of codes) {
      if (code < next) delta++;
      if (code !== next) continue;
      let rest = delta;
      for (let base = 36; ; base += 36) {
        const threshold = Math.min(Math.max(base - bias, 1), 26);
        if (rest < threshold) break;
        text += digit(threshold + ((rest - threshold) % (36 - threshold)));
        rest = Math.floor((rest - threshold) / (36 - threshold));
      }
      text += digit(rest);
      let share = Math.floor(delta / (done === basic.length ? 700 : 2));
      share += Math.floor(share / ++done);
      for (bias = 0; share > 455; bias += 36) share = Math.floor(share / 35);
      bias += Math.floor((36 * share) / (share + 38));
      delta = 0;
    }
    delta++;
    last = next + 1;
  }
  return text;
}

/** Resolve the parts `.` and `..` of a path. */
function withoutDots(path: string): string {
  const kept: string[] = [];
  const parts = path.split("/").slice(1);
  for (const part of parts) {
    if (part === "..") kept.pop();
    else if (part !== ".") kept.push(part);
  }
  return `/${kept.join("/")}${/(?:^|\/)\.{1,2}$/u.test(path) ? "/" : ""}`;
}

/** Quote the characters of a path that URLs do not have; quotes stay. */
function quoted(path: string): string {
  return path.replace(/[^\w./%:@!$&'()*+,;=~[\]|^-]+/gu, (text) =>
    Array.from(encodeUtf8(text), (byte) => `%${byte.toString(16).toUpperCase().padStart(2, "0")}`).join(""),
  );
}
