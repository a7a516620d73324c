/** An answer's statistics in words. */

import type { FinishReason, Statistics } from "@moa-edge/runtime";

/** Of an answer that the device wrote, and that the user kept or the verifier refused. */
export const AS_WRITTEN = "as this device wrote it, not confirmed";
const RECENT_TRIPS = 8;
const FINISH: { readonly [reason in FinishReason]: string } = {
  stop: "",
  length: "cut off at its greatest length",
  context: "the target's context is full",
};

/** What stands behind the button "Figures". A person counts words; what is drafted are pieces of them, the tokens. */
export function figuresOf(statistics: Statistics, wordsAToken: number): string[] {
  const { firstTokenSeconds: first, rounds, roundTrips } = statistics;
  const shown = [`${(wordsAToken * generationSpeed(statistics)).toFixed(1)} words a second behind the first ones`];
  if (first !== null) shown.push(`first word after ${first.toFixed(2)} s`);
  for (const [who, drafted, accepted] of [
    ["this device", statistics.drafted, statistics.accepted],
    ["the server", statistics.serverDrafted, statistics.serverAccepted],
  ] as const) {
    if (drafted > 0) shown.push(`${accepted} of ${drafted} pieces of words drafted by ${who} were right`);
  }
  if (rounds > 0) {
    const written = statistics.tokens - statistics.kept - statistics.fetched + statistics.takenBack;
    shown.push(`${written} pieces of words in ${rounds} passes of the model; without drafts it would be a pass for each`);
  }
  if (roundTrips.length > 0) {
    const waited = `${Math.round(1000 * median(roundTrips.slice(-RECENT_TRIPS)))} ms`;
    shown.push(
      statistics.serverDrafts
        ? `the server drafts: something new every ${waited}`
        : `this device drafts: an answer from the server after ${waited}`,
    );
  }
  shown.push(`${size(statistics.bytesUp)} sent, ${size(statistics.bytesDown)} received`);
  return shown;
}

/** What is remarkable about an answer, for the line beneath it; `reason` is null for one that was stopped. */
export function remarksOf(statistics: Statistics, reason: FinishReason | null): string {
  const { kept, offline } = statistics;
  const parts = [
    reason === null ? "stopped" : FINISH[reason],
    kept > 0 ? (kept === statistics.tokens ? "" : "partly ") + AS_WRITTEN : "",
    offline > kept ? "partly written offline" : "",
    offline > 0 && statistics.rolledBack > 0 && kept === 0 ? "corrected by the server" : "",
  ];
  return parts.filter((part) => part !== "").join(" · ");
}

/** Tokens per second behind the first verdict, whose waiting time is a figure of its own; 0 before the second. */
function generationSpeed(statistics: Statistics): number {
  const seconds = statistics.seconds - (statistics.firstTokenSeconds ?? 0);
  return seconds > 0 ? Math.max(statistics.tokens - 1, 0) / seconds : 0;
}

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

/** Bytes in the unit that reads best. */
function size(count: number): string {
  if (count < 1e3) return `${count} B`;
  return count < 1e6 ? `${Math.round(count / 1e3)} kB` : `${(count / 1e6).toFixed(1)} MB`;
}
