/** What the page says about origins, the link and answers. The window says the same: `apps/moa_chat/strings.py`. */

import type { LinkChanged, Origin, PauseReason } from "@moa-edge/runtime";

/** Short names, for the legend. */
export const ORIGINS: { readonly [origin in Origin]: string } = {
  drafted: "drafted, accepted",
  corrected: "by the server",
  offline: "offline",
  kept: "kept",
};
export const DROPPED = "taken back";
export const TENTATIVE = "not confirmed";

const CONFIRMED: { readonly [origin in Origin]: string } = {
  drafted: "This device proposed it, and the server accepted it.",
  corrected: "The server wrote this itself: a correction, or the word after an accepted draft.",
  offline: "This device wrote it without the server, which accepted it later.",
  kept: "This device wrote it without the server, and you kept it.",
};
const UNCONFIRMED: { readonly [origin in Origin]: string } = {
  drafted: "This device proposes it; the server has not answered yet.",
  corrected: "The server wrote this itself.",
  offline: "This device wrote it without the server, which may still change it.",
  kept: "You keep it; the server will go on from here.",
};

/** What an answer says while the device cannot write on. */
export const PAUSES: { readonly [reason in PauseReason]: string } = {
  end: "Written to its end; the verifier has to confirm it…",
  length: "Written to its greatest length; the verifier has to confirm it…",
  limit: "So much may be written offline; waiting for the verifier…",
  off: "Waiting for the verifier…",
  unsure: "This device is not sure how it goes on; waiting for the verifier…",
  unprepared: "Waiting for the verifier: this device cannot write here on its own…",
  "low power": "Saving power: this device writes nothing alone; waiting for the verifier…",
  background: "In the background; it goes on when you are back…",
};

export function readingWords(tokens: number): string {
  return tokens > 0
    ? `The verifier reads your text (${tokens.toLocaleString("en")} tokens)…`
    : "The verifier reads your text…";
}

export function originSentence(origin: Origin, committed: boolean): string {
  return (committed ? CONFIRMED : UNCONFIRMED)[origin];
}

export function droppedSentence(text: string): string {
  return `This device wrote “${text}”, and the server wrote something else instead.`;
}

export function correctedSentence(words: number): string {
  return words === 1
    ? "1 word that this device wrote was corrected."
    : `${words} words that this device wrote were corrected.`;
}

export function unconfirmedWords(text: string): string {
  const words = countWords(text);
  return `${words} ${words === 1 ? "word" : "words"} not confirmed yet`;
}

export function countWords(text: string): number {
  return text.split(/\s+/u).filter((word) => word !== "").length;
}

/** How the link is, in words. `retryInS`: the time left until the next attempt. */
export function linkWords(link: LinkChanged, retryInS: number | null, wantedOffline: boolean): string {
  if (wantedOffline) return "working offline";
  if (link.status === "online") return link.detail === "" ? "online" : "slow";
  if (link.status === "reconnecting") return "reconnecting";
  return retryInS ? `offline, reconnecting in ${Math.max(1, Math.round(retryInS))} s` : "offline";
}

/** A message of the runtime with a capital letter and a full stop. */
export function asSentence(text: string): string {
  const trimmed = text.trim();
  return trimmed.slice(0, 1).toUpperCase() + trimmed.slice(1) + (/[.!?…]$/u.test(trimmed) ? "" : ".");
}

/** Bytes as people read them: `megabytes(50_400_000)` is `"50.4 MB"`. */
export function megabytes(bytes: number): string {
  return `${(bytes / 1e6).toFixed(bytes < 99_500_000 ? 1 : 0)} MB`;
}
