/** The contract of every drafter, and the budget of a draft. */

import type { StoppingRule } from "../offline_stopping.js";
import type { KvArray } from "../session/memory_rows.js";
import type { Sampling } from "../session/sampling.js";
import type { DraftTree } from "../session/tree.js";

/** A candidate and its log-probability (nats): of being the target's choice, after {@link GumbelCoupling} has ranked it. */
export interface DraftToken {
  readonly token: number;
  readonly logprob: number;
}

/**
 * Cost of the parts of a draft, each in tokens that the same time brings elsewhere. A part pays if it is expected to bring
 * more: tokens a second are largest when all parts that pay are taken (Dinkelbach 1967).
 */
export interface Prices {
  /** Of a step of the model, however many nodes it continues. */
  readonly step: number;
  /** Of each node that a step continues. */
  readonly query: number;
  /** Of each token sent. */
  readonly node: number;
  /** Share of tokens that are right if those before them are. */
  readonly follows: number;
}

export const FREE: Prices = { step: 0, query: 0, node: 0, follows: 1 };

/** Return the price of one more token of a chain: a step, which continues one node, and sending it. */
export function tokenPrice(prices: Prices): number {
  return prices.step + prices.query + prices.node;
}

/** Return the prices with all costs multiplied by `factor`. */
export function scaled({ follows, node, query, step }: Prices, factor: number): Prices {
  return { step: factor * step, query: factor * query, node: factor * node, follows };
}

/** The largest draft that is allowed, and the cost of its parts. */
export interface Budget {
  /** Tokens sent. */
  readonly nodes: number;
  /** Tokens of a path that the model drafts; tokens that it knows without a step may follow. */
  readonly levels: number;
  /** Nodes that each step continues. */
  readonly width: number;
  /** Whether a token may have several successors; else the draft is a chain. */
  readonly branches: boolean;
  /** Tokens of a path. */
  readonly depth: number;
  readonly prices: Prices;
  /** Tokens at the prefix's end that the target has not confirmed. */
  readonly tentative: number;
  /** Log-probability of the tentative tokens (nats). */
  readonly logprob: number;
}

/** Return a budget with defaults for the rest: a chain, at no cost. */
export function budgetOf(nodes: number, levels: number, rest: Partial<Budget> = {}): Budget {
  return { nodes, levels, width: 1, branches: false, depth: 2 ** 30, prices: FREE, tentative: 0, logprob: 0, ...rest };
}

/**
 * Return how many nodes of a level the next step should continue; 0 if the step does not pay.
 *
 * @param logprobs of the paths to the nodes, best first (nats).
 */
export function continued(budget: Budget, logprobs: readonly number[]): number {
  const { step, query, node, follows } = budget.prices;
  const gains = logprobs.slice(0, budget.width).map((one) => Math.exp(budget.logprob + one) * follows - query - node);
  const gaining = gains.filter((gain) => gain >= 0);
  return gaining.reduce((sum, gain) => sum + gain, 0) >= step ? gaining.length : 0;
}

/** Return whether a node is worth sending, by the log-probability of its path (nats). */
export function sends(budget: Budget, logprob: number): boolean {
  return Math.exp(budget.logprob + logprob) >= budget.prices.node;
}

/** Memory rows, or a start, that a drafter cannot take. */
export class RowsMismatchError extends Error {}

/**
 * Propose tokens that follow a prefix. A drafter keeps caches, but every call names the whole prefix, so there is nothing to
 * roll back: a drafter drops by itself the entries that no longer match. The loop says when to draft; the host calls.
 */
export interface Drafter {
  /** Memory rows held, for positions `0..rows-1`. */
  readonly rows: number;
  /** Whether drafts without a memory row are useless. */
  readonly needsRows: boolean;
  /** When it stops if it writes offline; null for never. */
  readonly stoppingRule: StoppingRule | null;

  /**
   * Store memory rows of committed tokens.
   *
   * @param start absolute position of the first row, at most {@link rows}; later rows held are replaced.
   * @throws RowsMismatchError a gap between the rows held and `start`, or another shape.
   */
  addRows(start: number, keys: KvArray, values: KvArray): void;

  /** Forget the rows of positions `length` and above. */
  truncateRows(length: number): void;

  /**
   * Return tokens that may follow `prefix`, the conversation's tokens from position 0. Until that is done the drafter gets no
   * other call and no rows.
   *
   * If the target samples, a drafter may use `sampling` to guess with the target's own noise, see `GumbelCoupling`; the committed token
   * is the target's choice in any case. Greedy if omitted.
   *
   * @returns as many as pay: if `budget.levels` allows any, the first level is always drafted. A chain is a tree without
   *   branches. Empty if nothing is known, or the context is full.
   */
  propose(prefix: readonly number[], budget: Budget, sampling?: Sampling): DraftTree | Promise<DraftTree>;
}
