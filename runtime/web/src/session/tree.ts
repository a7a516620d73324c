/**
 * Draft trees. Parents are counted as on the wire: 0 is the last committed token, `i` the i-th drafted token. The tree
 * `a(b, c(d))` is tokens `[a, b, c, d]`, parents `[0, 1, 1, 3]`; a chain of three has parents `[0, 1, 2]`.
 */

/** Drafted tokens of a tree as sent in a Draft, parents before children. */
export interface Branches {
  readonly tokens: readonly number[];
  readonly parents: readonly number[];
}

/** A draft tree with the drafter's scores. */
export interface DraftTree extends Branches {
  /** Log-probability of the path to each token (nats). */
  readonly scores: readonly number[];
  /** Number of nodes that each step of the model expanded. */
  readonly steps: readonly number[];
}

export const NOTHING: DraftTree = { tokens: [], parents: [], scores: [], steps: [] };

/** Return the number of levels. */
export function depthOf(tree: Branches): number {
  return Math.max(0, ...depths(tree.parents));
}

/** Return the depth of each token: 1 for children of the last committed token. `[0, 1, 1, 3]` -> `[1, 2, 2, 3]`. */
export function depths(parents: readonly number[]): number[] {
  const found: number[] = [];
  for (const parent of parents) found.push(parent === 0 ? 1 : found[parent - 1]! + 1);
  return found;
}

/** Return {@link likeliestPath} as a tree of its own. */
export function likeliestChain(tree: DraftTree): DraftTree {
  const path = likeliestPath(tree);
  const tokens = path.map((index) => tree.tokens[index]!);
  return { tokens, parents: [...path.keys()], scores: path.map((index) => tree.scores[index]!), steps: [] };
}

/** Return the indices of the path that follows the likeliest child. */
export function likeliestPath(tree: DraftTree): number[] {
  const children = new Map<number, number>(); // the likeliest of each node
  tree.parents.forEach((parent, index) => {
    const best = children.get(parent);
    if (best === undefined || tree.scores[index]! > tree.scores[best]!) children.set(parent, index);
  });
  const path: number[] = [];
  for (let at = children.get(0); at !== undefined; at = children.get(at + 1)) path.push(at);
  return path;
}

/** Prepend a chain of `tokens` with their own log-probabilities (nats) to the tree. */
export function prependChain(tree: DraftTree, tokens: readonly number[], logprobs: readonly number[]): DraftTree {
  if (!tokens.length) return tree;
  let sum = 0;
  const stem = logprobs.map((logprob) => (sum += logprob));
  return {
    tokens: [...tokens, ...tree.tokens],
    parents: [...tokens.keys(), ...tree.parents.map((parent) => parent + tokens.length)],
    scores: [...stem, ...tree.scores.map((score) => sum + score)],
    steps: tree.steps,
  };
}

/**
 * Walk down the tree from the last committed token.
 *
 * @param choice the target's choice after a node: 0, or a drafted token counted from 1.
 * @returns indices of the accepted path.
 */
export function walk(tree: Branches, choice: (node: number) => number | undefined): number[] {
  const path: number[] = [];
  for (let node = 0; ; ) {
    const chosen = choice(node);
    const step = tree.parents.findIndex((parent, index) => parent === node && tree.tokens[index] === chosen);
    if (step < 0) return path;
    path.push(step);
    node = step + 1;
  }
}

/** Steps of a confidence byte for each nat. */
const STEPS_PER_NAT = 16;

/**
 * Encode the probability of each token after its parent's path: `min(255, floor(-16 ln p + 0.5))`, one byte each. A
 * probability above 1 counts as 1, one that is not a number as 0.
 */
export function encodeConfidences({ parents, scores }: DraftTree): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(scores, (score, index) => {
    const parent = parents[index]!;
    const nats = (parent ? scores[parent - 1]! : 0) - score;
    if (nats <= 0) return 0;
    return nats < 255 / STEPS_PER_NAT ? Math.floor(nats * STEPS_PER_NAT + 0.5) : 255;
  });
}
