/**
 * User-facing strings: origins, the link, answers and their statistics. The window says the same: `apps/moa_chat/strings.py`.
 */

import type { FinishReason, LinkChanged, Origin, PauseReason, Statistics, TextSpan } from "@moa-edge/runtime";

/** Short names, for the legend. */
export const ORIGINS: { readonly [origin in Origin]: string } = {
  drafted: "drafted, accepted",
  corrected: "by the server",
  offline: "offline",
  kept: "kept",
};
export const DROPPED = "taken back";
/** Heading of an answer's reasoning, which is folded. */
export const REASONING = "Reasoning";
export const TENTATIVE = "not confirmed";

const CONFIRMED: { readonly [origin in Origin]: string } = {
  drafted: "This device proposed it, and the server accepted it.",
  corrected: "The server wrote this itself: a correction, or the word after an accepted draft.",
  offline: "This device wrote it offline; the server accepted it later.",
  kept: "This device wrote it offline, and you kept it.",
};
const UNCONFIRMED: { readonly [origin in Origin]: string } = {
  drafted: "This device proposes it; the server has not checked it yet.",
  corrected: "The server wrote this itself.",
  offline: "This device wrote it offline; the server may still change it.",
  kept: "You keep it; the server will continue from here.",
};

/** Texts while the device cannot write on, by the reason. */
export const PAUSES: { readonly [reason in PauseReason]: string } = {
  end: "Complete; waiting for the server to confirm it…",
  length: "Length limit reached; waiting for the server to confirm it…",
  limit: "Offline limit reached; waiting for the server…",
  grammar: "This device cannot follow the answer's format; waiting for the server…",
  off: "Waiting for the server…",
  unsure: "This device is not sure of the next words; waiting for the server…",
  unprepared: "This device cannot write here on its own; waiting for the server…",
  "low power": "Saving power: this device writes nothing on its own; waiting for the server…",
  background: "Paused in the background; continues when you return…",
};

/** While the server is away, and this device has not begun to write. */
export const ALONE = "The server is away: this device prepares to write on its own…";

/** Questions to begin with. */
export const EXAMPLES: readonly string[] = [
  "Why does the moon have phases? Explain in three sentences.",
  "Write a short poem about a train in a tunnel.",
  "Give me three ideas for a quick dinner.",
];
const TRIAL_TARGET = "smollm2-135m-instruct";

/** Return a model's name and size; `parameters` is 0 if that is not known. */
export function modelWords(name: string, parameters: number): string {
  if (parameters === 0) return name;
  const size = parameters >= 1e9 ? `${(parameters / 1e9).toFixed(1)}B` : `${+(parameters / 1e6).toPrecision(3)}M`;
  return `${name} (${size} parameters)`;
}

/** Return the name of the model that answers, and where it runs; empty if that is not known yet. */
export function answersWords(name: string, parameters: number, server: string): string {
  if (name === "") return "";
  const words = `${modelWords(name, parameters)}, on ${server}`;
  return name === TRIAL_TARGET
    ? `${words}\nA small model for first tries: moa-serve --model NAME runs a better one.`
    : words;
}

export function readingWords(tokens: number): string {
  return tokens > 0
    ? `The server reads your text (${tokens.toLocaleString("en")} tokens)…`
    : "The server reads your text…";
}

export function originSentence(origin: Origin, committed: boolean): string {
  return (committed ? CONFIRMED : UNCONFIRMED)[origin];
}

export function droppedSentence(text: string): string {
  return `This device wrote “${text}”, and the server replaced it.`;
}

export function correctedSentence(words: number): string {
  return words === 1
    ? "1 word that this device wrote was corrected."
    : `${words} words that this device wrote were corrected.`;
}

export const CHECKING = "The server is checking this answer";

export function unconfirmedWords(words: number): string {
  return `${words} ${words === 1 ? "word" : "words"} not confirmed yet`;
}

export function countWords(text: string): number {
  return text.split(/\s+/u).filter((word) => word !== "").length;
}

/** Return the link's state in words. `retryInS`: the time left until the next attempt. */
export function linkWords(link: LinkChanged, retryInS: number | null, wantedOffline: boolean): string {
  if (wantedOffline) return "working offline";
  if (link.status === "online") return link.late ? "slow" : "online";
  if (link.status === "reconnecting") return "reconnecting";
  return retryInS ? `reconnecting in ${Math.max(1, Math.round(retryInS))} s` : "no connection";
}

/** The word by itself, not as a part of an address. */
const VERIFIER = /(?<![\w/.-])[Vv]erifier(?![\w/-])/gu;

/** Return a message of the runtime with a capital letter, a full stop, and "server" for "verifier". */
export function asSentence(text: string): string {
  const trimmed = text.trim().replace(VERIFIER, (word) => (word === "Verifier" ? "Server" : "server"));
  return trimmed.slice(0, 1).toUpperCase() + trimmed.slice(1) + (/[.!?…]$/u.test(trimmed) ? "" : ".");
}

/** Return bytes in megabytes: `megabytes(50_400_000)` is `"50.4 MB"`. */
export function megabytes(bytes: number): string {
  return `${(bytes / 1e6).toFixed(bytes < 99_500_000 ? 1 : 0)} MB`;
}

/** Remark of an answer that the device wrote, and that the user kept or the verifier refused. */
export const AS_WRITTEN = "as this device wrote it, not confirmed";
const RECENT_TRIPS = 8;
const FINISH: { readonly [reason in FinishReason]: string } = {
  stop: "",
  length: "cut off at the length limit",
  context: "the model's context is full",
  grammar: "the answer's grammar reached a limit; the format may be wrong",
};

/** Return the lines of the button "Figures". Speeds are in words. */
export function figuresOf(statistics: Statistics, wordsAToken: number): string[] {
  const { firstTokenSeconds: first, rounds, roundTrips } = statistics;
  const shown = [`${(wordsAToken * generationSpeed(statistics)).toFixed(1)} words a second after the first ones`];
  if (first !== null) shown.push(`first word after ${first.toFixed(2)} s`);
  for (const [who, drafted, accepted] of [
    ["this device", statistics.drafted, statistics.accepted],
    ["the server", statistics.serverDrafted, statistics.serverAccepted],
  ] as const) {
    if (drafted > 0) shown.push(`${accepted} of ${drafted} tokens drafted by ${who} were used`);
  }
  if (rounds > 0) {
    const written = statistics.tokens - statistics.kept - statistics.fetched + statistics.takenBack;
    shown.push(`${written} tokens in ${rounds} passes of the model; without drafts: one pass for each token`);
  }
  if (roundTrips.length > 0) {
    const waited = `${Math.round(1000 * median(roundTrips.slice(-RECENT_TRIPS)))} ms`;
    shown.push(
      statistics.streamed
        ? `the server drafts: something new every ${waited}`
        : `this device drafts: a reply from the server after ${waited}`,
    );
  }
  if (statistics.dtype !== "") shown.push(`number type of the model: ${statistics.dtype}`);
  shown.push(`${size(statistics.bytesUp)} sent, ${size(statistics.bytesDown)} received`);
  return shown;
}

/**
 * Return the line beneath an answer; `reason` is null if it was stopped. Tokens without text, such as half a character that the
 * server completed, and white space are on no screen: `spans` tell whether any visible text was written offline.
 */
export function remarksOf(statistics: Statistics, reason: FinishReason | null, spans: readonly TextSpan[]): string {
  const { kept, offline } = statistics;
  const parts = [
    reason === null ? "stopped" : FINISH[reason],
    kept > 0 ? (kept === statistics.tokens ? "" : "partly ") + AS_WRITTEN : "",
    spans.some(({ origin, text }) => origin === "offline" && text.trim() !== "") ? "partly written offline" : "",
    statistics.droppedTurns > 0 ? `without the oldest messages (${statistics.droppedTurns}), which do not fit` : "",
    offline > 0 && statistics.rolledBack > 0 && kept === 0 ? "corrected by the server" : "",
  ];
  return parts.filter((part) => part !== "").join(" · ");
}

/** Return tokens a second after the first verdict, whose waiting time is shown separately; 0 before the second. */
function generationSpeed(statistics: Statistics): number {
  const seconds = statistics.seconds - (statistics.firstTokenSeconds ?? 0);
  return seconds > 0 ? Math.max(statistics.tokens - 1, 0) / seconds : 0;
}

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

/** Return bytes with a fitting unit. */
function size(count: number): string {
  if (count < 1e3) return `${count} B`;
  return count < 1e6 ? `${Math.round(count / 1e3)} kB` : `${(count / 1e6).toFixed(1)} MB`;
}
