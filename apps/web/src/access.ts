/** The token, and the addresses of page, verifier and bundle. */

import { Address } from "@moa-edge/runtime";

const KEY = "token";

/** Return the token in a URL's fragment (`#token=...`), and the URL without it; null if there is none. A fragment is never sent
 * to a server. */
export function tokenOf(url: string): { token: string; rest: string } | null {
  const parsed = new URL(url);
  const values = new URLSearchParams(parsed.hash.slice(1));
  const token = values.get("token");
  if (token === null) return null;
  values.delete("token");
  parsed.hash = values.toString();
  return { token, rest: parsed.href.replace(/#$/u, "") };
}

/** Move the token from the address bar to the storage; return the stored one. */
export function takeToken(): string {
  const found = tokenOf(location.href);
  if (found !== null) {
    history.replaceState(history.state, "", found.rest);
    saveToken(found.token);
  }
  return localStorage.getItem(KEY) ?? "";
}

export function saveToken(token: string): void {
  if (token === "") localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, token);
}

/** Addresses of a verifier. */
export interface Place {
  /** Address for WebSockets. */
  readonly verifier: string;
  /** Address of the bundle, with a slash at its end. */
  readonly bundle: string;
}

/** An invalid address. */
export class AddressError extends Error {}

/**
 * Return the addresses of a verifier.
 *
 * @param page the page's own URL: an empty `address` means the verifier that serves the page, perhaps below a path of a proxy.
 * @throws AddressError `address` is invalid.
 */
export function placeOf(page: string, address: string): Place {
  const given = address.trim();
  const parsed = Address.parse(given === "" ? page.replace(/[?#].*$/u, "").replace(/[^/]*$/u, "") : given, "https");
  if (parsed === undefined) {
    throw new AddressError(
      given === "" ? "Enter the server's address in Settings, as https://host:8765" : `“${given}” is no address of a server: it begins with https://, http://, wss:// or ws://`,
    );
  }
  return { verifier: parsed.session, bundle: parsed.at("/bundle/") };
}
