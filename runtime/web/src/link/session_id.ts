/** The id of a conversation by which a proxy finds the verifier that has it. */

/** Of the query: a page can set no header of a WebSocket's request. */
const SESSION_ID = "x-session-id";
const DIGITS = 32;

/** 32 random hexadecimal digits. No secret: it says nothing of the conversation, and opens none. */
export function newSessionId(): string {
  return Array.from({ length: DIGITS }, () => Math.floor(16 * Math.random()).toString(16)).join("");
}

/** Whether a stored text is one. */
export function isSessionId(text: string): boolean {
  return /^[0-9a-f]{32}$/.test(text);
}

/** The address of a WebSocket, with the id. */
export function withSessionId(address: string, sessionId: string): string {
  return `${address}?${SESSION_ID}=${sessionId}`;
}
