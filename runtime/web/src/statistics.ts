/** Statistics of one answer. */

/** Times in seconds, sizes in bytes. */
export interface Statistics {
  /** Verdicts received. */
  rounds: number;
  /** Committed tokens. */
  tokens: number;
  /** Tokens of the device's drafts that were sent, asked for or not. */
  drafted: number;
  /** Those of them that the target accepted. */
  accepted: number;
  /** Committed tokens of pushed verdicts, while the server streamed. */
  pushed: number;
  /** Tokens that the server drafted. */
  serverDrafted: number;
  /** Those of them that the target accepted. */
  serverAccepted: number;
  /** Whether the last verdict was pushed. */
  streamed: boolean;
  /** Committed tokens that the verifier wrote while the device was away; they came with a connection. */
  fetched: number;
  /** Committed tokens that were written while the verifier was away. */
  offline: number;
  /** Those of them that stayed by the user's policy, unchecked. */
  kept: number;
  /** Tentative tokens dropped. */
  rolledBack: number;
  /** Tokens of verdicts that the user replaced by the device's text. */
  takenBack: number;
  reconnects: number;
  /** Oldest turns that the target did not read, because its context has no room for them, see `ChatOptions.overflow`. */
  droppedTurns: number;
  bytesUp: number;
  bytesDown: number;
  seconds: number;
  /** From the question to the first committed token; null before it. */
  firstTokenSeconds: number | null;
  /** Seconds spent drafting. */
  draftSeconds: number;
  /** Seconds spent waiting for verdicts. */
  waitSeconds: number;
  /** Seconds from sending to each verdict; for a pushed one, since the verdict before. */
  roundTrips: number[];
  /** Type of the target's numbers, such as "int4"; several if a verifier of another type continued; empty if unknown. */
  dtype: string;
}

export function newStatistics(): Statistics {
  return {
    rounds: 0,
    tokens: 0,
    drafted: 0,
    accepted: 0,
    pushed: 0,
    serverDrafted: 0,
    serverAccepted: 0,
    streamed: false,
    fetched: 0,
    offline: 0,
    kept: 0,
    rolledBack: 0,
    takenBack: 0,
    reconnects: 0,
    droppedTurns: 0,
    bytesUp: 0,
    bytesDown: 0,
    seconds: 0,
    firstTokenSeconds: null,
    draftSeconds: 0,
    waitSeconds: 0,
    roundTrips: [],
    dtype: "",
  };
}

/** Return a copy that later rounds do not change. */
export function copyOf(statistics: Statistics): Statistics {
  return { ...statistics, roundTrips: [...statistics.roundTrips] };
}

/** Return the drafted tokens that were sent in vain: wrong, too late, or not verified. */
export function wasted({ accepted, drafted }: Statistics): number {
  return drafted - accepted;
}

/** Return the tokens committed by verdicts per round, bonus included. */
export function tau({ fetched, kept, rounds, takenBack, tokens }: Statistics): number {
  return rounds ? (tokens - kept - fetched + takenBack) / rounds : 0;
}

export function tokensPerSecond({ seconds, tokens }: Statistics): number {
  return seconds ? tokens / seconds : 0;
}
