/** The token, and where page, verifier and bundle are. */

const KEY = "token";

/** The token in a URL's fragment (`#token=...`), and the URL without it; null where there is none. A fragment is never sent
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

/** Keep the token that the address bar shows, and take it out of there; return the one that counts now. */
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
  /** For WebSockets. */
  readonly verifier: string;
  /** For requests over HTTP, without a slash at its end. */
  readonly http: string;
  /** Of the bundle, with a slash at its end. */
  readonly bundle: string;
}

/** An address that is none, in a sentence. */
export class AddressError extends Error {}

/**
 * @param page the page's own URL: an empty `address` means the verifier that it comes from.
 * @throws AddressError `address` is none.
 */
export function placeOf(page: string, address: string): Place {
  const given = address.trim();
  let url: URL;
  try {
    url = given === "" ? new URL(page) : new URL(given.includes("://") ? given : `https://${given}`);
  } catch {
    throw new AddressError(`“${given}” is no address: write it as https://host:8765`);
  }
  const scheme = { "http:": "http:", "ws:": "http:", "https:": "https:", "wss:": "https:" }[url.protocol];
  if (scheme === undefined || url.host === "") {
    throw new AddressError(
      given === "" ? "Enter the verifier's address in Settings, as https://host:8765" : `“${given}” is no address of a verifier: it begins with https://, http://, wss:// or ws://`,
    );
  }
  const http = `${scheme}//${url.host}${given === "" ? "" : url.pathname.replace(/\/+$/u, "")}`;
  return { verifier: http.replace(/^http/u, "ws"), http, bundle: `${http}/bundle/` };
}
