/** The Mixture of Attentions drafter on a device: a graph and its caches. */

import { chainInputs, type Graph, type GraphCache, type StepResult } from "../backends/base.js";
import type { StoppingRule } from "../offline_stopping.js";
import type { KvArray } from "../session/memory_rows.js";
import { GREEDY, type Sampling } from "../session/sampling.js";
import { NOTHING, prependChain, type DraftTree } from "../session/tree.js";
import { append, commonLength } from "../tokens.js";
import { continued, type Budget, type DraftToken, type Drafter } from "./base.js";
import { GumbelCoupling, NO_COUPLING } from "./gumbel_coupling.js";
import { checkRows } from "./kv_buffer.js";
import { LONGEST_SUFFIX, worthCopying, type NgramMixture } from "./ngram.js";
import { GrowingTree } from "./tree_growth.js";

const CATCH_UP_TOKENS = 512;
const MORE_LIKELY_THAN_NOT = Math.log(0.5);
const SURE = Math.log(0.9);

export interface MoaOptions {
  /** Positions the target can hold; no token is drafted beyond. */
  readonly maxContext: number;
  /**
   * Ids that end a turn. One is drafted only if its probability exceeds one half: a wrong guess would end an offline text,
   * and online it is no worse than another token.
   */
  readonly stopTokens?: Iterable<number>;
  /** Mixes the graph's candidates with copies; undefined to take them as they are. */
  readonly mixture?: NgramMixture | undefined;
  /** When it stops if it writes offline; null for never. */
  readonly stoppingRule?: StoppingRule | null;
}

/**
 * Draft with the device half.
 *
 * The cache remembers its tokens. Entries of tokens without a memory row may depend on the rows that were held (in a device
 * half that ends with layers of the target they do), so they are computed again when rows change.
 */
export class MoaDrafter implements Drafter {
  readonly stoppingRule: StoppingRule | null;
  private readonly maxContext: number;
  private readonly stopTokens: ReadonlySet<number>;
  private readonly mixture: NgramMixture | undefined;
  private coupling = NO_COUPLING;
  private readonly cached: number[] = [];
  private readonly cache: GraphCache;
  private held = 0; // memory rows
  private hasZeroRow = false; // in the place of the first row
  private rowsOfCache = 0; // rows with which the cache was computed
  private rowsKept = 0; // leading ones of these that are unchanged

  /** @param graph the device half or the writer, which may serve several drafters. */
  constructor(
    private readonly graph: Graph,
    { maxContext, stopTokens = [], mixture, stoppingRule = null }: MoaOptions,
  ) {
    this.maxContext = Math.min(maxContext, graph.maxPositions ?? Infinity);
    this.stopTokens = new Set(stopTokens);
    this.mixture = mixture;
    this.stoppingRule = stoppingRule;
    this.cache = graph.open();
  }

  get rows(): number {
    return this.held;
  }

  get needsRows(): boolean {
    return this.graph.rowShape !== undefined;
  }

  addRows(start: number, keys: KvArray, values: KvArray): void {
    const { rowShape } = this.graph;
    if (rowShape) {
      checkRows(start, keys, values, this.held, rowShape);
      this.cache.putRows(start, keys, values);
    }
    this.held = start + keys.count;
    this.hasZeroRow = false;
    this.rowsKept = Math.min(this.rowsKept, start);
  }

  truncateRows(length: number): void {
    this.held = Math.max(0, Math.min(this.held, length));
    if (!this.held) this.hasZeroRow = false;
    this.rowsKept = Math.min(this.rowsKept, this.held);
  }

  /** Free its caches. It cannot draft afterwards. */
  close(): void {
    this.cache.close();
  }

  /**
   * Draft a chain of the likeliest tokens, or a tree, which grows level by level. Copies of the mixture continue both without
   * a step: a chain while all of it is likely enough ({@link worthCopying}), a tree while they are among the likeliest nodes.
   * See {@link Drafter.propose}.
   *
   * @throws RangeError an empty prefix.
   * @throws EngineError the engine fails; the drafter may be asked again.
   */
  async propose(prefix: readonly number[], budget: Budget, sampling: Sampling = GREEDY): Promise<DraftTree> {
    if (!prefix.length) throw new RangeError("cannot draft from an empty prefix");
    const depth = Math.min(budget.depth, this.maxContext - prefix.length);
    if (depth < 1 || budget.nodes < 1) return NOTHING;
    this.mixture?.confirm(prefix.slice(0, prefix.length - budget.tentative));
    this.coupling = new GumbelCoupling(sampling);
    const fitting = { ...budget, depth, levels: Math.min(budget.levels, depth) };
    return budget.branches && budget.levels ? this.tree([...prefix], fitting) : this.chain([...prefix], fitting);
  }

  private async chain(text: number[], budget: Budget): Promise<DraftTree> {
    const start = text.length;
    const rows = this.rowsFor(start);
    const logprobs: number[] = [];
    const steps: number[] = [];
    const levels = Math.min(budget.levels, budget.nodes);
    let logprob = 0;
    let ended = false;
    while (logprobs.length < levels && !ended && (!logprobs.length || continued(budget, [logprob]))) {
      let token = this.surelyCopied(text);
      if (!token) {
        token = this.best(await this.catchUp(text, rows), text);
        steps.push(1);
      }
      text.push(token.token);
      logprobs.push(token.logprob);
      logprob += token.logprob;
      ended = this.stopTokens.has(token.token);
    }
    if (this.mixture && !ended) {
      const most = Math.min(budget.depth, budget.nodes);
      for (const token of this.mixture.copies(text, this.coupling)) {
        logprob += token.logprob;
        if (logprobs.length >= most || !worthCopying(budget, logprob)) break;
        text.push(token.token);
        logprobs.push(token.logprob);
      }
    }
    return prependChain({ ...NOTHING, steps }, text.slice(start), logprobs);
  }

  private async tree(text: number[], budget: Budget): Promise<DraftTree> {
    const tree = new GrowingTree(budget, this.stopTokens);
    const { length } = text;
    // The cache holds the nodes that were expanded, too.
    const room = (this.graph.maxPositions ?? Infinity) - length;
    const levels = Math.min(budget.levels, 1 + Math.floor(room / budget.width));
    const rows = this.rowsFor(length);
    tree.addLevel(this.candidates(await this.catchUp(text, rows), text, [[]]));
    while (tree.depth < levels) {
      const { paths, mask } = tree.expand();
      if (!paths.length) break;
      // While the tree grows, its cache entries follow those of the prefix.
      const result = await this.cache.step({
        tokens: Int32Array.from(paths, (path) => path.at(-1)!),
        positions: new Int32Array(paths.length).fill(length + tree.depth - 1),
        queries: Int32Array.from(paths.keys()),
        mask: maskAfter(length, mask),
        rows,
      });
      tree.addLevel(this.candidates(result, text, paths));
    }
    this.cache.truncate(length);
    const { mixture, coupling } = this;
    if (mixture) {
      const tail = text.slice(-LONGEST_SUFFIX);
      const before = length - tail.length;
      tree.lengthen((path) => mixture.copies([...tail, ...path], coupling, before), budget.depth - tree.depth);
    }
    return tree.best();
  }

  /** Feed the tokens of `prefix` that the cache lacks; return the candidates after the last one. */
  private async catchUp(prefix: readonly number[], rows: number): Promise<StepResult> {
    // The last token is fed again even if cached: its query predicts the next one.
    const keep = Math.min(commonLength(this.cached, prefix), prefix.length - 1);
    this.forgetFrom(keep);
    for (let start = keep; ; start += CATCH_UP_TOKENS) {
      const result = await this.feed(prefix.slice(start, start + CATCH_UP_TOKENS), rows);
      if (start + CATCH_UP_TOKENS >= prefix.length) return result;
    }
  }

  /** Run one step over tokens that follow the cached ones, with a query at the last; extend the cache. */
  private async feed(tokens: readonly number[], rows: number): Promise<StepResult> {
    const held = this.cached.length;
    const result = await this.cache.step(chainInputs(tokens, held, rows));
    append(this.cached, tokens);
    return result;
  }

  /** Return the number of memory rows for a draft at this length; drop cached entries that were computed with other rows. */
  private rowsFor(positions: number): number {
    // Rows after the prefix belong to tokens that the draft has to predict.
    const held = Math.min(this.held, positions);
    const kept = Math.min(this.rowsKept, held);
    if (kept !== held || held !== this.rowsOfCache) {
      this.forgetFrom(held);
      this.rowsOfCache = this.rowsKept = held;
    }
    const { rowShape } = this.graph;
    if (!rowShape || held > 0) return rowShape ? held : 0;
    // A softmax needs one row. A zero row has a zero value, so it adds nothing to the residual. The target's own layers
    // recognise it by its zeros, because there it would take attention from the tokens.
    if (!this.hasZeroRow) {
      const { kvHeads, headDim } = rowShape;
      const zero = { kvHeads, headDim, count: 1, data: new Float32Array(kvHeads * headDim) };
      this.cache.putRows(0, zero, zero);
      this.hasZeroRow = true;
    }
    return 1;
  }

  private forgetFrom(length: number): void {
    this.cached.length = Math.min(this.cached.length, length);
    this.cache.truncate(length);
  }

  /** Return a copy that is likely enough to save a step of the model. */
  private surelyCopied(text: readonly number[]): DraftToken | undefined {
    const copy = this.mixture?.copy(text, this.coupling);
    return copy && copy.logprob > SURE ? copy : undefined;
  }

  private best(result: StepResult, text: number[]): DraftToken {
    const [candidates] = this.candidates(result, text, [[]]);
    const likely = ({ token, logprob }: DraftToken): boolean => !this.stopTokens.has(token) || logprob > MORE_LIKELY_THAN_NOT;
    return candidates!.find(likely) ?? candidates![0]!;
  }

  /** Return the candidates of each query, best first, after `text` and one of the `paths`, which have the same length. */
  private candidates(
    result: StepResult,
    text: number[],
    paths: readonly (readonly number[])[],
  ): (readonly DraftToken[])[] {
    const { length } = text;
    const width = result.tokens.length / paths.length;
    return paths.map((path, query) => {
      const ranked: DraftToken[] = [];
      for (let at = query * width; at < (query + 1) * width; at++) {
        ranked.push({ token: result.tokens[at]!, logprob: result.logprobs[at]! });
      }
      append(text, path); // in place: the text may be long
      const mixed = this.mixture?.mix(ranked, text) ?? ranked;
      text.length = length;
      return this.coupling.ranked(mixed, length + path.length);
    });
  }
}

/** Return a mask, row by row, that shows the whole prefix, and the tree's nodes as `mask` does. */
function maskAfter(length: number, mask: readonly (readonly boolean[])[]): Uint8Array {
  const width = length + mask[0]!.length;
  const whole = new Uint8Array(mask.length * width);
  mask.forEach((row, at) => {
    whole.fill(1, at * width, at * width + length);
    whole.set(row.map(Number), at * width + length);
  });
  return whole;
}
