/**
 * Draft trees that follow the drafter's own confidence (EAGLE-2, arXiv 2406.16858, section 4). A tree grows level by level:
 * the likeliest nodes of a level are continued, each by its likeliest tokens. In the end the likeliest nodes of all levels
 * are kept. A node's score is the log-probability of the whole path to it, which falls along every path, so the kept nodes
 * form a tree, too. Tokens that are known without the drafter may continue paths after the last level.
 */

import type { DraftTree } from "../session/tree.js";
import { continued, sends, type Budget, type DraftToken } from "./base.js";

interface Node {
  readonly token: number;
  readonly parent: number; // -1 is the last token of the prefix
  readonly score: number;
}

/** A growing tree. Nodes are numbered from 0 in the order in which they were added. */
export class GrowingTree {
  /** Levels so far. */
  depth = 0;
  private readonly stopTokens: ReadonlySet<number>;
  private readonly nodes: Node[] = [];
  private readonly expanded: number[] = [];
  private readonly steps: number[] = [];
  private level = 0; // the first node of the newest level
  private levelEnd = 0;

  /**
   * @param budget its largest size, and the cost of its parts.
   * @param stopTokens ids that end a turn; they are not continued.
   */
  constructor(
    private readonly budget: Budget,
    stopTokens: Iterable<number> = [],
  ) {
    this.stopTokens = new Set(stopTokens);
  }

  /** Add a level: candidates after each of {@link expand}'s nodes, or after the prefix if nothing was added yet. */
  addLevel(continuations: readonly (readonly DraftToken[])[]): void {
    const parents = this.nodes.length ? this.expanded.slice(this.expanded.length - continuations.length) : [-1];
    const first = this.nodes.length;
    this.steps.push(parents.length);
    parents.forEach((parent, at) => continuations[at]!.forEach((candidate) => this.add(candidate, parent)));
    this.level = first;
    this.levelEnd = this.nodes.length;
    this.depth++;
  }

  /**
   * Choose the nodes of the newest level to continue.
   *
   * @returns their paths, tokens from the tree's first level to the node itself, none if no step pays; and for each node a
   *   mask of the nodes expanded earlier and now: whether they are on its path, itself included.
   */
  expand(): { paths: number[][]; mask: boolean[][] } {
    const likeliest = this.likeliest();
    const scores = likeliest.map((node) => this.nodes[node]!.score);
    const chosen = likeliest.slice(0, continued(this.budget, scores));
    this.expanded.push(...chosen);
    const paths = chosen.map((node) => this.path(node));
    const mask = paths.map((path) => this.expanded.map((node) => path.includes(node)));
    return { paths: paths.map((path) => this.tokens(path)), mask };
  }

  /**
   * Continue each of the newest level's likeliest nodes by a chain, as far as its tokens can be among the kept nodes.
   *
   * @param known returns the tokens that follow a path, possibly without end.
   * @param room tokens of a chain at most.
   */
  lengthen(known: (path: readonly number[]) => Iterable<DraftToken>, room: number): void {
    const kept = this.nodes.map(({ score }) => score).sort((a, b) => b - a);
    const least = kept[this.budget.nodes - 1] ?? -Infinity;
    for (const start of this.likeliest()) {
      let node = start;
      let left = Math.min(room, this.budget.nodes);
      if (left <= 0) continue;
      for (const follower of known(this.tokens(this.path(start)))) {
        const score = this.nodes[node]!.score + follower.logprob;
        if (score <= least || !sends(this.budget, score)) break;
        node = this.add(follower, node);
        if (--left <= 0) break;
      }
    }
  }

  /** Return the likeliest nodes, as many as may be sent and are worth it; at least the likeliest. */
  best(): DraftTree {
    const ranked = this.ranked([...this.nodes.keys()]).slice(0, this.budget.nodes);
    const worth = ranked.filter((node) => sends(this.budget, this.nodes[node]!.score));
    // A parent was added before its children.
    const kept = (worth.length ? worth : ranked.slice(0, 1)).sort((a, b) => a - b);
    const number = new Map(kept.map((node, at) => [node, at + 1]));
    const nodes = kept.map((node) => this.nodes[node]!);
    return {
      tokens: nodes.map(({ token }) => token),
      parents: nodes.map(({ parent }) => number.get(parent) ?? 0),
      scores: nodes.map(({ score }) => score),
      steps: [...this.steps],
    };
  }

  /** Return the nodes of the newest level to continue, best first. */
  private likeliest(): number[] {
    const nodes = [...this.nodes.keys()].slice(this.level, this.levelEnd);
    return this.ranked(nodes.filter((node) => !this.stopTokens.has(this.nodes[node]!.token))).slice(0, this.budget.width);
  }

  private ranked(nodes: number[]): number[] {
    return nodes.sort((a, b) => this.nodes[b]!.score - this.nodes[a]!.score);
  }

  private add({ token, logprob }: DraftToken, parent: number): number {
    this.nodes.push({ token, parent, score: logprob + (this.nodes[parent]?.score ?? 0) });
    return this.nodes.length - 1;
  }

  private tokens(nodes: readonly number[]): number[] {
    return nodes.map((node) => this.nodes[node]!.token);
  }

  /** Return the nodes from the first level to `node`. */
  private path(node: number): number[] {
    const path: number[] = [];
    for (let at = node; at >= 0; at = this.nodes[at]!.parent) path.unshift(at);
    return path;
  }
}
