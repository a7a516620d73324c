/** Drafters for a bundle. */

import type { Backend } from "../backends/base.js";
import type { Manifest } from "../bundle/manifest.js";
import { USUAL_MANNERS, type Manners } from "../offline_stopping.js";
import { MoaDrafter } from "./moa.js";
import { NgramMixture } from "./ngram.js";

/** How to make a drafter, in a form that can be sent to a worker. */
export interface DrafterPlan {
  readonly maxContext: number;
  readonly stopTokens: readonly number[];
  /** Whether the graph's candidates are mixed with copies from the conversation, see {@link NgramMixture}. */
  readonly ngrams: boolean;
  readonly manners: Manners | null;
}

/** Return the plan of a bundle's drafter. */
export function drafterPlan({ maxContext, stopTokens, manners }: Manifest): DrafterPlan {
  return { maxContext, stopTokens, ngrams: true, manners: manners ?? USUAL_MANNERS };
}

/** Return the plan of the writer, whose cache follows the conversation only while it writes. */
export function writerPlan({ maxContext, stopTokens, webWriter }: Manifest): DrafterPlan {
  return { maxContext: Math.min(maxContext, webWriter!.maxContext), stopTokens, ngrams: false, manners: null };
}

/** Return a drafter for one conversation; several may share `backend`, a bundle's graph. */
export function drafterOf({ maxContext, stopTokens, ngrams, manners }: DrafterPlan, backend: Backend): MoaDrafter {
  const mixture = ngrams ? new NgramMixture(stopTokens) : undefined;
  return new MoaDrafter(backend, { maxContext, stopTokens, mixture, manners });
}
