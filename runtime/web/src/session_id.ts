/** The id of a conversation, by which a proxy finds the verifier that has it. */

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
