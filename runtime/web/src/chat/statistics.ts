/** Figures of one answer. */

/** Times in seconds, sizes in bytes. */
export interface Statistics {
  /** Verdicts received. */
  rounds: number;
  /** Committed. */
  tokens: number;
  /** Tokens sent to be verified. */
  drafted: number;
  /** Those of them the target accepted. */
  accepted: number;
  /** Committed tokens that the server wrote by itself, while it was the one to draft. */
  pushed: number;
  /** Tokens that it drafted for that. */
  serverDrafted: number;
  /** Those of them the target accepted. */
  serverAccepted: number;
  /** Whether the last verdict came from a server that went on by itself. */
  serverDrafts: boolean;
  /** Committed tokens that the verifier wrote on while the device was away: they came with a connection. */
  fetched: number;
  /** Committed tokens that were written while the verifier was away. */
  offline: number;
  /** Those of them that stayed by the user's policy, without asking the target. */
  kept: number;
  /** Tentative tokens dropped. */
  rolledBack: number;
  /** Tokens of verdicts that the user replaced by what the device had written. */
  takenBack: number;
  reconnects: number;
  bytesUp: number;
  bytesDown: number;
  seconds: number;
  /** From the question to the first committed token; null before it. */
  firstTokenSeconds: number | null;
  /** Spent drafting. */
  draftSeconds: number;
  /** Spent waiting for verdicts. */
  waitSeconds: number;
  /** From sending to each verdict; to one that was pushed, from the verdict before. */
  roundTrips: number[];
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
    serverDrafts: false,
    fetched: 0,
    offline: 0,
    kept: 0,
    rolledBack: 0,
    takenBack: 0,
    reconnects: 0,
    bytesUp: 0,
    bytesDown: 0,
    seconds: 0,
    firstTokenSeconds: null,
    draftSeconds: 0,
    waitSeconds: 0,
    roundTrips: [],
  };
}

/** A copy that later rounds do not change. */
export function copyOf(statistics: Statistics): Statistics {
  return { ...statistics, roundTrips: [...statistics.roundTrips] };
}

/** Tokens committed by verdicts per round, bonus included. */
export function tau({ fetched, kept, rounds, takenBack, tokens }: Statistics): number {
  return rounds ? (tokens - kept - fetched + takenBack) / rounds : 0;
}

export function tokensPerSecond({ seconds, tokens }: Statistics): number {
  return seconds ? tokens / seconds : 0;
}
