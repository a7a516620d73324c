/** Names of hosts. */

/**
 * Whether only this machine reaches a host of this name or address.
 *
 * @param host as `URL.hostname` has it: an IPv4 address in four parts, an IPv6 address shortened and in brackets.
 */
export function isLoopback(host: string): boolean {
  return host === "localhost" || host === "[::1]" || /^127(?:\.\d+){3}$/.test(host);
}
