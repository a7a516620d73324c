/** Drafters for a bundle. */

import type { Graph } from "../backends/base.js";
import type { Manifest, WriterEntry } from "../bundle/manifest.js";
import { USUAL_STOPPING_RULE, type StoppingRule } from "../offline_stopping.js";
import { MoaDrafter } from "./moa.js";
import { NgramDrafter, NgramMixture } from "./ngram.js";

/** How to make a drafter, in a form that can be sent to a worker. */
export interface DrafterPlan {
  readonly maxContext: number;
  readonly stopTokens: readonly number[];
  /** Whether the graph's candidates are mixed with copies from the conversation, see {@link NgramMixture}. */
  readonly ngrams: boolean;
  readonly stoppingRule: StoppingRule | null;
}

/** Return the drafter of a bundle without a graph, which copies what was said before; undefined if the server is to draft. */
export function copyingDrafter({ architecture, stopTokens }: Manifest): NgramDrafter | undefined {
  // Copies without the target end in nonsense: it writes nothing offline.
  return architecture === "sssd" ? new NgramDrafter(stopTokens, { ...USUAL_STOPPING_RULE, longest: 0 }) : undefined;
}

/** Return the plan of a bundle's drafter. */
export function drafterPlan({ maxContext, stopTokens, manners }: Manifest): DrafterPlan {
  return { maxContext, stopTokens, ngrams: true, stoppingRule: manners ?? USUAL_STOPPING_RULE };
}

/** Return the plan of a writer, whose cache follows the conversation only while it writes. */
export function writerPlan({ maxContext, stopTokens }: Manifest, writer: WriterEntry): DrafterPlan {
  return { maxContext: Math.min(maxContext, writer.maxContext), stopTokens, ngrams: false, stoppingRule: null };
}

/** Return a drafter for one conversation; several may share a graph. */
export function drafterOf({ maxContext, stopTokens, ngrams, stoppingRule }: DrafterPlan, graph: Graph): MoaDrafter {
  const mixture = ngrams ? new NgramMixture(stopTokens) : undefined;
  return new MoaDrafter(graph, { maxContext, stopTokens, mixture, stoppingRule });
}
