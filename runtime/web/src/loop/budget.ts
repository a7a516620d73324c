/** What a draft may be at most, and what its parts cost. */

import type { Limits } from "../session/handshake.js";
import type { Conditions } from "./settings.js";

/**
 * What the parts of a draft cost, each in tokens that the same time brings elsewhere. A part pays where it is expected to
 * bring more: tokens a second are largest when all parts that pay are taken (Dinkelbach 1967).
 */
export interface Prices {
  /** Of a step of the model, however many nodes it continues. */
  readonly step: number;
  /** Of each node that a step continues. */
  readonly query: number;
  /** Of each token sent. */
  readonly node: number;
  /** Share of tokens that are right where those before them are. */
  readonly follows: number;
}

export const FREE: Prices = { step: 0, query: 0, node: 0, follows: 1 };

/** Of one more token of a chain: a step, which continues one node, and sending it. */
export function tokenPrice(prices: Prices): number {
  return prices.step + prices.query + prices.node;
}

export interface Budget {
  /** Tokens sent. */
  readonly nodes: number;
  /** Tokens of a path that the model drafts; what it knows without a step may follow. */
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
  /** Of these (nats). */
  readonly logprob: number;
}

/** A budget with what is usual where nothing is said. */
export function budgetOf(nodes: number, levels: number, rest: Partial<Budget> = {}): Budget {
  return { nodes, levels, width: 1, branches: false, depth: 2 ** 30, prices: FREE, tentative: 0, logprob: 0, ...rest };
}

/** A text that may still change is drafted token by token, so that frames are never waited for. */
export const ONE = budgetOf(1, 1);

/**
 * How many nodes of a level the next step should continue; 0 where the step does not pay.
 *
 * @param logprobs of the paths to the nodes, best first (nats).
 */
export function continued(budget: Budget, logprobs: readonly number[]): number {
  const { step, query, node, follows } = budget.prices;
  const gains = logprobs.slice(0, budget.width).map((one) => Math.exp(budget.logprob + one) * follows - query - node);
  const gaining = gains.filter((gain) => gain >= 0);
  return gaining.reduce((sum, gain) => sum + gain, 0) >= step ? gaining.length : 0;
}

/**
 * What verifier, answer and host allow of it.
 *
 * @param room tokens that the answer may still have, null without a limit.
 */
export function within(budget: Budget, limits: Limits, room: number | null, conditions: Conditions): Budget {
  return {
    ...budget,
    nodes: Math.min(budget.nodes, limits.maxDraftTokens),
    levels: conditions.lowPower || conditions.metered ? 0 : budget.levels,
    branches: budget.branches && limits.trees,
    depth: room === null ? budget.depth : Math.min(budget.depth, room),
  };
}

/** What is left of it behind so many tentative tokens, by the log-probability of all of them (nats). */
export function behind(budget: Budget, tentative: number, logprob: number): Budget {
  if (!tentative) return budget;
  const levels = continued(budget, [logprob]) ? Math.max(0, budget.levels - tentative) : 0;
  return { ...budget, nodes: Math.max(0, budget.nodes - tentative), levels, tentative, logprob };
}

/** Whether a node is worth sending, by the log-probability of its path (nats). */
export function sends(budget: Budget, logprob: number): boolean {
  return Math.exp(budget.logprob + logprob) >= budget.prices.node;
}
